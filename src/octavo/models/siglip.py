"""SigLIP's and SigLIP 2's text encoder: fixed-length texts, bidirectional attention. arXiv 2303.15343, 2502.14786."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.rowwise import Activation
from octavo.graph.values import Value
from octavo.models._encoder import EncoderConfig
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable
from octavo.models.clip import CLIP_NAMES

ALIASES = ("siglip2",)
WEIGHTS = WeightTable(prefixes=("text_model.",), names={**CLIP_NAMES, "head": "projection"})

_SIZES: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
}


@dataclass(frozen=True, slots=True)
class Config(EncoderConfig):
    """Configuration of the text encoder.

    output_width: number of columns of an embedding.
    """

    own_pooling: ClassVar[Literal["last"] | None] = "last"

    output_width: int = 0

    @property
    def vector_width(self) -> int:
        return self.output_width

    @property
    def padded_length(self) -> int:
        return self.max_position_embeddings

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:  # noqa: ARG003
        raise ModelLoadError("GGUF has no standard for SigLIP; use the safetensors checkpoint")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        section = reader.section("text_config").with_defaults(_SIZES)
        width = section.integer("projection_size", section.integer("hidden_size"), high=MAX_WIDTH)
        return cls.read_hf(section, norm_eps=1e-6, position_offset=0, pooling="last", output_width=width)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the embeddings [OUTPUTS, output_width], from the last token of each text."""
    h = g.embedding("embed_tokens") + g.position_embedding("embed_positions")
    for i in range(cfg.num_layers):
        p = f"layers.{i}"
        x = g.layer_norm(h, f"{p}.input_layernorm", cfg.norm_eps)
        q, k, v = (g.linear(x, f"{p}.self_attn.{part}_proj") for part in "qkv")
        h = h + g.linear(g.encoder_attention(q, k, v, cfg.attention_params(i)), f"{p}.self_attn.o_proj")
        x = g.layer_norm(h, f"{p}.post_attention_layernorm", cfg.norm_eps)
        up = g.add(Activation(g.linear(x, f"{p}.mlp.up_proj"), cfg.activation))
        h = h + g.linear(up, f"{p}.mlp.down_proj")
    return g.select_rows(g.linear(g.layer_norm(h, "norm", cfg.norm_eps), "projection"))
