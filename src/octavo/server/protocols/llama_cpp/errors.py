"""The protocol of llama.cpp's server, whose errors have OpenAI's form."""

from __future__ import annotations

from octavo.server.protocols.protocol import Protocol

LLAMA_CPP = Protocol("llama.cpp")
