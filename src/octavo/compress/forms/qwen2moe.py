"""Qwen 1.5 and 2 with experts as a GGUF file and as a transformers checkpoint."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys
from octavo.compress.forms._hf import HFForm, expert_json

GGUF = GGUFForm("qwen2moe", decoder_keys)
HF = HFForm("qwen2_moe", "Qwen2MoeForCausalLM", expert_json)
