"""BLOOM as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, classic_keys

GGUF = GGUFForm("bloom", classic_keys)
