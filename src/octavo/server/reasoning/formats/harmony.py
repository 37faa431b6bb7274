"""Reasoning in the channel `analysis` of harmony messages: gpt-oss."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat, ReasoningParser, ReasoningPart
from octavo.server.tool_parsers.answer import Reading, marks_pattern

_OPEN = "<|channel|>analysis<|message|>"
_MESSAGE = "<|message|>"
_RECIPIENT = " to=functions."
_START = "<|start|>"
_CHANNEL = "<|channel|>"
_BEGINS_HEADER = (_START, _CHANNEL)
_ENDS_MESSAGE = ("<|end|>", "<|call|>", "<|return|>")
_HEADER_MARKS = (_MESSAGE, "<|constrain|>", *_BEGINS_HEADER, *_ENDS_MESSAGE)
_MESSAGE_MARKS = marks_pattern([*_BEGINS_HEADER, *_ENDS_MESSAGE])
_MAX_HEADER_PIECES = 512


class ChannelParser(ReasoningParser):
    """Parses harmony messages, `<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>`.

    The channel `analysis` contains reasoning. Messages to a function are passed on unchanged, for the parser of tool
    calls. The text of all other messages is for the user. A blank line separates two messages of the same kind.
    Anything that is not a header is passed on as text.

    Source: the guide to OpenAI's harmony response format; the chat template of gpt-oss-20b.
    """

    def __init__(self, marks: ReasoningFormat, prompt: str) -> None:
        super().__init__(marks, prompt)
        self._is_first = True  # nothing of this message has been written yet
        self._is_call = False
        self._has_written = {True: False, False: False}  # reasoning, text for the user

    def _read(self) -> Reading[None]:
        text = self._text
        if (yield from text.find_beginning(_RECIPIENT)) == _RECIPIENT:
            yield from self._read_header()
        while (yield from text.peek()):
            found = yield from text.take_until(_MESSAGE_MARKS, self._put)
            if found in _BEGINS_HEADER:
                yield from self._read_header()
            elif found in _ENDS_MESSAGE:
                mark = text.take(len(found))
                self._put_raw(mark if self._is_call else "")
                self._is_first, self._is_call, self.is_reasoning = False, False, False
            elif text.is_over:
                mark = text.take(len(found))
                self._put("" if text.is_cut else mark)
            else:
                yield

    def _read_header(self) -> Reading[None]:
        """Read up to `<|message|>`. Text without it, or with a header that is too long, is text for the user.

        A header that is cut off is dropped.
        """
        header: list[str] = []
        self._is_first, self._is_call, self.is_reasoning = True, False, False
        while (yield from self._text.peek()):
            found = yield from self._text.find_beginning(*_HEADER_MARKS)
            if found in _ENDS_MESSAGE or (header and found == _START) or (found == _CHANNEL and found in header):
                break
            header.append(self._text.take(max(len(found), 1)))
            if found == _MESSAGE:
                written = "".join(header)
                self._is_call = " to=" in written
                self.is_reasoning = not self._is_call and "<|channel|>analysis" in written
                self._put_raw(written if self._is_call else "")
                return
            if len(header) > _MAX_HEADER_PIECES:
                break
        if not (self._text.is_cut and self._text.has_run_out):
            self._put("".join(header))

    def _put(self, piece: str) -> None:
        """Pass on a piece of a message."""
        if piece and self._is_first and not self._is_call:
            separator = "\n\n" if self._has_written[self.is_reasoning] else ""
            self._is_first, self._has_written[self.is_reasoning] = False, True
            piece = separator + piece
        self._put_raw(piece)

    def _put_raw(self, piece: str) -> None:
        if piece:
            self._parts.append(ReasoningPart(piece) if self.is_reasoning else piece)


FORMAT = ReasoningFormat(
    _OPEN, "<|end|>", matches=lambda template: _OPEN in template, parser=ChannelParser, has_channels=True
)
