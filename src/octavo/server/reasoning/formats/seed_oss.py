"""Reasoning in tags with a name of their own, `<seed:think>...</seed:think>`: Seed-OSS."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("<seed:think>", "</seed:think>")
