"""Reasoning in `<think>` tags and the answer in `<response>` tags: Granite 3.3 and ERNIE 4.5 Thinking."""

from __future__ import annotations

from functools import partial

from octavo.server.reasoning.reasoning_format import ReasoningFormat
from octavo.server.reasoning.tagged_answer import TaggedAnswerParser

_TAGS = ("<response>", "</response>")

FORMAT = ReasoningFormat(
    "<think>",
    "</think>",
    matches=lambda template: "</think>" in template and all(tag in template for tag in _TAGS),
    parser=partial(TaggedAnswerParser, tags=_TAGS),
)
