"""Qwen 3 with experts as a GGUF file and as a transformers checkpoint."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys
from octavo.compress.forms._hf import HFForm, expert_json

GGUF = GGUFForm("qwen3moe", decoder_keys)
HF = HFForm("qwen3_moe", "Qwen3MoeForCausalLM", expert_json)
