"""Qwen 2 and 2.5, dense: Llama with biases on q, k and v, windows in upper layers. Yang et al., arXiv 2407.10671."""

from octavo.models._decoder import DecoderConfig as Config
from octavo.models.llama import build

__all__ = ["Config", "build"]

# MiMo of 2025 is the same network; its layers that predict further tokens are not used.
ALIASES = ("mimo",)
