"""GLM 4.5 and 4.6 as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, routed_keys

GGUF = GGUFForm("glm4moe", routed_keys)
