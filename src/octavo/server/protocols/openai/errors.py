"""The protocol of OpenAI's clients. Its error format is the server's own."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

OPENAI = Protocol("OpenAI")
