"""Reasoning between Apertus' control tokens, `<|inner_prefix|>...<|inner_suffix|>`."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>")
