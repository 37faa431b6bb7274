"""The protocol of Responses, with errors in OpenAI's format."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

RESPONSES = Protocol("OpenAI")
