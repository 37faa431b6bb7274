"""Files to tiles in the process without rights, and hostile files."""

from __future__ import annotations

import io
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from octavo.errors import UsageError
from octavo.media import decoding, picture_worker
from octavo.media.decoding import PictureDecoder
from octavo.media.headers import read_header
from octavo.media.pictures import picture_of
from octavo.media.processor import read_processor
from tests.support.pictures import check_header, encoded, files, noise

PROCESSOR = read_processor("qwen3_vl", {}, {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}})


@pytest.fixture(scope="module")
def decoder() -> Iterator[PictureDecoder]:
    made = PictureDecoder(num_processes=1, max_seconds=3)
    yield made
    made.close()


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG file with this size in its header, whatever it holds."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


@pytest.mark.parametrize("name", files())
def test_tiles_equal_those_of_this_process(decoder: PictureDecoder, name: str) -> None:
    data = files()[name]
    picture = picture_of(Image.open(io.BytesIO(data)))
    wanted = PROCESSOR.resize(picture, PROCESSOR.layout(picture.width, picture.height))
    layout, tiles = decoder.tiles(data, PROCESSOR)
    assert (layout.width, layout.height) == (picture.width, picture.height)
    assert [tile.tobytes() for tile in tiles] == [tile.tobytes() for tile in wanted]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_headers_know_how_a_picture_is_turned(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(40, 24), kind, exif=exif.tobytes())
    image = Image.open(io.BytesIO(data))
    header = read_header(data)
    assert (header.kind, header.orientation) == (kind, orientation)
    turned = ImageOps.exif_transpose(image)
    assert header.size == turned.size
    assert np.array_equal(picture_of(image, orientation).pixels, np.array(turned.convert("RGB")))


def test_xmp_turns_a_picture_that_exif_does_not() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encoded(noise(40, 24), "JPEG", xmp=xmp)
    assert read_header(data).size == ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size == (24, 40)


def test_a_large_size_is_refused_before_decoding(decoder: PictureDecoder) -> None:
    with pytest.raises(UsageError, match="is 12000 x 9000 pixels, more than the 50 million of --max-image-pixels") as e:
        decoder.tiles(png(12000, 9000), PROCESSOR)
    assert e.value.code == "image_too_large"
    small = PictureDecoder(1500, num_processes=1)
    with pytest.raises(UsageError, match="more than the 1,500 of --max-image-pixels"):
        small.tiles(png(100, 100), PROCESSOR)


HOSTILE = {
    "no image": (b"%PDF-1.7 nothing", "is not a JPEG, PNG, WebP, GIF or BMP file"),
    "tiff": (b"II*\x00" + bytes(100), "is not a JPEG, PNG, WebP, GIF or BMP file"),
    "empty": (b"", "is not a JPEG, PNG, WebP, GIF or BMP file"),
    "header alone": (b"\x89PNG\r\n\x1a\n", "ends early"),
    "no pixels": (png(0, 5), "has no pixels"),
    "half a png": (files()["png"][: len(files()["png"]) // 2], "ends early"),
    "half a jpeg": (files()["jpeg"][:1500], "ends early"),
    "half a webp": (files()["webp"][:300], "damaged"),
    "half a gif": (files()["gif"][:400], "damaged"),
    "half a bmp": (files()["bmp"][:900], "ends early"),
    "pixels missing": (png(500, 500, b"\0\1"), "damaged"),
    "wrong checksum": (files()["png"][:60] + b"\1\2\3" + files()["png"][63:], "damaged"),
    "another kind behind a signature": (b"GIF89a" + files()["png"], "damaged|more than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_files_are_refused(decoder: PictureDecoder, name: str) -> None:
    data, text = HOSTILE[name]
    with pytest.raises(UsageError, match=text) as error:
        decoder.tiles(data, PROCESSOR)
    assert error.value.code in {"invalid_image", "image_too_large"}
    decoder.tiles(files()["jpeg"], PROCESSOR)  # the process still serves


def test_a_file_that_computes_too_long_ends_its_process_only() -> None:
    hasty = PictureDecoder(num_processes=1, max_seconds=0.02)
    slow = encoded(noise(4000, 3000).convert("RGB"), "PNG", compress_level=1)
    with pytest.raises(UsageError, match=r"takes more than 0\.02 s or too much memory to decode"):
        hasty.tiles(slow, PROCESSOR)
    hasty._max_seconds = 10
    hasty.tiles(files()["png"], PROCESSOR)
    hasty.close()


def test_the_process_can_open_neither_files_nor_connections(tmp_path: Path) -> None:
    """The worker's own confinement, and then what a decoder with a hole might do."""
    program = f"""
import socket, sys
sys.path.insert(0, {str(Path(picture_worker.__file__).parents[2])!r})
from octavo.media import picture_worker
from octavo.platform import limits
limits.open_nothing()
for attempt in (lambda: open({str(tmp_path / "file")!r}, "w"), lambda: open("/etc/passwd"), socket.socket):
    try:
        attempt()
        print("opened")
    except OSError as error:
        print(type(error).__name__, error.errno)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["OSError 24"] * 3
    assert socket.socket  # the same here succeeds: the limits are the worker's


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, decoder: PictureDecoder) -> None:
    monkeypatch.setattr(decoding, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'octavo\[vision\]'"):
        decoder.tiles(files()["png"], PROCESSOR)


@pytest.mark.parametrize(
    "data",
    [b"\xff\xd8" + b"\xff" * (1 << 20), b"GIF89a" + b"\1\0\1\0\0\0\0" + b"\x21\xfe" + b"\1a" * (1 << 19)],
    ids=["jpeg", "gif"],
)
def test_headers_without_an_end_take_few_steps(data: bytes) -> None:
    """The lines that run are counted: the server reads headers between all other requests."""
    num_lines = 0

    def count(_frame: object, event: str, _arg: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    sys.settrace(count)
    try:
        with pytest.raises(UsageError, match="is damaged"):
            read_header(data)
    finally:
        sys.settrace(None)
    assert num_lines < len(data) / 2


@given(st.sampled_from(sorted(files())), st.data())
def test_headers_of_changed_files_are_read_or_refused(name: str, data: Any) -> None:
    changed = bytearray(files()[name])
    for _ in range(data.draw(st.integers(0, 4))):
        changed[data.draw(st.integers(0, min(len(changed), 120) - 1))] = data.draw(st.integers(0, 255))
    check_header(bytes(changed[: data.draw(st.integers(0, len(changed)))]))
