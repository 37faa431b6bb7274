"""InternLM 2 and 2.5 as a GGUF file."""

from functools import partial

from octavo.compress.forms._gguf import GGUFForm, decoder_keys

GGUF = GGUFForm("internlm2", partial(decoder_keys, theta=1e6))
