"""Reasoning in specially named tags, `<seed:think>...</seed:think>`: Seed-OSS."""

from __future__ import annotations

from octavo.server.reasoning.reasoning_format import ReasoningFormat

FORMAT = ReasoningFormat("<seed:think>", "</seed:think>")
