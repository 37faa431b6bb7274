"""Rendering of PDF pages to pictures with pdfium. Used only in the decoding process."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence

import pypdfium2

from octavo.errors import UsageError
from octavo.media.processor import Picture

MAX_PAGES = 100
_SCALE = 2.0  # 144 pixels per inch
_LONGEST_SIDE = 2048  # in pixels
_MAX_CHARS = 4_000_000


class Pages:
    """An open document.

    Raises UsageError if the document needs a password or has more than MAX_PAGES pages. The message is a predicate
    about the document, such as `has 900 pages`.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._document = pypdfium2.PdfDocument(data)
        except pypdfium2.PdfiumError as error:
            if "password" in str(error).lower():
                raise UsageError("is protected by a password: remove the password and send it again") from None
            raise
        if not 0 < len(self._document) <= MAX_PAGES:
            raise UsageError(f"has {len(self._document)} pages; 1 to {MAX_PAGES} are allowed: send a part of it")

    def sizes(self) -> list[tuple[int, int]]:
        """Return (width, height) of each page in pixels."""
        return [self._size(number)[1:] for number in range(len(self._document))]

    def texts(self) -> list[str]:
        """Return the text layer of each page, or an empty string for a page without text, such as a scan."""
        found, size = [], 0
        for number in range(len(self._document)):
            page = self._document[number]
            layer = page.get_textpage()
            text = layer.get_text_bounded().replace("\r\n", "\n").strip()
            layer.close()
            page.close()
            size += len(text)
            if size > _MAX_CHARS:
                raise UsageError(f"has more than {_MAX_CHARS:,} characters of text: send a part of it")
            found.append(text)
        return found

    def pictures(self, numbers: Sequence[int]) -> Iterator[tuple[int, Picture]]:
        """Yield each of these pages with its number, rendered on white."""
        for number in numbers:
            scale, width, height = self._size(number)
            page = self._document[number]
            pixels = page.render(scale=scale, rev_byteorder=True).to_numpy()
            page.close()
            if pixels.shape[:2] != (height, width):
                raise ValueError("two sizes")
            yield number, Picture(pixels[:, :, :3].copy())

    def _size(self, number: int) -> tuple[float, int, int]:
        """Return the scale of a page, and its size in pixels."""
        width, height = self._document.get_page_size(number)
        scale = min(_SCALE, _LONGEST_SIDE / max(width, height, 1))
        return scale, math.ceil(width * scale), math.ceil(height * scale)


def blank_document() -> bytes:
    """Return a PDF file with one empty page."""
    document, buffer = pypdfium2.PdfDocument.new(), io.BytesIO()
    document.new_page(8, 8)
    document.save(buffer)
    return buffer.getvalue()
