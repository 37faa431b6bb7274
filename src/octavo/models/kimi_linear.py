"""Kimi Linear: delta rules with per-channel decay in most layers, latent attention without positions in some.

Moonshot AI, arXiv 2510.26692.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Value
from octavo.models import deepseek2
from octavo.models._layers import mlp
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Flatten, NegativeExp, OfLayers, WeightTable, stacked_experts

ALIASES = ("kimi-linear",)

_UNIT_EPS = 1e-6  # added to the squared lengths of q and k
# Keys of config.json and those of DeepSeek.
_KEYS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "model_max_length": "max_position_embeddings",
}
_P, _MOE = "layers.*.self_attn.", "layers.*.block_sparse_moe."


@dataclass(frozen=True, slots=True)
class Config(deepseek2.Config):
    """Kimi Linear's configuration, with latent attention and the delta rule.

    delta_dim: columns of a head of the delta rule.
    attends: the layers with attention instead of a delta rule.
    """

    delta_dim: int = 128
    attends: frozenset[int] = frozenset()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        heads = reader.counts("attention.head_count_kv", num_layers)
        config = cls.latent_from_gguf(reader.with_largest("attention.head_count_kv", num_layers), shapes)
        return replace(
            config,
            delta_dim=reader.integer("kda.head_dim", high=MAX_WIDTH),
            attends=frozenset(layer for layer, count in enumerate(heads) if count),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.renamed(_KEYS).replaced("head_dim", reader.integer("qk_rope_head_dim", high=MAX_WIDTH))
        if not reader.flag("mla_use_nope", True):
            raise reader.error("mla_use_nope", False, "must be true: attention of this architecture has no positions")
        section = reader.section("linear_attn_config")
        dim = section.integer("head_dim", reader.integer("linear_head_dim", 128), high=MAX_WIDTH)
        config = cls.latent_from_hf(reader.with_defaults({"rms_norm_eps": 1e-5, "first_k_dense_replace": 1}))
        return replace(config, delta_dim=dim, is_interleaved=False, attends=_attends(reader, section))


def _attends(reader: ConfigReader, section: ConfigReader) -> frozenset[int]:
    """Return the layers with attention. Raises ModelLoadError naming the key.

    They come from the authors' list, which counts from 1, or from transformers' layer types. By default they are every
    fourth layer except layer 0.
    """
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    if reader.has("layer_types"):
        kinds = reader.texts("layer_types", num_layers, ("full_attention", "linear_attention"))
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    if section.has("full_attn_layers"):
        listed = section.value("full_attn_layers")
        if not isinstance(listed, list) or not all(isinstance(n, int) and 0 < n <= num_layers for n in listed):
            raise section.error("full_attn_layers", listed, f"must have whole numbers from 1 to {num_layers}")
        return frozenset(layer - 1 for layer in listed)
    return frozenset(layer for layer in range(num_layers) if layer and layer % 4 == 0)


WEIGHTS = WeightTable(
    names={
        **deepseek2.WEIGHTS.names,
        # GGUF
        **{f"blk.*.ssm_conv1d_{n}": f"{_P}{n}_conv1d" for n in "qkv"},
        **{f"blk.*.ssm_{new}_{part}": f"{_P}{new}_{part}_proj" for new in "fg" for part in "ab"},
        "blk.*.ssm_beta": _P + "b_proj",
        "blk.*.ssm_a": _P + "decay.weight",
        "blk.*.ssm_dt.bias": _P + "f_b_proj.bias",
        "blk.*.ssm_norm": _P + "o_norm",
        # safetensors
        _P + "A_log": _P + "decay.weight",
        _P + "dt_bias": _P + "f_b_proj.bias",
        _MOE + "gate": "layers.*.mlp.gate",
        _MOE + "gate.e_score_correction_bias": "layers.*.mlp.gate.e_score_correction.bias",
        **{
            _MOE + f"experts.*.{n}": f"layers.*.mlp.experts.*.{part}_proj"
            for n, part in zip(("w1", "w2", "w3"), ("gate", "down", "up"), strict=True)
        },
        # transformers also writes plain MLPs under the experts' names.
        **{
            f"{_MOE}{kind}{part}_proj": f"layers.*.mlp.{kind}{part}_proj"
            for kind in ("", "shared_experts.")
            for part in ("gate", "up", "down")
        },
    },
    transforms=(
        *(OfLayers(step, lambda c: c.attends) for step in deepseek2.latent_transforms()),
        *stacked_experts(),
        NegativeExp(_P + "decay", "safetensors"),
        Flatten(_P + "decay"),
        *(Flatten(f"{_P}{n}_conv1d") for n in "qkv"),
    ),
)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        if i in cfg.attends:
            h = h + deepseek2.latent_attention(g, cfg, x, i, rotates=False)
        else:
            h = h + _delta_attention(g, cfg, x, f"layers.{i}.self_attn.")
        h = h + mlp(g, g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps), cfg, i)
    return g.logits(g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps), cfg.output_head)


def _delta_attention(g: Graph, cfg: Config, x: Value, p: str) -> Value:
    """Build a layer's delta rule.

    p: stem of its weights.
    """
    dim = cfg.delta_dim
    q, k, v = (g.short_conv(g.linear(x, f"{p}{n}_proj"), f"{p}{n}_conv1d", "silu") for n in "qkv")
    # Both have length one; q is then divided by sqrt(dim).
    q, k = (g.rms_norm(y, None, _UNIT_EPS / dim, dim) * scale for y, scale in ((q, 1 / dim), (k, dim**-0.5)))
    gate, z = (g.linear(g.linear(x, f"{p}{n}_a_proj"), f"{p}{n}_b_proj") for n in "fg")
    out = g.kimi_delta_rule((q, k, v), gate, g.linear(x, p + "b_proj"), p + "decay.weight")
    out = g.add(GatedActivation(z, g.rms_norm(out, p + "o_norm", cfg.norm_eps), "sigmoid"))
    return g.linear(out, p + "o_proj")
