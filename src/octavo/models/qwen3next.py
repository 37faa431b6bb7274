"""Qwen3-Next and Qwen 3.5, text: gated delta rules, and gated attention in every fourth layer. arXiv 2412.06464."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope
from octavo.graph.ops.recurrence import DeltaHeads
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Value
from octavo.models import qwen2moe
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._heads import next_token_head, without_heads
from octavo.models._layers import mlp
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Flatten, Fold, NegativeExp, Permute, Split, WeightTable

# The last two have a part that sees, and their configuration of text in a section of its own.
ALIASES = ("qwen3_next", "qwen35", "qwen35moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")

_NO_HEADS = DeltaHeads(1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Qwen3-Next's configuration.

    Layers that have delta-rule weights have no attention; layers without a router have a plain MLP.
    """

    delta: DeltaHeads = _NO_HEADS

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = without_heads(reader)
        # A file in which all layers have experts has no other MLP.
        if reader.has("expert_feed_forward_length"):
            reader = reader.with_defaults({"feed_forward_length": reader.integer("expert_feed_forward_length")})
        inner, heads = reader.integer("ssm.inner_size", high=MAX_WIDTH), reader.integer("ssm.time_step_rank")
        if inner % heads:
            raise reader.error("ssm.inner_size", inner, f"must be a multiple of {heads} heads")
        delta = DeltaHeads(
            num_k_heads=reader.integer("ssm.group_count"),
            num_v_heads=heads,
            key_dim=reader.integer("ssm.state_size", high=MAX_WIDTH),
            value_dim=inner // heads,
            is_tiled=reader.prefix != "qwen3next.",
        )
        mlp = MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=True), shared="gated")
        config = cls.read_gguf(reader, shapes, mlp=mlp)
        return config._with_delta(reader, "ssm.group_count", delta)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.has("text_config"):
            outer, reader = reader, reader.section("text_config")
            reader = reader.with_defaults({"tie_word_embeddings": outer.flag("tie_word_embeddings", False)})
        reader = reader.with_defaults({"head_dim": 256, "partial_rotary_factor": 0.25})
        if reader.has("moe_intermediate_size"):
            reader = reader.with_defaults({"intermediate_size": reader.integer("moe_intermediate_size")})
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        if reader.has("layer_types"):
            reader.texts("layer_types", num_layers, ("full_attention", "linear_attention"))
        experts = None
        if reader.has("num_experts"):
            experts = experts_from_hf(reader, normalize=reader.flag("norm_topk_prob", True))
        delta = DeltaHeads(
            num_k_heads=reader.integer("linear_num_key_heads", 16),
            num_v_heads=reader.integer("linear_num_value_heads", 32),
            key_dim=reader.integer("linear_key_head_dim", 128, high=MAX_WIDTH),
            value_dim=reader.integer("linear_value_head_dim", 128, high=MAX_WIDTH),
        )
        mlp = MLPConfig.from_hf(reader, experts, shared="gated")
        config = cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), mlp=mlp)
        return config._with_delta(reader, "linear_num_key_heads", delta)

    def _with_delta(self, reader: ConfigReader, key: str, delta: DeltaHeads) -> Config:
        if delta.num_v_heads % delta.num_k_heads or max(delta.num_v_heads, delta.num_k_heads) > MAX_WIDTH:
            raise reader.error(key, delta.num_k_heads, f"must divide the {delta.num_v_heads} value heads")
        return replace(self, delta=delta)


