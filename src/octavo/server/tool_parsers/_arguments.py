"""The arguments of a call on their way out."""

from __future__ import annotations

from octavo.server.tool_parsers import CallArguments, Part
from octavo.server.tool_parsers._json_value import JsonStringDecoder


class ArgumentsWriter:
    """The value of the arguments: passed on as it is, or held while it may be `null` or while the name is unknown."""

    def __init__(self) -> None:
        self.is_closed = False
        self._decoder: JsonStringDecoder | None = None
        self._has_begun = False
        self._held: list[str] = []  # decoded, waiting for the call's name
        self._scalar: list[str] | None = None
        self._is_empty = True

    def push(self, piece: str, parts: list[Part] | None) -> None:
        """More of the value. parts: None as long as the call has no name."""
        if not self._has_begun and piece:
            self._has_begun = True
            if piece[0] == '"':
                self._decoder = JsonStringDecoder()
            elif piece[0] not in "{[":
                self._scalar = []
        if self._scalar is not None:
            self._scalar.append(piece)
            return
        self._emit(self._decoder.push(piece) if self._decoder is not None else piece, parts)

    def close(self, parts: list[Part] | None) -> None:
        """The value is complete."""
        if self.is_closed:
            return
        self.is_closed = True
        scalar = "".join(self._scalar or [])
        if self._is_empty:
            self._emit("{}" if scalar in ("", "null") else scalar, parts)

    def flush(self, parts: list[Part]) -> None:
        """The call has its name: what was held for it."""
        text = "".join(self._held)
        self._held.clear()
        self._emit(text, parts)

    def finish(self, parts: list[Part]) -> None:
        """The value was cut off."""
        if not self.is_closed and self._scalar is not None:
            self._emit("".join(self._scalar), parts)
            self._scalar = None
        self.is_closed = True

    def _emit(self, text: str, parts: list[Part] | None) -> None:
        if not text:
            return
        self._is_empty = False
        if parts is None:
            self._held.append(text)
        else:
            parts.append(CallArguments(text))
