"""Reasoning in tags with a name of their own, `<thought>...</thought>`: EXAONE Deep."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("<thought>", "</thought>")
