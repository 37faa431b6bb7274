"""Reasoning in a separate channel, `<|channel>thought...<channel|>`: Gemma 4."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("<|channel>thought", "<channel|>")
