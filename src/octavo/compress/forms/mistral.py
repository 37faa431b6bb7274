"""Mistral as a file: it has the name llama there; the layers and queries of its successors do not fit that."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys

GGUF = GGUFForm("llama", decoder_keys)
