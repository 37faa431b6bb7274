"""Windows of a text's tokens, following two conventions for perplexity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from octavo.errors import UsageError

Convention: TypeAlias = Literal["chunks", "strided"]

DESCRIPTIONS: dict[Convention, str] = {
    "chunks": "llama.cpp's: chunks of {size} tokens, each from an empty cache; only the second half counts{bos}",
    "strided": "strided: windows of {size} tokens, {stride} apart; each counts only tokens that none before has seen",
}


@dataclass(frozen=True, slots=True)
class Window:
    """A window of a text's tokens, computed from an empty cache.

    first: index in the window of the first token that counts, at least 1.
    start: index of the same token in the text's tokens.
    """

    token_ids: list[int]
    first: int
    start: int

    @property
    def num_counted(self) -> int:
        return len(self.token_ids) - self.first


def chunk_windows(token_ids: Sequence[int], size: int, bos_token_id: int | None = None) -> list[Window]:
    """Cut chunks as `llama-perplexity` does.

    Only whole chunks are used, and only the tokens after the middle one of each chunk are counted.

    token_ids: tokens of the whole text, with its special tokens.
    bos_token_id: replaces the first token of each chunk, for a model whose texts begin with it.

    Raises UsageError if there is no whole chunk.
    """
    check_length(len(token_ids), size)
    windows = []
    for start in range(0, len(token_ids) - size + 1, size):
        chunk = list(token_ids[start : start + size])
        if bos_token_id is not None:
            chunk[0] = bos_token_id
        windows.append(Window(chunk, size // 2 + 1, start + size // 2 + 1))
    return windows


def strided_windows(token_ids: Sequence[int], size: int, stride: int) -> list[Window]:
    """Cut windows as transformers' guide to perplexity does: every token except the text's first counts once.

    Raises UsageError for a text of one token, or a stride longer than the window.
    """
    check_length(len(token_ids), 2)
    if not 1 <= stride <= size:
        raise UsageError(f"the stride is {stride}; it must be from 1 to the window's {size} tokens")
    windows, seen = [], 1
    for start in range(0, len(token_ids), stride):
        end = min(start + size, len(token_ids))
        if end > seen:
            first = max(seen - start, 1)  # if a window is as long as its stride, its first token has no context
            windows.append(Window(list(token_ids[start:end]), first, start + first))
        seen = end
        if end == len(token_ids):
            break
    return windows


def check_length(num_tokens: int, least: int) -> None:
    """Check that a text has at least `least` tokens, to fill its first window. Raises UsageError."""
    if num_tokens < least:
        what = "is empty" if num_tokens == 0 else f"has {num_tokens} tokens"
        raise UsageError(f"the text {what}; at least {least} are needed: use a longer text, or smaller windows")
