"""The protocol of the routes for scores, with errors in OpenAI's format."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

SCORES = Protocol("Rerank")
