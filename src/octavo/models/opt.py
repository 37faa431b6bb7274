"""OPT: learned positions from row 2 on, ReLU, pre-norm or post-norm layers. Zhang et al., arXiv 2205.01068."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.errors import ModelLoadError
from octavo.models._classic import ClassicConfig, build
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(
    prefixes=("model.decoder.", "decoder.", "model."),
    names={
        "layers.*.self_attn_layer_norm": "layers.*.input_layernorm",
        "layers.*.self_attn.out_proj": "layers.*.self_attn.o_proj",
        "layers.*.final_layer_norm": "layers.*.post_attention_layernorm",
        "layers.*.fc1": "layers.*.mlp.up_proj",
        "layers.*.fc2": "layers.*.mlp.down_proj",
        "final_layer_norm": "norm",
    },
)


class Config(ClassicConfig):
    """OPT's configuration. OPT-350m has post-norm layers, no final norm, and embeddings of a different width."""

    __slots__ = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:  # noqa: ARG003
        raise ModelLoadError("GGUF has no standard for OPT; use the safetensors checkpoint")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if not reader.flag("layer_norm_elementwise_affine", True):
            raise reader.error("layer_norm_elementwise_affine", False, "norms without weights are not supported")
        before = reader.flag("do_layer_norm_before", True)
        hidden_size = reader.integer("hidden_size", high=MAX_WIDTH)
        return cls.read_hf(
            reader,
            tied=True,
            position_offset=2,
            block="pre_norm" if before else "post_norm",
            final_norm=before and not reader.flag("_remove_final_layer_norm", False),
            embedding_projections=reader.integer("word_embed_proj_dim", hidden_size, high=MAX_WIDTH) != hidden_size,
        )
