"""Drawn images in the sizes and modes that image processors treat differently."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image

from octavo.errors import UsageError
from octavo.media.headers import read_header

SIZES: Mapping[str, tuple[int, int]] = {
    "square": (256, 256),
    "wide": (613, 140),
    "tall": (97, 451),
    "tiny": (5, 9),
    "large": (1777, 1201),
}


def noise(width: int, height: int, seed: int = 0, channels: int = 3) -> Image.Image:
    """Draw coarse noise with a gradient, so that rotated, mirrored and shifted images differ everywhere."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 160, (height // 7 + 1, width // 7 + 1, channels), dtype=np.uint8)
    pixels = np.kron(coarse, np.ones((7, 7, 1), np.uint8))[:height, :width]
    slope = np.linspace(0, 90, height)[:, None, None] + np.linspace(0, 5, width)[None, :, None]
    return Image.fromarray((pixels + slope).astype(np.uint8).squeeze())


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """Encode the image as a file of this format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def files() -> dict[str, bytes]:
    """Return files by what is special about them."""
    rgb, rgba = noise(90, 61), noise(90, 61, channels=4)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    palette = rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    deep = Image.fromarray((np.arange(90 * 61, dtype=np.uint16) * 11).reshape(61, 90))
    return {
        "jpeg": encoded(rgb, "JPEG", quality=90),
        "turned jpeg": encoded(rgb, "JPEG", exif=exif.tobytes()),
        "cmyk jpeg": encoded(rgb.convert("CMYK"), "JPEG"),
        "png": encoded(rgb, "PNG"),
        "png with alpha": encoded(rgba, "PNG"),
        "palette": encoded(palette, "PNG"),
        "palette with a transparent colour": encoded(palette, "PNG", transparency=3),
        "greyscale": encoded(rgb.convert("L"), "PNG"),
        "greyscale with alpha": encoded(rgba.convert("LA"), "PNG"),
        "one bit": encoded(rgb.convert("1"), "PNG"),
        "16 bits": encoded(deep, "PNG"),
        "webp": encoded(rgb, "WEBP", quality=80),
        "lossless webp with alpha": encoded(rgba, "WEBP", lossless=True),
        "gif": encoded(palette, "GIF"),
        "moving gif": encoded(palette, "GIF", save_all=True, append_images=[noise(90, 61, 5).convert("P")]),
        "bmp": encoded(rgb, "BMP"),
    }


def check_header(content: bytes) -> None:
    """Check that any bytes give a size or a refusal with a code; anything else is a bug."""
    try:
        header = read_header(content)
    except UsageError as error:
        if error.code != "invalid_image":
            raise AssertionError(f"a refusal without its code: {error}") from error
        return
    if min(header.size) < 1 or not 1 <= header.orientation <= 8:
        raise AssertionError(f"no size: {header}")
