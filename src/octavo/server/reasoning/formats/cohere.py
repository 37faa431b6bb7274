"""Reasoning between `<|START_THINKING|>` and `<|END_THINKING|>`: Command R7B, Command A and Command A Reasoning.

The answer is between `<|START_RESPONSE|>` and `<|END_RESPONSE|>`. Source: the chat template of Command R7B.
"""

from __future__ import annotations

from functools import partial

from octavo.server.reasoning.reasoning_format import ReasoningFormat
from octavo.server.reasoning.tagged_answer import TaggedAnswerParser

FORMAT = ReasoningFormat(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    parser=partial(TaggedAnswerParser, tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
)
