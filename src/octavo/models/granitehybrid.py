"""Granite 4: Mamba 2 in most layers, attention in some, experts and a shared MLP. Dao and Gu, arXiv 2405.21060."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.values import Value
from octavo.models import granite
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import hf_rope
from octavo.models._layers import attention, gated_mlp
from octavo.models._mamba import (
    NO_HEADS,
    has_mamba,
    mamba2,
    mamba_names,
    mamba_transforms,
    scan_from_gguf,
    scan_from_hf,
)
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Split, WeightTable, rotary_pairs

ALIASES = ("granitemoehybrid",)

_EXPERTS, SHARED = "layers.*.mlp.experts.", "layers.*.shared_mlp."
_NAMES = {
    **mamba_names(),
    # GGUF; without experts the shared MLP has the names of a plain one
    **{f"blk.*.ffn_{part}{kind}": f"{SHARED}{part}_proj" for part in ("gate", "up", "down") for kind in ("", "_shexp")},
    # safetensors
    SHARED + "output_linear": SHARED + "down_proj",
    "layers.*.block_sparse_moe.router.layer": "layers.*.mlp.gate",
    "layers.*.block_sparse_moe.input_linear": _EXPERTS + "input_linear",
    "layers.*.block_sparse_moe.output_linear": _EXPERTS + "down_proj",
}
WEIGHTS = WeightTable(
    names=_NAMES,
    transforms=(
        *rotary_pairs("gguf"),
        Split(
            SHARED + "input_linear",
            (SHARED + "gate_proj", SHARED + "up_proj"),
            lambda c: (c.shared_size,) * 2,
            only="safetensors",
        ),
        Split(
            _EXPERTS + "input_linear",
            (_EXPERTS + "gate_proj", _EXPERTS + "up_proj"),
            lambda c: (c.mlp.intermediate_size,) * 2,
            only="safetensors",
        ),
        *mamba_transforms(),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(granite.Config):
    """Granite 4's configuration. Layers with state-space weights have no attention. Most models have no rotary
    positions.
    """

    shared_size: int = 0
    scan: ScanHeads = NO_HEADS

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        config = cls.read_gguf(
            reader.with_largest("attention.head_count_kv", reader.integer("block_count", high=MAX_LAYERS)),
            shapes,
            mlp=MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=True)),
        )
        rotates = reader.flag("rope.scaling.finetuned", True)  # the converter's name for it
        shared = "feed_forward_length" if config.mlp.experts is None else "expert_shared_feed_forward_length"
        return replace(
            granite.scaled_gguf(config, reader),
            shared_size=reader.integer(shared, 0, low=0, high=MAX_WIDTH),
            rope=replace(config.rope, rotates=(rotates,) * config.num_layers),
            scan=scan_from_gguf(reader),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        if reader.has("layer_types"):
            reader.texts("layer_types", num_layers, ("mamba", "attention", "linear_attention", "full_attention"))
        positions = reader.value("position_embedding_type")
        if positions not in (None, "rope", "nope"):
            raise reader.error("position_embedding_type", positions, "must be rope, nope or null")
        has_experts = reader.integer("num_local_experts", 8, low=0) > 0
        shared = reader.integer("shared_intermediate_size", 1024, high=MAX_WIDTH)
        mlp = MLPConfig.from_hf(reader, experts_from_hf(reader, normalize=True) if has_experts else None)
        config = cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader)),
            rope=replace(hf_rope(reader), rotates=(positions == "rope",) * num_layers),
            # Without experts there is only the shared MLP.
            mlp=mlp if has_experts else replace(mlp, intermediate_size=shared),
        )
        return replace(
            granite.scaled_hf(config, reader),
            shared_size=shared,
            scan=scan_from_hf(reader),
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens") * cfg.embedding_multiplier
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        mixed = mamba2(g, x, cfg.scan, i, cfg.norm_eps) if has_mamba(g, i) else attention(g, x, cfg, i)
        h = h + mixed * cfg.residual_multiplier
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        out = gated_mlp(g, x, f"layers.{i}.shared_mlp")
        if cfg.mlp.experts is not None:
            out = g.moe(x, f"layers.{i}.mlp", cfg.mlp.experts) + out
        h = h + out * cfg.residual_multiplier
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, scale=1.0 / cfg.logits_scaling)
