"""Small videos and PDF documents, generated without files from elsewhere."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.support.tiny_vision import picture


def frames(count: int, height: int, width: int) -> NDArray[np.uint8]:
    """Return [count, height, width, 3] with different soft shapes in each frame."""
    return np.stack([picture(seed, height, width).pixels for seed in range(count)])


def encoded_video(pixels: NDArray[np.uint8], rate: int, kind: str = "matroska", codec: str = "ffv1") -> bytes:
    """Return the file of a video; FFV1 keeps the pixels exactly."""
    import av

    buffer = io.BytesIO()
    pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, width=pixels.shape[2], height=pixels.shape[1], pix_fmt=pix_fmt)
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def encoded_document(pages: list[Image.Image]) -> bytes:
    """Return a PDF file with a picture on each page, one pixel per point."""
    buffer = io.BytesIO()
    pages[0].save(buffer, "PDF", save_all=True, append_images=pages[1:], resolution=72)
    return buffer.getvalue()


def text_document(*pages: str) -> bytes:
    """Return a PDF file with a line of text on each page; an empty string leaves a page without text."""
    numbers = range(4, 4 + 2 * len(pages), 2)
    kids = " ".join(f"{number} 0 R" for number in numbers)
    objects = {
        1: "<< /Type /Catalog /Pages 2 0 R >>",
        2: f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        3: "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    }
    for number, line in zip(numbers, pages, strict=True):
        shown = f"BT /F1 12 Tf 20 60 Td ({line}) Tj ET" if line else ""
        fonts = "/Resources << /Font << /F1 3 0 R >> >>"
        objects[number] = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 100] {fonts} /Contents {number + 1} 0 R >>"
        objects[number + 1] = f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream"
    body, places = "%PDF-1.4\n", []
    for number in sorted(objects):
        places.append(len(body))
        body += f"{number} 0 obj\n{objects[number]}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    count = len(objects) + 1
    end = f"xref\n0 {count}\n0000000000 65535 f \n{table}trailer\n<< /Size {count} /Root 1 0 R >>\n"
    return f"{body}{end}startxref\n{len(body)}\n%%EOF\n".encode()


def turned_video(pixels: NDArray[np.uint8], rate: int) -> bytes:
    """Return an MP4 file to be shown rotated clockwise by a quarter turn, as phones record it."""
    data = bytearray(encoded_video(pixels, rate, "mp4", "mpeg4"))
    at = data.index(b"tkhd") + 4 + 40  # version 0: its matrix is behind 40 bytes
    one = 1 << 16
    for i, value in enumerate((0, one, 0, -one & 0xFFFFFFFF, 0, 0, pixels.shape[1] * one, 0, 1 << 30)):
        data[at + 4 * i : at + 4 * i + 4] = value.to_bytes(4, "big")
    return bytes(data)
