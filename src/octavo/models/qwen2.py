"""Qwen 2 and 2.5, dense: Llama with biases on q, k and v, windows in upper layers. Yang et al., arXiv 2407.10671."""

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig as Config
from octavo.models._heads import next_token_head
from octavo.models.llama import build, layer

__all__ = ["Config", "build", "build_draft"]

# MiMo of 2025 is the same network, with a layer that predicts the token after the next: Xiaomi, arXiv 2505.07608.
ALIASES = ("mimo",)


def build_draft(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits of the token after the next one. See `next_token_head`."""
    return next_token_head(g, cfg, layer, hidden_first=True)
