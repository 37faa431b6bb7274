"""Reasoning between two fixed phrases: Granite 3.1 and 3.2."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("Here is my thought process:", "Here is my response:")
