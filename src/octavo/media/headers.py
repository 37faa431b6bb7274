"""The size of an image from the first bytes of its file, before anything is decoded."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from octavo.errors import UsageError

_MAX_PARTS = 1 << 16  # maximum number of parts of a file to look at
_ORIENTATION = 0x0112
_TURNED = frozenset({5, 6, 7, 8})
_MARKER = re.compile(rb"\xff+([^\xff])")  # the first byte may be repeated
_XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=\"|>)([1-8])")
_XMP_SIGNATURE = b"http://ns.adobe.com/xap/1.0/\x00"


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The header of an image file.

    kind: Pillow's name of the format
    stored_width, stored_height: size in pixels, as stored in the file
    orientation: EXIF's number, 1 to 8, of the rotation or flip that shows the picture upright
    """

    kind: str
    stored_width: int
    stored_height: int
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the upright picture."""
        width, height = self.stored_width, self.stored_height
        return (height, width) if self.orientation in _TURNED else (width, height)


def read_header(data: bytes) -> ImageHeader:
    """Read the header of a JPEG, PNG, WebP, GIF or BMP file. Raises UsageError for other formats and damaged files."""
    read = _reader_of(data)
    if read is None:
        raise UsageError("is not a JPEG, PNG, WebP, GIF or BMP file", code="invalid_image")
    try:
        header = read(data)
    except (struct.error, IndexError):
        raise damaged("it ends early") from None
    if not (header.stored_width and header.stored_height):
        raise damaged("it has no pixels")
    return header


def begins_image(data: bytes) -> bool:
    """Return True if a file that begins with these bytes may be a readable image.

    data: at least the first 12 bytes of the file
    """
    return _reader_of(data) is not None


def _reader_of(data: bytes) -> Callable[[bytes], ImageHeader] | None:
    """Return the function that reads the header of a file with these first bytes, or None if it is not a readable
    image.
    """
    if data.startswith(b"RIFF") and data[8:12] != b"WEBP":
        return None
    return next((read for signature, read in _READERS.items() if data.startswith(signature)), None)


def damaged(reason: str) -> UsageError:
    return UsageError(f"is damaged: {reason}", code="invalid_image")


def _read_jpeg(data: bytes) -> ImageHeader:
    size, orientation, xmp = None, 0, 0
    for marker, body in _jpeg_segments(data):
        if marker == 0xE1 and body.startswith(b"Exif\x00\x00") and not orientation:
            orientation = _exif_orientation(body[6:])
        elif marker == 0xE1 and body.startswith(_XMP_SIGNATURE):
            xmp = xmp or _xmp_orientation(body)
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            size = struct.unpack_from(">xHH", body)
    if size is None:
        raise damaged("it ends early")
    return ImageHeader("JPEG", size[1], size[0], orientation or xmp or 1)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (marker, content) of the segments before the pixels."""
    at = 2
    for _ in range(_MAX_PARTS):
        at = data.find(b"\xff", at)
        if at < 0:
            return
        found = _MARKER.match(data, at)
        if found is None:
            return
        marker, at = found[1][0], found.end()
        if marker == 0xDA:  # start of the pixels
            return
        if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD9:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        yield marker, data[at + 2 : at + length]
        at += max(length, 2)


def _read_png(data: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    orientation, xmp = 0, 0
    at = 8
    for i in range(_MAX_PARTS):
        if at + 8 > len(data):
            break
        length, name = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length] if name in (b"IHDR", b"eXIf", b"iTXt") else b""
        if i == 0:
            if name != b"IHDR":
                raise damaged("its first part is not a header")
            width, height = struct.unpack_from(">II", body)
            size = width, height
        elif name == b"eXIf":
            orientation = orientation or _exif_orientation(body)
        elif body.startswith(b"XML:com.adobe.xmp\x00\x00"):  # not compressed
            xmp = xmp or _xmp_orientation(body)
        elif name == b"IEND":
            break
        at += 12 + length
    if size is None:
        raise damaged("it ends early")
    return ImageHeader("PNG", *size, orientation or xmp or 1)


def _read_webp(data: bytes) -> ImageHeader:
    size, orientation, xmp = None, 0, 0
    at = 12
    for _ in range(_MAX_PARTS):
        if at + 8 > len(data):
            break
        name, length = struct.unpack_from("<4sI", data, at)
        body = data[at + 8 : at + 8 + min(length, 1 << 20)]
        if size is None:
            size = _webp_size(name, body)
        if name == b"EXIF" and not orientation:
            orientation = _exif_orientation(body.removeprefix(b"Exif\x00\x00"))
        elif name == b"XMP ":
            xmp = xmp or _xmp_orientation(body)
        at += 8 + length + length % 2
    if size is None:
        raise damaged("it ends early")
    return ImageHeader("WEBP", *size, orientation or xmp or 1)


def _webp_size(name: bytes, body: bytes) -> tuple[int, int] | None:
    if name == b"VP8X":
        low_width, high_width, low_height, high_height = struct.unpack_from("<4xHBHB", body)
        return (high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1
    if name == b"VP8L":
        (bits,) = struct.unpack_from("<xI", body)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if name == b"VP8 ":
        width, height = struct.unpack_from("<6xHH", body)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _read_gif(data: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    in_extension = False  # inside a series of blocks that ends with an empty one
    for _ in range(_MAX_PARTS):
        byte = data[at]
        if in_extension:
            in_extension = byte > 0
            at += byte + 1
        elif byte == 0x2C:  # the first frame, which may extend beyond the screen
            left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, at + 1)
            return ImageHeader("GIF", max(width, left + frame_width), max(height, top + frame_height))
        else:
            in_extension = byte == 0x21
            at += 2 if in_extension else 1
    raise damaged("it has no frame")


def _read_bmp(data: bytes) -> ImageHeader:
    (header_size,) = struct.unpack_from("<I", data, 14)
    if header_size == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        return ImageHeader("BMP", width, height)
    width, height = struct.unpack_from("<ii", data, 18)
    if width < 0:
        raise damaged("its width is negative")
    return ImageHeader("BMP", width, abs(height))


def _exif_orientation(data: bytes) -> int:
    """Return EXIF's number for the orientation of the pixels, or 0 if it is missing or unreadable."""
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(data[:4])
    if order is None:
        return 0
    try:
        (at,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, at)
        for i in range(count):
            tag, kind = struct.unpack_from(f"{order}HH", data, at + 2 + 12 * i)
            if tag == _ORIENTATION:
                (value,) = struct.unpack_from(f"{order}{'I' if kind == 4 else 'H'}", data, at + 10 + 12 * i)
                return value if 1 <= value <= 8 else 0
    except struct.error:
        return 0
    return 0


def _xmp_orientation(data: bytes) -> int:
    found = _XMP_ORIENTATION.search(data)
    return int(found[1]) if found else 0


_READERS = {
    b"\xff\xd8\xff": _read_jpeg,
    b"\x89PNG\r\n\x1a\n": _read_png,
    b"RIFF": _read_webp,
    b"GIF87a": _read_gif,
    b"GIF89a": _read_gif,
    b"BM": _read_bmp,
}
