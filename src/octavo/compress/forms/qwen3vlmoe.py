"""The text model of Qwen 3 VL with experts as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, deepstack_keys, sectioned_keys

GGUF = GGUFForm("qwen3vlmoe", sectioned_keys, deepstack_keys)
