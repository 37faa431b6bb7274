"""Qwen 2 and 2.5, dense: Llama with biases on q, k and v, windows in upper layers. Yang et al., arXiv 2407.10671."""

from octavo.models._decoder import DecoderConfig as Config
from octavo.models._gguf import GGUFForm, decoder_keys
from octavo.models._hf import HFForm, decoder_json
from octavo.models.llama import build

__all__ = ["GGUF", "HF", "Config", "build"]

GGUF = GGUFForm("qwen2", decoder_keys)
HF = HFForm("qwen2", "Qwen2ForCausalLM", decoder_json)
