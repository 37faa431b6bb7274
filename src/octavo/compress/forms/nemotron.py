"""The dense models of Nemotron 3 and 4 as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, layer_norm_keys

GGUF = GGUFForm("nemotron", layer_norm_keys)
