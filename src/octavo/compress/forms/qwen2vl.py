"""Qwen 2 and 2.5 VL, text, as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, sectioned_keys

GGUF = GGUFForm("qwen2vl", sectioned_keys)
