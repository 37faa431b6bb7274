"""Reasoning in `<think>` tags and the answer in `<response>` tags: Granite 3.3."""

from __future__ import annotations

from functools import partial

from octavo.server.reasoning.reasoning_format import ReasoningFormat
from octavo.server.reasoning.tagged_answer import TaggedAnswerParser

_TAGS = ("<response>", "</response>")

FORMAT = ReasoningFormat(
    "<think>",
    "</think>",
    matches=lambda template: "".join(_TAGS) in template,
    parser=partial(TaggedAnswerParser, tags=_TAGS),
)
