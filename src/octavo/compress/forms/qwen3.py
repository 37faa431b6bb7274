"""The dense models of Qwen 3 as a GGUF file and as a transformers checkpoint."""

from octavo.compress.forms._gguf import GGUFForm, decoder_keys
from octavo.compress.forms._hf import HFForm, decoder_json

GGUF = GGUFForm("qwen3", decoder_keys)
HF = HFForm("qwen3", "Qwen3ForCausalLM", decoder_json)
