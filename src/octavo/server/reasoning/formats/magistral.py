"""Reasoning between Magistral's control tokens, `[THINK]...[/THINK]`."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("[THINK]", "[/THINK]")
