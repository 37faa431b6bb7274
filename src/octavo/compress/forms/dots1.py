"""dots.llm1 as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, routed_keys

GGUF = GGUFForm("dots1", routed_keys)
