"""Progress in a notebook cell: a bar and a line of text per task, updated in place."""

from __future__ import annotations

import html
import time
from typing import Any

_RENEWED_S = 0.1


class CellBars:
    """The progress bars of one call. They only need IPython, no widgets."""

    def __init__(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

        self._rows: dict[str, tuple[int, int, str]] = {}
        self._shown_at = time.monotonic()
        self._handle: Any = display(self._content(), raw=True, display_id=True)

    def show(self, what: str, done: int, total: int, text: str) -> None:
        """Show `done` of `total` for a task, with a text after the bar.

        total: 0 if unknown.
        """
        self._rows[what] = done, total, text
        now = time.monotonic()
        if now - self._shown_at >= _RENEWED_S or done == total:
            self._shown_at = now
            self._handle.update(self._content(), raw=True)

    def end(self, *, vanish: bool) -> None:
        """Show the final numbers, or clear the output."""
        if vanish:
            self._rows.clear()
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        plain = "\n".join(f"{what}: {text}" for what, (_, _, text) in self._rows.items())
        bars = [
            f"<div>{html.escape(what)} <progress{f' value={done} max={total}' if total else ''}></progress> "
            f"{html.escape(text)}</div>"
            for what, (done, total, text) in self._rows.items()
        ]
        return {"text/plain": plain, "text/html": "".join(bars)}
