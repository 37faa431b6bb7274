"""DeepSeek V2 and V3, Kimi K2 and GLM 4.7 Flash: latent attention, grouped experts and shared experts.

In DeepSeek V3.2 and GLM 5, an indexer selects the tokens that each token attends to. While a sequence has no more
tokens than the indexer may select, it selects all of them. Such contexts are computed without it, and longer ones are
refused. arXiv 2405.04434, 2412.19437 and 2512.02556.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope, RopeParams
from octavo.graph.ops.latent_attention import LatentAttention
from octavo.graph.ops.moe import Routing
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig, checked_columns
from octavo.models._heads import next_token_head, without_heads
from octavo.models._layers import mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import rope_from_gguf, rope_from_hf, rope_section, yarn_mscale
from octavo.models._routing import checked, grouped_from_gguf, grouped_from_hf
from octavo.models._weights import (
    Heads,
    Permute,
    Split,
    Transform,
    WeightTable,
    halves_of_pairs,
    shared_expert_names,
    stacked_experts,
)

ALIASES = (
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm-dsa",
    "deepseek32",
)
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
_INDEX_TOPK = 2048

_LATENT_EPS = 1e-6  # epsilon of the latents' norms, regardless of the other norms


LatentT = TypeVar("LatentT", bound="Config")


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """DeepSeek's configuration.

    num_kv_heads, head_dim and value_dim describe the cache: one latent, including its rotary part.
    """

    nope_dim: int = 0  # columns of a head that do not rotate
    head_value_dim: int = 0  # columns of a head's output
    is_interleaved: bool = True  # the file keeps the two columns of a rotated pair together
    latent_scale: float = 1.0  # factor of the latent from which keys and values are computed
    index_topk: int | None = None  # tokens that the indexer chooses; None if there is no indexer

    @property
    def rope_dim(self) -> int:
        """Number of columns of a head that rotate. All heads share these columns of the keys."""
        return self.rope.rotary_dim

    @property
    def latent_dim(self) -> int:
        return self.value_dim

    def for_length(self, max_model_len: int) -> Config:
        if self.index_topk is not None and max_model_len > self.index_topk:
            raise ModelLoadError(
                f"max_model_len {max_model_len} is more than index_topk, {self.index_topk}: choosing tokens with an "
                f"indexer is not supported; set it to at most {self.index_topk} tokens"
            )
        return self

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        topk = reader.integer("attention.indexer.top_k") if reader.has("attention.indexer.top_k") else None
        return cls.latent_from_gguf(reader, shapes)._indexed(topk)

    @classmethod
    def latent_from_gguf(cls: type[LatentT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> LatentT:
        """Read the configuration of a GGUF file, without an indexer."""
        reader = without_heads(reader)
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        mlp = MLPConfig.from_gguf(
            reader,
            grouped_from_gguf(reader, shapes),
            first_experts=reader.integer("leading_dense_block_count", 0, low=0, high=num_layers),
            shared="plain" if reader.integer("expert_shared_count", 0, low=0) > 0 else None,
        )
        plain = cls.read_gguf(reader, shapes, mlp=mlp)
        rope_dim = reader.integer("rope.dimension_count", low=2, high=MAX_WIDTH)
        # Files older than llama.cpp's support for the latent form give head lengths under the plain names.
        key, value = ("key_length", "value_length")
        if reader.has("attention.key_length_mla"):
            key, value = (f"{name}_mla" for name in (key, value))
        head_dim = _columns(reader, f"attention.{key}", plain.num_heads, rope_dim + 1)
        rope = rope_from_gguf(reader, rope_dim, plain.max_position_embeddings)
        mscale = 1.0
        if reader.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0) > 0:  # a tenth of mscale_all_dim
            factor = reader.number("rope.scaling.factor", 1.0)
            mscale = yarn_mscale(factor, 10 * reader.number("rope.scaling.yarn_log_multiplier"))
            rope = replace(rope, attention_factor=1.0)  # mscale is equal and cancels out
        return plain._with_latent(
            latent_dim=reader.integer("attention.kv_lora_rank", high=MAX_WIDTH),
            rope=rope,
            scale=mscale**2 * head_dim**-0.5,
            nope_dim=head_dim - rope_dim,
            head_value_dim=_columns(reader, f"attention.{value}", plain.num_heads),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.latent_from_hf(reader)._indexed(_index_topk(reader))

    @classmethod
    def latent_from_hf(cls: type[LatentT], reader: ConfigReader, mlp: MLPConfig | None = None) -> LatentT:
        """Read the configuration from config.json, without an indexer.

        mlp: configuration of the MLPs; None means that it is read from DeepSeek's keys.
        """
        num_heads = reader.integer("num_attention_heads", high=MAX_WIDTH)
        rope_dim = _columns(reader, "qk_rope_head_dim", num_heads, 2)
        if rope_dim % 2:
            raise reader.error("qk_rope_head_dim", rope_dim, "must be even")
        if reader.integer("num_key_value_heads", num_heads) != num_heads:
            raise reader.error("num_key_value_heads", reader.integer("num_key_value_heads"), f"must be {num_heads}")
        if reader.integer("moe_layer_freq", 1) != 1:
            raise reader.error("moe_layer_freq", reader.integer("moe_layer_freq"), "must be 1")
        # A head_dim in the file is that of the rotary embedding. Without one, it must not be derived from the width.
        plain = cls.read_hf(
            reader.with_defaults({"head_dim": rope_dim, "num_key_value_heads": num_heads}),
            mlp=mlp or _mlp_from_hf(reader),
            is_interleaved=reader.flag("rope_interleave", True),
        )
        section = rope_section(reader)
        theta = reader.number("rope_theta", 10000.0, low=1.0)
        nope_dim = _columns(reader, "qk_nope_head_dim", num_heads)
        mscale = 1.0
        is_scaled = section.text("rope_type", section.text("type", "default")) != "default"
        if is_scaled and section.number("mscale_all_dim", 0.0, low=-1.0) > 0:
            mscale = yarn_mscale(section.number("factor"), section.number("mscale_all_dim", high=100.0))
        return plain._with_latent(
            latent_dim=reader.integer("kv_lora_rank", high=MAX_WIDTH),
            rope=rope_from_hf(section, rope_dim, theta, plain.max_position_embeddings),
            scale=mscale**2 * (nope_dim + rope_dim) ** -0.5,
            nope_dim=nope_dim,
            head_value_dim=_columns(reader, "v_head_dim", num_heads),
        )

    def _indexed(self, topk: int | None) -> Config:
        """Return the configuration limited to contexts in which the indexer would select every token."""
        length = self.max_position_embeddings
        return replace(self, index_topk=topk, max_position_embeddings=min(length, topk or length))

    def _with_latent(
        self: LatentT,
        *,
        latent_dim: int,
        rope: RopeParams,
        scale: float,
        nope_dim: int,
        head_value_dim: int,
    ) -> LatentT:
        return replace(
            self,
            num_kv_heads=1,
            head_dim=latent_dim + 2 * len(rope.frequencies),
            value_dim=latent_dim,
            attention=replace(self.attention, scale=scale),
            rope=replace(self.rope, params=rope),
            nope_dim=nope_dim,
            head_value_dim=head_value_dim,
        )


def _index_topk(reader: ConfigReader) -> int | None:
    return reader.integer("index_topk", _INDEX_TOPK) if reader.text("model_type", "") in _INDEXED else None


def _columns(reader: ConfigReader, key: str, heads: int, low: int = 1) -> int:
    return checked_columns(reader, key, reader.integer(key, low=low, high=MAX_WIDTH), heads)


def _mlp_from_hf(reader: ConfigReader) -> MLPConfig:
    return MLPConfig.from_hf(
        reader,
        _experts_from_hf(reader),
        first_experts=_first_experts(reader),
        shared="plain" if reader.integer("n_shared_experts", 0, low=0) > 0 else None,
    )


def _experts_from_hf(reader: ConfigReader) -> Routing:
    """Read the expert routing. V2 uses softmax scores and ranks groups by their best expert."""
    if reader.text("model_type") != "deepseek_v2":
        return grouped_from_hf(reader)
    if reader.text("scoring_func", "softmax") != "softmax":
        raise reader.error("scoring_func", reader.text("scoring_func"), "must be softmax")
    method = reader.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise reader.error("topk_method", method, "must be greedy or group_limited_greedy")
    if reader.flag("norm_topk_prob", False):
        raise reader.error(
            "norm_topk_prob", True, "must be false: transformers does not normalize in this architecture"
        )
    count = reader.integer("n_routed_experts")
    groups = 1 if method == "greedy" else reader.integer("n_group", high=count)
    routing = Routing(
        reader.integer("num_experts_per_tok", high=count),
        normalize=False,
        scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_groups=1 if method == "greedy" else reader.integer("topk_group", high=groups),
    )
    return checked(routing, reader, count, groups="n_group", chosen="num_experts_per_tok")


def _first_experts(reader: ConfigReader) -> int:
    """Return the first layer with experts. GLM 4.7 Flash lists the layers."""
    if not reader.has("mlp_layer_types"):
        return reader.integer("first_k_dense_replace", 0, low=0, high=MAX_LAYERS)
    kinds = reader.texts("mlp_layer_types", reader.integer("num_hidden_layers", high=MAX_LAYERS))
    first = kinds.count("dense")
    if kinds != ("dense",) * first + ("sparse",) * (len(kinds) - first):
        raise reader.error("mlp_layer_types", kinds, "must be dense in the first layers and sparse in the rest")
    return first


def _apart(parts: int, plain: int, rotary: int, is_interleaved: bool) -> NDArray[np.intp]:
    """Return the stored rows of `parts` heads: first the plain rows of all heads, then the rotary ones in halves."""
    rows = np.arange(parts * (plain + rotary)).reshape(parts, plain + rotary)
    halves = halves_of_pairs(1, rotary, rotary) if is_interleaved else np.arange(rotary)
    return np.concatenate([rows[:, :plain].reshape(-1), rows[:, plain:][:, halves].reshape(-1)])


def _q_rows(cfg: Config) -> tuple[int, int]:
    return cfg.num_heads * cfg.nope_dim, cfg.num_heads * cfg.rope_dim


def _kv_b_rows(cfg: Config) -> tuple[int, int]:
    return cfg.num_heads * cfg.nope_dim, cfg.num_heads * cfg.head_value_dim


_ATTENTION = "layers.*.self_attn."
_QUERIES = ("q_", "q_b_")  # projections of the input, and of the latent of queries
_INDEXER = {"attn_q_b": "wq_b", "attn_k": "wk", "k_norm": "k_norm", "proj": "weights_proj"}  # GGUF -> other files


def latent_transforms(stem: str = _ATTENTION, *, joined: bool = False) -> tuple[Transform, ...]:
    """Return the transforms of the attention weights under `stem`.

    joined: GGUF files have the two latent projections in one matrix.
    """
    b_parts = (stem + "k_b_rows", stem + "v_b_rows")
    rows = Permute(stem + "kv_b_proj", lambda c: _apart(c.num_heads, c.nope_dim, c.head_value_dim, False))
    steps = (
        rows,
        Split(rows.stem, b_parts, _kv_b_rows),
        Heads(b_parts[0], stem + "k_b_proj", lambda c: c.num_heads, transposed=True),
        Heads(b_parts[1], stem + "v_b_proj", lambda c: c.num_heads),
    )
    # GGUF files of other families have had the two halves since April 2025.
    return (*_latent_steps(stem), *(step if joined else replace(step, one_way=True) for step in steps))


def _latent_steps(stem: str) -> tuple[Transform, ...]:
    queries = (
        step
        for q in _QUERIES
        for step in (
            Permute(f"{stem}{q}proj", lambda c: _apart(c.num_heads, c.nope_dim, c.rope_dim, c.is_interleaved)),
            Split(f"{stem}{q}proj", (f"{stem}{q}nope_proj", f"{stem}{q}rope_proj"), _q_rows),
        )
    )
    latent, parts = stem + "kv_a_proj_with_mqa", (stem + "kv_a_proj", stem + "k_rope_proj")
    return (
        *queries,
        Permute(latent, lambda c: _apart(1, c.latent_dim, c.rope_dim, c.is_interleaved)),
        Split(latent, parts, lambda c: (c.latent_dim, c.rope_dim)),
    )


WEIGHTS = WeightTable(
    names={
        "blk.*.attn_q_a": _ATTENTION + "q_a_proj",
        "blk.*.attn_q_a_norm": _ATTENTION + "q_a_layernorm",
        "blk.*.attn_q_b": _ATTENTION + "q_b_proj",
        "blk.*.attn_kv_a_mqa": _ATTENTION + "kv_a_proj_with_mqa",
        "blk.*.attn_kv_a_norm": _ATTENTION + "kv_a_layernorm",
        "blk.*.attn_kv_b": _ATTENTION + "kv_b_proj",
        "blk.*.attn_k_b": _ATTENTION + "k_b_proj",
        "blk.*.attn_v_b": _ATTENTION + "v_b_proj",
        # The indexer's weights, which no graph uses.
        **{f"blk.*.indexer.{new}": f"{_ATTENTION}indexer.{old}" for new, old in _INDEXER.items()},
        **shared_expert_names(),
    },
    transforms=(*latent_transforms(), *stacked_experts()),
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
    h = h + latent_attention(g, cfg, g.rms_norm(h, p + "input_layernorm", cfg.norm_eps), layer)
    return h + mlp(g, g.rms_norm(h, p + "post_attention_layernorm", cfg.norm_eps), cfg, layer)


def latent_attention(
    g: Graph, cfg: Config, x: Value, layer: int, *, rotates: bool = True, half: int | None = None
) -> Value:
    """Build attention over latents: each head's key projection is absorbed into its queries, and its value projection
    comes after attention.

    rotates: False for a layer without rotary positions.
    half: 0 or 1 in a layer with two attentions, each with its own cache; None in a layer with one.
    """
    p, params = f"layers.{layer}.self_attn.", cfg.attention_params(layer)
    if half is not None:
        p, params = f"{p}{half}.", replace(params, layer=2 * layer + half)
    q, stem = x, p + _QUERIES[0]
    if p + "q_a_proj.weight" in g.weights:
        q, stem = g.rms_norm(g.linear(x, p + "q_a_proj"), p + "q_a_layernorm", _LATENT_EPS), p + _QUERIES[1]
    q_latent = g.head_linear(g.linear(q, stem + "nope_proj"), p + "k_b_proj")
    latent = g.rms_norm(g.linear(x, p + "kv_a_proj"), p + "kv_a_layernorm", _LATENT_EPS) * cfg.latent_scale
    q_rope, k_rope = g.linear(q, stem + "rope_proj"), g.linear(x, p + "k_rope_proj")
    if rotates:
        q_rope, k_rope = (g.add(Rope(y, cfg.rope_dim, cfg.rope.params)) for y in (q_rope, k_rope))
    mixed = g.add(LatentAttention(q_latent, q_rope, latent, k_rope, params))
    return g.linear(g.head_linear(mixed, p + "v_b_proj"), p + "o_proj")
