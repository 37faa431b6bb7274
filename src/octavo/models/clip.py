"""CLIP's text encoder: causal attention, with the last token's state as the embedding.

Radford et al., arXiv 2103.00020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._classic import ACTIVATIONS, ClassicConfig, layers
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable

_LAYER = {
    "layer_norm1": "input_layernorm",
    "layer_norm2": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"},
}
# Those of SigLIP, too.
CLIP_NAMES = {
    "embeddings.token_embedding": "embed_tokens",
    "embeddings.position_embedding": "embed_positions",
    "final_layer_norm": "norm",
    **{f"encoder.layers.*.{stored}": f"layers.*.{name}" for stored, name in _LAYER.items()},
}
WEIGHTS = WeightTable(prefixes=("text_model.",), names={**CLIP_NAMES, "text_projection": "projection"})

_SIZES: Mapping[str, object] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


@dataclass(frozen=True, slots=True)
class Config(ClassicConfig):
    """Configuration of the text encoder.

    output_width: number of columns of an embedding.
    """

    own_pooling: ClassVar[Literal["last"] | None] = "last"

    output_width: int = 0

    @property
    def vector_width(self) -> int:
        return self.output_width

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:  # noqa: ARG003
        raise ModelLoadError("a GGUF file of this architecture is the vision encoder of a model: name it with --mmproj")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        section = clip_section(reader, "text_config").with_defaults(_SIZES)
        known, kind = {**ACTIVATIONS, "quick_gelu": "quick_gelu"}, section.text("hidden_act")
        if kind not in known:
            raise section.error("hidden_act", kind, f"must be {', '.join(known)}")
        width = reader.integer("projection_dim", 512, high=MAX_WIDTH)
        return cls.read_hf(section, tied=False, position_offset=0, activation=known[kind], output_width=width)


def clip_section(reader: ConfigReader, key: str) -> ConfigReader:
    """Return a section of config.json. Older files have a second one whose values take precedence."""
    own, other = reader.section(key), reader.section(f"{key}_dict")
    values = {name.removeprefix(other.prefix): value for name, value in other.values.items()}
    for name, value in values.items():
        own = own.replaced(name, value)
    return own


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the embeddings [OUTPUTS, output_width]."""
    h = g.layer_norm(layers(g, cfg), "norm", cfg.norm_eps)
    return g.select_rows(g.linear(h, "projection"))
