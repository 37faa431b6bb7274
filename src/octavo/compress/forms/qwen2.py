"""Qwen 2 and 2.5 as a GGUF file and as a transformers checkpoint."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys
from octavo.compress.forms._hf import HFForm, decoder_json

GGUF = GGUFForm("qwen2", decoder_keys)
HF = HFForm("qwen2", "Qwen2ForCausalLM", decoder_json)
