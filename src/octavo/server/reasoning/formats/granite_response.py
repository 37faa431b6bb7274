"""Reasoning in `<think>` tags and the answer in `<response>` tags: Granite 3.3."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat, ReasoningParser
from octavo.server.tool_parsers.answer import WHITESPACE, Reading, marks_pattern

_OPEN, _CLOSE = "<response>", "</response>"
_CLOSE_PATTERN = marks_pattern([_CLOSE])


class ResponseParser(ReasoningParser):
    """Drops the tags around the answer. An answer without the first of them passes unchanged."""

    def _read_answer(self) -> Reading[None]:
        text, put = self._text, self._parts.append
        if (yield from text.find_beginning(_OPEN)) == _OPEN:
            text.take(len(_OPEN))
            yield from text.skip(WHITESPACE)
            while found := (yield from text.take_until(_CLOSE_PATTERN, put)):
                if found == _CLOSE:
                    text.take(len(_CLOSE))
                    break
                if text.is_over:
                    put(text.take(len(found)))
                else:
                    yield
        yield from super()._read_answer()


FORMAT = ReasoningFormat(
    "<think>", "</think>", matches=lambda template: f"{_OPEN}{_CLOSE}" in template, parser=ResponseParser
)
