"""GLM 4 (0414) as a GGUF file."""

from __future__ import annotations

from octavo.compress.forms._gguf import GGUFForm, decoder_keys

GGUF = GGUFForm("glm4", decoder_keys)
