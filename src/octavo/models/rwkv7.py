"""RWKV 7: every layer has a delta rule with a decay for each row of its state, and no attention. arXiv 2503.14456.

Sources: the checkpoints of flash-linear-attention, and the GGUF files of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.ops.rowwise import Activation
from octavo.graph.values import Value
from octavo.models._layers import plain_mlp
from octavo.models._mamba import StateSpaceConfig
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import HeadSums, TokenShares, WeightTable

_MIXES = "rwkvag"  # the inputs that mix in the previous token, in the order of GGUF files
_DECAY = -math.exp(-0.5)  # the logarithm of the strongest decay
_UNIT_EPS = 1e-12  # added to the squared lengths of keys
_GROUP_EPS = 64e-5  # epsilon of the heads' norm in GGUF files
_P, _FFN = "layers.*.attn.", "layers.*.ffn."


@dataclass(frozen=True, slots=True)
class Config(StateSpaceConfig):
    """RWKV 7's configuration. The fields for the sizes of attention hold the sizes of the delta rule.

    num_heads, head_dim: heads of the delta rule.
    group_eps: epsilon of the norm of its heads.
    width: width of the MLP.
    """

    group_eps: float = _GROUP_EPS
    width: int = 0

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = reader.renamed({"attention.layer_norm_epsilon": "attention.layer_norm_rms_epsilon"})
        heads = _heads(reader, "embedding_length", "wkv.head_size")
        return cls.read_gguf(reader, shapes, heads, width=reader.integer("feed_forward_length", high=MAX_WIDTH))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        hidden = reader.integer("hidden_size", high=MAX_WIDTH)
        for key, value in (("attn", None), ("norm_first", True), ("hidden_act", "sqrelu")):
            if reader.has(key) and reader.value(key) != value:
                raise reader.error(key, reader.value(key), f"must be {value}")
        values = reader.value("value_dim")
        for width in values if isinstance(values, list) else [hidden if values is None else values]:
            if width != hidden:
                raise reader.error("value_dim", values, f"must be hidden_size, {hidden}")
        ratio = reader.number("hidden_ratio", 4.0, high=1e3)
        reader = reader.renamed({"norm_eps": "layer_norm_epsilon"})
        heads = _heads(reader, "hidden_size", "head_dim")
        eps = reader.number("layer_norm_epsilon", 1e-5, high=1.0)
        usual = -(-int(ratio * hidden) // 32) * 32
        width = reader.integer("intermediate_size", usual, high=MAX_WIDTH)
        return cls.read_hf(reader, tied=False, heads=heads, group_eps=heads.head_dim * eps, width=width)


def _heads(reader: ConfigReader, width: str, dim: str) -> ScanHeads:
    """Read the heads of the delta rule. Raises ModelLoadError naming the key.

    width, dim: keys of the number of columns of all heads and of one head.
    """
    cols, head_dim = reader.integer(width, high=MAX_WIDTH), reader.integer(dim, 64, high=MAX_WIDTH)
    if cols % head_dim:
        raise reader.error(dim, head_dim, f"does not divide {width}, {cols}")
    return ScanHeads(cols // head_dim, head_dim, cols // head_dim, head_dim)


WEIGHTS = WeightTable(
    names={
        # GGUF
        "token_embd_norm": "embed_norm",
        "blk.*.attn_norm_2": "layers.*.post_attention_layernorm",
        "blk.*.time_mix_lerp_fused": _P + "mixes",
        **{f"blk.*.time_mix_{n}1": f"{_P}{n}_in" for n in "wavg"},
        **{f"blk.*.time_mix_{n}2": f"{_P}{n}_out" for n in "wavg"},
        **{f"blk.*.time_mix_{n}0.weight": f"{_P}{n}_out.bias" for n in "wav"},
        **{f"blk.*.time_mix_{n}": _P + n for n in ("k_k", "k_a", "r_k")},
        "blk.*.time_mix_receptance": _P + "r_proj",
        "blk.*.time_mix_key": _P + "k_proj",
        "blk.*.time_mix_value": _P + "v_proj",
        "blk.*.time_mix_output": _P + "o_proj",
        "blk.*.time_mix_ln": _P + "g_norm",
        "blk.*.channel_mix_lerp_k": _FFN + "mix_k",
        "blk.*.channel_mix_key": _FFN + "up_proj",
        "blk.*.channel_mix_value": _FFN + "down_proj",
        # safetensors
        "embeddings": "embed_tokens",
        "layers.0.pre_norm": "embed_norm",
        "layers.*.attn_norm": "layers.*.input_layernorm",
        "layers.*.ffn_norm": "layers.*.post_attention_layernorm",
        **{f"{_P}x_{n}": f"{_P}mix_{n}.weight" for n in _MIXES},
        **{f"{_P}{n}_lora.lora.{i}": f"{_P}{n}_{part}" for n in "wavg" for i, part in ((0, "in"), (2, "out"))},
        **{_P + n: f"{_P}{n}.weight" for n in ("k_k", "k_a", "r_k")},
        _FFN + "x_k": _FFN + "mix_k.weight",
        _FFN + "key": _FFN + "up_proj",
        _FFN + "value": _FFN + "down_proj",
    },
    transforms=(
        TokenShares(_P + "mixes", tuple(f"{_P}mix_{n}" for n in _MIXES), "gguf"),
        *(TokenShares(f"{_P}mix_{n}", (f"{_P}mix_{n}",), "safetensors") for n in _MIXES),
        TokenShares(_FFN + "mix_k", (_FFN + "mix_k",)),
        HeadSums(_P + "r_k", lambda c: c.num_heads),
    ),
)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.layer_norm(g.embedding("embed_tokens"), "embed_norm", cfg.norm_eps)
    values: Value | None = None
    for i in range(cfg.num_layers):
        x = g.layer_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        out, values = _time_mix(g, cfg, x, f"layers.{i}.attn.", values)
        h = h + out
        x = g.layer_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + plain_mlp(g, g.short_conv(x, f"layers.{i}.ffn.mix_k"), f"layers.{i}.ffn", "relu2")
    h = g.layer_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)


def _time_mix(g: Graph, cfg: Config, x: Value, p: str, first: Value | None) -> tuple[Value, Value]:
    """Return the output of a layer's delta rule, and the first layer's values.

    p: stem of its weights.
    first: the first layer's values, or None if this is the first layer.
    """
    mixed = {n: g.short_conv(x, f"{p}mix_{n}") for n in _MIXES}
    r, k, v = (g.linear(mixed[n], f"{p}{n}_proj") for n in "rkv")
    decay = g.add(Activation(_low_rank(g, mixed["w"], p + "w", "tanh"), "sigmoid")) * _DECAY
    rate = g.add(Activation(_low_rank(g, mixed["a"], p + "a"), "sigmoid"))
    if first is not None:
        v = v + (first + v * -1.0) * g.add(Activation(_low_rank(g, mixed["v"], p + "v"), "sigmoid"))
    dim = cfg.head_dim
    key = g.rms_norm(g.scale_columns(k, p + "k_k"), None, _UNIT_EPS / dim, dim) * dim**-0.5
    scaled = g.scale_columns(k, p + "k_a")
    k = k + scaled * rate + scaled * -1.0
    out = g.rwkv_delta_rule((r, k, v), (key, key * rate), decay, dim)
    out = g.layer_norm(out, p + "g_norm", cfg.group_eps, dim)
    out = out + v * g.head_linear(r * k, p + "r_k")
    gate = _low_rank(g, mixed["g"], p + "g", "sigmoid")
    return g.linear(out * gate, p + "o_proj"), v if first is None else first


def _low_rank(g: Graph, x: Value, stem: str, kind: str | None = None) -> Value:
    """Build a low-rank projection with an activation between its two factors."""
    x = g.linear(x, stem + "_in")
    return g.linear(x if kind is None else g.add(Activation(x, kind)), stem + "_out")