def _by_part(cfg: Config, sizes: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the stored rows of a projection, part by part; the file groups all parts of one key head.

    sizes: number of rows of each part of a key head.
    """
    heads = cfg.delta.num_k_heads
    rows = np.arange(heads * sum(sizes)).reshape(heads, sum(sizes))
    return np.concatenate([part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)])


def _qkvz_rows(cfg: Config) -> tuple[int, int, int, int]:
    """Return the number of rows of q, k, v and z for one key head."""
    d = cfg.delta
    values = d.num_v_heads // d.num_k_heads * d.value_dim
    return d.key_dim, d.key_dim, values, values


def _qkvz_order(cfg: Config) -> NDArray[np.intp]:
    return _by_part(cfg, _qkvz_rows(cfg))


def _qkvz_parts(cfg: Config) -> tuple[int, int]:
    q, k, v, z = (cfg.delta.num_k_heads * rows for rows in _qkvz_rows(cfg))
    return q + k + v, z


def _ba_order(cfg: Config) -> NDArray[np.intp]:
    return _by_part(cfg, (cfg.delta.num_v_heads // cfg.delta.num_k_heads,) * 2)


def _query_and_gate(cfg: Config) -> NDArray[np.intp]:
    """Return the stored rows of all heads' queries, then of their gates; a file groups them by head."""
    rows = np.arange(2 * cfg.num_heads * cfg.head_dim).reshape(cfg.num_heads, 2, cfg.head_dim)
    order: NDArray[np.intp] = rows.swapaxes(0, 1).reshape(-1)
    return order


DELTA, _ATTENTION, _EXPERTS = "layers.*.linear_attn.", "layers.*.self_attn.", "layers.*.mlp.experts."
_NORMS = (
    "norm",
    "layers.*.input_layernorm",
    "layers.*.post_attention_layernorm",
    *(f"layers.*.{n}" for n in ("enorm", "hnorm", "shared_head.norm")),
    *(f"{_ATTENTION}{n}_norm" for n in "qk"),
)
_NAMES = {
    # GGUF
    "blk.*.post_attention_norm": "layers.*.post_attention_layernorm",
    "blk.*.attn_qkv": DELTA + "in_proj_qkv",
    "blk.*.attn_gate": DELTA + "in_proj_z",
    "blk.*.ssm_in": DELTA + "in_proj_qkvz",
    "blk.*.ssm_ba": DELTA + "in_proj_ba",
    "blk.*.ssm_beta": DELTA + "in_proj_b",
    "blk.*.ssm_alpha": DELTA + "in_proj_a",
    "blk.*.ssm_conv1d": DELTA + "conv1d",
    "blk.*.ssm_a": DELTA + "decay.weight",
    "blk.*.ssm_dt": DELTA + "dt",
    "blk.*.ssm_norm": DELTA + "norm",
    "blk.*.ssm_out": DELTA + "out_proj",
    "blk.*.ffn_gate_up_exps": _EXPERTS + "gate_up_proj",
    # safetensors
    DELTA + "A_log": DELTA + "decay.weight",
    DELTA + "dt_bias": DELTA + "dt.bias",
    _EXPERTS + "gate_up_proj": _EXPERTS + "gate_up_proj.weight",
    _EXPERTS + "down_proj": _EXPERTS + "down_proj.weight",
}
WEIGHTS = WeightTable(
    names={**qwen2moe.WEIGHTS.names, **_NAMES},
    transforms=(
        *qwen2moe.WEIGHTS.transforms,
        Split(
            _EXPERTS + "gate_up_proj",
            (_EXPERTS + "gate_proj", _EXPERTS + "up_proj"),
            lambda c: (c.mlp.intermediate_size,) * 2,
            one_way=True,
        ),
        Permute(DELTA + "in_proj_qkvz", _qkvz_order, one_way=True),
        Split(DELTA + "in_proj_qkvz", (DELTA + "in_proj_qkv", DELTA + "in_proj_z"), _qkvz_parts, one_way=True),
        Permute(DELTA + "in_proj_ba", _ba_order),
        # Files of Qwen 3.5 have the two halves.
        Split(
            DELTA + "in_proj_ba",
            (DELTA + "in_proj_b", DELTA + "in_proj_a"),
            lambda c: () if c.delta.is_tiled else (c.delta.num_v_heads,) * 2,
        ),
        Permute(_ATTENTION + "q_proj", _query_and_gate),
        Split(
            _ATTENTION + "q_proj",
            (_ATTENTION + "q_proj", _ATTENTION + "gate_proj"),
            lambda c: (c.num_heads * c.head_dim,) * 2,
        ),
        Flatten(DELTA + "conv1d", rows=lambda c: _qkvz_parts(c)[0]),
        NegativeExp(DELTA + "decay", "safetensors"),
        *(Fold(stem, 1.0, "safetensors") for stem in _NORMS),
    ),
)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = _layer(g, cfg, h, i)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)


def build_draft(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits of the token after the next one. See `next_token_head`."""
    return next_token_head(g, cfg, _layer)


def _layer(g: Graph, cfg: Config, h: Value, layer: int) -> Value:
    p = f"layers.{layer}."
    x = g.rms_norm(h, p + "input_layernorm", cfg.norm_eps)
    is_delta = p + "linear_attn.conv1d.weight" in g.weights
    h = h + (delta_net(g, x, cfg, p + "linear_attn") if is_delta else gated_attention(g, x, cfg, layer))
    return h + mlp(g, g.rms_norm(h, p + "post_attention_layernorm", cfg.norm_eps), cfg, layer)


def delta_net(g: Graph, x: Value, cfg: Config, stem: str) -> Value:
    """Build the gated delta net from the weights under `stem`: [TOKENS, hidden]."""
    qkv, z, beta, alpha = (g.linear(x, f"{stem}.in_proj_{part}") for part in ("qkv", "z", "b", "a"))
    qkv = g.short_conv(qkv, f"{stem}.conv1d", "silu")
    out = g.gated_delta_rule(qkv, beta, alpha, stem, cfg.delta)
    return g.linear(
        g.add(GatedActivation(z, g.rms_norm(out, f"{stem}.norm", cfg.norm_eps), "silu")), f"{stem}.out_proj"
    )


def gated_attention(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    """Build attention whose output is multiplied by the sigmoid of a projection: [TOKENS, hidden]."""
    p = f"layers.{layer}.self_attn."
    q, k, v, gate = (g.linear(x, f"{p}{part}_proj") for part in ("q", "k", "v", "gate"))
    q, k = (g.rms_norm(y, f"{p}{part}_norm", cfg.norm_eps) for part, y in (("q", q), ("k", k)))
    q, k = (g.add(Rope(y, cfg.head_dim, cfg.rope.params)) for y in (q, k))
    out = g.attention(q, k, v, cfg.attention_params(layer))
    return g.linear(g.add(GatedActivation(gate, out, "sigmoid")), p + "o_proj")
