"""Seed-OSS as a GGUF file."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys

GGUF = GGUFForm("seed_oss", decoder_keys)
