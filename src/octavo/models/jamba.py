"""Jamba: Mamba 1 in most layers, attention in some, experts in every second one. AI21, arXiv 2403.19887."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.moe import Routing
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, mlp
from octavo.models._mamba import has_mamba
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._weights import WeightTable, stacked_experts
from octavo.models.mamba import CHANNEL_TRANSFORMS, NO_CHANNELS, Channels, channel_names, mamba1

_FEED = "layers.*.feed_forward."
WEIGHTS = WeightTable(
    names={
        **channel_names("layers.*.mamba."),
        "final_layernorm": "norm",
        "layers.*.pre_ff_layernorm": "layers.*.post_attention_layernorm",
        _FEED + "router": "layers.*.mlp.gate",
        **{
            f"{_FEED}{kind}{part}_proj": f"layers.*.mlp.{kind}{part}_proj"
            for kind in ("", "experts.*.")
            for part in ("gate", "up", "down")
        },
    },
    transforms=(*stacked_experts(), *CHANNEL_TRANSFORMS),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Jamba's configuration.

    A layer's weights determine its kind. Queries and keys are not rotated; expert weights do not sum to 1.
    """

    channels: Channels = NO_CHANNELS

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = reader.with_largest("attention.head_count_kv", reader.integer("block_count", high=MAX_LAYERS))
        mlp = MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=False))
        config = cls.read_gguf(reader, shapes, mlp=mlp)
        return config._with_channels(Channels.from_gguf(reader))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        experts: Routing | None = None
        if reader.integer("num_experts", 16) > 1:
            reader = reader.with_defaults({"num_experts": 16, "num_experts_per_tok": 2})
            experts = experts_from_hf(reader, normalize=False)
        mlp = MLPConfig.from_hf(reader, experts)
        config = cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), mlp=mlp)
        channels = Channels.from_hf(reader, "mamba_d_state", "mamba_expand", "mamba_dt_rank")
        return config._with_channels(channels)

    def _with_channels(self, channels: Channels) -> Config:
        rope = replace(self.rope, rotates=(False,) * self.num_layers)
        return replace(self, channels=channels, rope=rope)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + (mamba1(g, x, i, cfg.norm_eps) if has_mamba(g, i) else attention(g, x, cfg, i))
        h = h + mlp(g, g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps), cfg, i)
    return g.logits(g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps), cfg.output_head)
