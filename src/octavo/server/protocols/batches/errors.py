"""The protocol of files and batches, whose errors have OpenAI's form."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

BATCHES = Protocol("Batches")
