"""Conversion of Pillow images and arrays to pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.errors import UsageError
from octavo.media.processor import Picture

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL import Image

WHITE = (255, 255, 255, 255)
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def picture_of(image: Image.Image, orientation: int | None = None) -> Picture:
    """Convert a Pillow image of any mode to an upright RGB picture, with transparency on white.

    orientation: EXIF's number, 1 to 8, or None to use the image's own EXIF data
    """
    from PIL import Image, ImageOps  # an extra of the installation

    if orientation is None:
        turned = ImageOps.exif_transpose(image)
    else:
        turned = image if orientation == 1 else image.transpose(Image.Transpose[_TURNS[orientation]])
    if "A" in turned.getbands() or turned.info.get("transparency") is not None:
        layer = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", layer.size, WHITE), layer)
    return Picture(np.array(turned.convert("RGB")))


def picture_of_array(pixels: npt.NDArray[Any]) -> Picture:
    """Convert an array to a picture. Raises UsageError.

    pixels: uint8 [height, width] or [height, width, channels] with 1, 3 or, with transparency, 4 channels
    """
    from PIL import Image

    flat = pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    is_known = flat.ndim == 2 or (flat.ndim == 3 and flat.shape[2] in {3, 4})
    if pixels.dtype != np.uint8 or not is_known or 0 in flat.shape:
        raise UsageError(
            f"an image is an array of {pixels.dtype} {list(pixels.shape)}; it must be uint8 [height, width] or "
            "[height, width, 1, 3 or 4]",
            code="invalid_image",
        )
    return picture_of(Image.fromarray(flat))
