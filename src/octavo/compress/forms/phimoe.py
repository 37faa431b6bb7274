"""Phi 3.5 MoE as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys

GGUF = GGUFForm("phimoe", decoder_keys)
