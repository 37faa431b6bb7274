"""Arcee's AFM as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys

GGUF = GGUFForm("arcee", decoder_keys)
