"""The process that decodes and resizes images, documents or videos. `decoding.py` starts and ends it.

Files come from strangers and are parsed by C libraries. This process runs those libraries without network or files, and
with limits on memory and time. This file runs as a script, whose arguments are `sys.path` as JSON and the kind of
files.

Protocol: a request is a line of JSON followed by `num_bytes` bytes of the file. The line contains the processor's
settings, an image's header, the maximum number of pixels per picture and the computing time limit in seconds. The
answer is a line of JSON: either `{"tiles": [[height, width], ...], "header": ...}`, followed by the pixels of the
tiles, or `{"refusal": ...}` with a predicate about the file, such as `is damaged`. The header is null for an image, the
page sizes of a document or the header of a video. If the request `measures`, there are no tiles. If it `reads` a
document, the header contains the texts of its pages, and there are no settings.
"""

from __future__ import annotations

import codecs
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.image_layout import ImageLayout
    from octavo.media.frames import Frames
    from octavo.media.pages import Pages
    from octavo.media.processor import Picture, UInt8
    from octavo.media.reels import Reel

# Memory besides the pixels, and per pixel, since several copies are made of them.
_BASE_BYTES, _BYTES_OF_PIXEL = 1 << 30, 32
# Limits a decoder that hangs without computing, or that has to wait on a busy machine.
_WAIT = 6.0  # multiple of the computing time limit


def main() -> None:
    """Serve requests over standard input and output until the input ends."""
    sys.path[:] = [str(Path(__file__).parents[2]), *json.loads(sys.argv[1])]
    from octavo.platform import limits

    _warm_up(sys.argv[2])
    limits.open_nothing()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        data = sys.stdin.buffer.read(request["num_bytes"])
        tiles, answer = _attempt(data, request)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        for tile in tiles:
            sys.stdout.buffer.write(tile.tobytes())
        sys.stdout.buffer.flush()


def _warm_up(kind: str) -> None:
    """Import everything that decoding needs by decoding sample files, because a later import would have to open a
    file.
    """
    if kind == "document":
        from octavo.media.pages import Pages, blank_document

        list(Pages(blank_document()).pictures([0]))
        Pages(blank_document()).texts()
        codecs.lookup("utf-16-le")  # for texts that are not empty
    elif kind == "video":
        from octavo.media.frames import Frames, blank_video

        list(Frames(blank_video(), 1 << 20).pictures([0]))
    from PIL import Image

    from octavo.media.headers import read_header
    from octavo.media.pictures import picture_of
    from octavo.media.pixels import resized
    from octavo.media.processor import image_families

    image_families()
    exif = Image.Exif()
    exif[0x0112] = 3
    for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8)).save(buffer, name, exif=exif.tobytes())
        header = read_header(buffer.getvalue())
        picture = picture_of(Image.open(buffer, formats=[header.kind]), header.orientation)
        resized(picture.pixels, 4, 4, Image.Resampling.BICUBIC)


def _attempt(data: bytes, request: dict[str, Any]) -> tuple[tuple[UInt8, ...], dict[str, Any]]:
    """Return the tiles and the answer about them. A computation that takes longer than allowed kills the process."""
    from octavo.errors import UsageError
    from octavo.platform import limits

    most = _BASE_BYTES + _BYTES_OF_PIXEL * request["pixels"]
    limits.limit_memory(most, raises=True)
    limits.start_clock(request["seconds"], _WAIT * request["seconds"])
    try:
        if request.get("reads"):
            return (), {"tiles": [], "header": _texts(data)}
        tiles, header = (_tiles(data, request), None) if request["kind"] == "image" else _shots(data, request)
        return tiles, {"tiles": [tile.shape[:2] for tile in tiles], "header": header}
    except UsageError as error:
        refusal = str(error)
    except MemoryError:
        refusal = "needs more memory to decode than it may use"
    except EOFError:
        refusal = "is damaged: it ends early"
    except Exception as error:  # anything that a file can provoke in a decoder
        refusal = "is damaged: it ends early" if "truncated" in str(error) else f"is damaged: {type(error).__name__}"
    finally:
        limits.stop_clock()
    return (), {"refusal": refusal}


def _texts(data: bytes) -> list[str]:
    from octavo.media.pages import Pages

    return Pages(data).texts()


def _tiles(data: bytes, request: dict[str, Any]) -> tuple[UInt8, ...]:
    from PIL import Image, ImageFile

    from octavo.media.headers import ImageHeader
    from octavo.media.pictures import picture_of
    from octavo.media.processor import read_processor

    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.MAX_IMAGE_PIXELS = None  # the caller has already compared the size with its own limit
    header = ImageHeader(**request["header"])
    image = Image.open(io.BytesIO(data), formats=[header.kind])
    if image.size != (header.stored_width, header.stored_height):
        raise ValueError("two sizes")
    processor = read_processor(*request["settings"])
    picture = picture_of(image, header.orientation)
    return processor.resize(picture, processor.layout(picture.width, picture.height))


def _shots(data: bytes, request: dict[str, Any]) -> tuple[tuple[UInt8, ...], Any]:
    """Return the tiles of all items of a document or a video, and its header."""
    from octavo.media.processor import read_processor
    from octavo.media.reels import reel_of

    processor = read_processor(*request["settings"])
    source: Pages | Frames
    header: Any
    resize: Callable[[Sequence[Picture], ImageLayout], tuple[UInt8, ...]]
    if request["kind"] == "document":
        from octavo.media.pages import Pages

        source = Pages(data)
        header = source.sizes()
        resize = lambda pages, layout: processor.resize(pages[0], layout)  # noqa: E731
    else:
        from octavo.media.frames import Frames

        source = Frames(data, request["pixels"])
        header, resize = asdict(source.header()), processor.frame_tiles
    if request["measures"]:
        return (), header
    reel = reel_of(request["kind"], header, processor)
    numbers = sorted({number for group in reel.frames for number in group})
    return tuple(_cut(source.pictures(numbers), reel, resize)), header


def _cut(
    pictures: Iterator[tuple[int, Picture]],
    reel: Reel,
    resize: Callable[[Sequence[Picture], ImageLayout], tuple[UInt8, ...]],
) -> Iterator[UInt8]:
    """Yield the tiles of each item. Only one item's pictures are in memory at a time."""
    kept: dict[int, Picture] = {}
    for layout, group in zip(reel.layouts, reel.frames, strict=True):
        while group[-1] not in kept:
            number, picture = next(pictures)
            kept[number] = picture
        yield from resize([kept[number] for number in group], layout)
        kept = {number: picture for number, picture in kept.items() if number >= group[-1]}


if __name__ == "__main__":
    main()
