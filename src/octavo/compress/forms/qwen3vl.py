"""The text model of dense Qwen 3 VL as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, deepstack_keys, sectioned_keys

GGUF = GGUFForm("qwen3vl", sectioned_keys, deepstack_keys)
