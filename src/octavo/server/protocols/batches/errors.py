"""The protocol of files and batches, with errors in OpenAI's format."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

BATCHES = Protocol("Batches")
