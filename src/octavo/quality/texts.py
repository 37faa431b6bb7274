"""The text that a model is evaluated on: a file, or the built-in one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from octavo.errors import UsageError
from octavo.tokenizer.tokenizer import Tokenizer

MAX_FILE_BYTES = 1 << 28
_PARTS = ("prose.txt", "code.txt")


@dataclass(frozen=True, slots=True)
class JudgedText:
    """A text to evaluate models on.

    name: a path, or `built-in`.
    """

    name: str
    text: str

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of the whole text, with the special tokens that the model's texts begin with."""
        return [*tokenizer.prefix_ids, *tokenizer.encode(self.text, add_special_tokens=False)]


def read_text(path: Path | None) -> JudgedText:
    """Read a UTF-8 file. None returns the built-in text, half prose and half code (`data/README.md`).

    Raises UsageError if the file cannot be read, is empty, too long or not UTF-8.
    """
    if path is None:
        folder = resources.files("octavo.quality") / "data"
        return JudgedText("built-in", "".join((folder / name).read_text("utf-8") for name in _PARTS))
    return JudgedText(str(path), read_utf8(path))


def read_utf8(path: Path) -> str:
    """Read the text of a file unchanged. Raises UsageError if it cannot be read, is empty, too long or not UTF-8."""
    try:
        text = read_limited(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8") from None
    if not text.strip():
        raise UsageError(f"{path} is empty; give a file with text")
    return text


def read_limited(path: Path) -> bytes:
    """Read the bytes of a file. Raises UsageError if it cannot be read, or has more than `MAX_FILE_BYTES`."""
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UsageError(f"{path} has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
