"""Qwen 3, dense, as files."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys
from octavo.compress.forms._hf import HFForm, decoder_json

GGUF = GGUFForm("qwen3", decoder_keys)
HF = HFForm("qwen3", "Qwen3ForCausalLM", decoder_json)
