"""Reasoning between MiniCPM's control tokens, `<|thought_start|>...<|thought_end|>`: MiniCPM 3."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("<|thought_start|>", "<|thought_end|>")
