"""Baichuan 1 and 2 as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys

GGUF = GGUFForm("baichuan", decoder_keys)
