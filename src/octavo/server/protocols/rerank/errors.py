"""The protocol of scores, whose errors have OpenAI's form."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

SCORES = Protocol("Rerank")
