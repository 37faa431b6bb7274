"""The text model of Qwen 2 VL and 2.5 VL as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, sectioned_keys

GGUF = GGUFForm("qwen2vl", sectioned_keys)
