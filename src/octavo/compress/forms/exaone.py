"""EXAONE 3 and 3.5 as a GGUF file."""

from functools import partial

from octavo.compress.forms._gguf import GGUFForm, decoder_keys

GGUF = GGUFForm("exaone", partial(decoder_keys, theta=500_000.0))
