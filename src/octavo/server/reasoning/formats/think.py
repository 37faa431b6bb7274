"""Reasoning in tags, `<think>...</think>`: Qwen 3, DeepSeek R1, SmolLM 3 and many others."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("<think>", "</think>")
