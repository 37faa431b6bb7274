"""Reasoning in specially named tags, `<thought>...</thought>`: EXAONE Deep."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("<thought>", "</thought>")
