"""Reasoning before an answer that is in tags itself. The tags are dropped."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat, ReasoningParser
from octavo.server.tool_parsers.answer import WHITESPACE, Reading, marks_pattern


class TaggedAnswerParser(ReasoningParser):
    """Drops the tags around the answer. An answer without the opening tag is passed on unchanged."""

    def __init__(self, marks: ReasoningFormat, prompt: str, *, tags: tuple[str, str]) -> None:
        super().__init__(marks, prompt)
        self._tags = tags

    def _read_answer(self) -> Reading[None]:
        text, put, (opening, closing) = self._text, self._parts.append, self._tags
        pattern = marks_pattern([closing])
        if (yield from text.find_beginning(opening)) == opening:
            text.take(len(opening))
            yield from text.skip(WHITESPACE)
            while found := (yield from text.take_until(pattern, put)):
                if found == closing:
                    text.take(len(closing))
                    break
                if text.is_over:
                    put(text.take(len(found)))
                else:
                    yield
        yield from super()._read_answer()
