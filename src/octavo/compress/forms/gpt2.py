"""GPT-2 as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, classic_keys

GGUF = GGUFForm("gpt2", classic_keys)
