"""The protocol of Responses, whose errors have OpenAI's form."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

RESPONSES = Protocol("OpenAI")
