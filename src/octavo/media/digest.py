"""Digests of image content: equal digests mean equal rows of patches."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.media.processor import ImageProcessor


def content_digest(kind: str, data: bytes, processor: ImageProcessor) -> bytes:
    """Return a 32-byte digest of a file, its kind, and the version and settings of the processor.

    data: the file as it was sent, so that a file seen before need not be decoded
    """
    digest = hashlib.blake2b(digest_size=32, person=b"octavo.media")
    settings = processor.settings.canonical_text.encode()
    for part in (kind.encode(), settings, str(processor.version).encode(), data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
