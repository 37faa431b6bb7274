"""Small videos and PDF documents, made without files of others."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.support.tiny_vision import picture


def frames(count: int, height: int, width: int) -> NDArray[np.uint8]:
    """[count, height, width, 3]: other soft shapes in each."""
    return np.stack([picture(seed, height, width).pixels for seed in range(count)])


def encoded_video(pixels: NDArray[np.uint8], rate: int, kind: str = "matroska", codec: str = "ffv1") -> bytes:
    """The file of a video; that of FFV1 has the same pixels."""
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
    """A PDF file with a picture on each page, of a pixel for each point."""
    buffer = io.BytesIO()
    pages[0].save(buffer, "PDF", save_all=True, append_images=pages[1:], resolution=72)
    return buffer.getvalue()
