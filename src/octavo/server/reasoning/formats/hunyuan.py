"""Reasoning in `<think>` tags and the answer in `<answer>` tags: Hunyuan A13B."""

from __future__ import annotations

from functools import partial

from octavo.server.reasoning.reasoning_format import ReasoningFormat
from octavo.server.reasoning.tagged_answer import TaggedAnswerParser

_TAGS = ("<answer>", "</answer>")

FORMAT = ReasoningFormat(
    "<think>",
    "</think>",
    matches=lambda template: _TAGS[0] in template and "think>" in template,
    parser=partial(TaggedAnswerParser, tags=_TAGS),
)
