"""The protocol of llama.cpp's server, with errors in OpenAI's format."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

LLAMA_CPP = Protocol("llama.cpp")
