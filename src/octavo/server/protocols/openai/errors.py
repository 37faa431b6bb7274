"""The protocol of OpenAI's clients. The server uses its error format by default."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

OPENAI = Protocol("OpenAI")
