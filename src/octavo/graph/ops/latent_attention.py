"""Attention over compressed keys and values, and the per-head products around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.cache import KVCache
from octavo.graph.cuts import Cut
from octavo.graph.head_cuts import AttentionHeads
from octavo.graph.ops.attention import AttentionParams, attend_cached, attention_flops, require_attention
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require
from octavo.graph.product_cuts import HeadProducts
from octavo.graph.values import TOKENS, Parameter, RowDomain, Value

_PANEL = 16  # rows of a matrix, or columns of a value, that the kernels take together


@dataclass(frozen=True, slots=True)
class HeadLinear(Op):
    """y_h = x_h @ weight[h].T: a separate matrix for each head's columns. -> [rows, heads * out]"""

    row_wise: ClassVar[bool] = True
    cut: ClassVar[Cut[Any]] = HeadProducts()

    x: Value  # [rows, heads * in]
    weight: Parameter  # [heads, out, in]; out is a multiple of 16

    def infer_shape(self) -> tuple[RowDomain, int]:
        shape = self.weight.shape
        require(len(shape) == 3, f"{self.weight.name} {list(shape)} is not [heads, out, in]")
        require(self.x.cols == shape[0] * shape[2], f"x {describe(self.x)} does not fit {self.weight.name} {shape}")
        require(shape[1] % _PANEL == 0, f"{self.weight.name} has {shape[1]} rows per head, not a multiple of {_PANEL}")
        return self.x.rows, shape[0] * shape[1]

    def flops(self, sizes: StepSizes) -> int:
        heads, out_features, in_features = self.weight.shape
        return sizes.rows(self.x.rows) * heads * out_features * 2 * in_features

    def evaluate(self, step: Evaluation) -> Array:
        x, weight = step.values[self.x], step.weights[self.weight]
        heads, out_features, in_features = weight.shape
        product = x.reshape(-1, heads, in_features).transpose(1, 0, 2) @ weight.transpose(0, 2, 1)
        out: Array = product.transpose(1, 0, 2).reshape(-1, heads * out_features)
        return out


@dataclass(frozen=True, slots=True)
class LatentAttention(Op):
    """Causal attention of all heads over one key per token, whose first `latent` columns are also its value.

    The key consists of the latent and a rotary part that the heads share. The uncompressed form of the model would
    compute all heads' keys and values from the latent. The products with the heads' own matrices are absorbed: they are
    applied to queries before the attention and to its outputs (`HeadLinear`). DeepSeek-V2, arXiv 2405.04434, section
    2.1.
    """

    cut: ClassVar[Cut[Any]] = AttentionHeads(("q", "q_rope"))

    q: Value  # [TOKENS, num_heads * latent]
    q_rope: Value  # [TOKENS, num_heads * rope], rotated
    latent: Value  # [TOKENS, latent]; -> [TOKENS, num_heads * latent]
    k_rope: Value  # [TOKENS, rope], rotated
    params: AttentionParams  # one kv head; head_dim: latent + rope; value_dim: latent

    def infer_shape(self) -> tuple[RowDomain, int]:
        p = self.params
        require_attention(p, None)
        latent = p.cache.value_dim
        rope = p.head_dim - latent
        require(p.num_kv_heads == 1 and rope > 0, f"a latent has one kv head and more columns than its value: {p}")
        require(latent % _PANEL == 0, f"a latent has {latent} columns, not a multiple of {_PANEL}")
        columns = {"q": p.num_heads * latent, "q_rope": p.num_heads * rope, "latent": latent, "k_rope": rope}
        for name, cols in columns.items():
            value: Value = getattr(self, name)
            require(value.rows is TOKENS and value.cols == cols, f"{name} {describe(value)} is not [tokens, {cols}]")
        return TOKENS, p.output_width

    def flops(self, sizes: StepSizes) -> int:
        return attention_flops(self.params, sizes)

    @property
    def cache(self) -> KVCache:
        p = self.params
        return KVCache(p.layer, 1, p.head_dim, 0, p.window, p.chunked)

    def evaluate(self, step: Evaluation) -> Array:
        p, cache = self.params, step.caches[self.params.layer]
        parts = [(self.q, self.q_rope, p.num_heads), (self.latent, self.k_rope, 1)]
        q, key = (
            np.concatenate(
                [step.values[x].reshape(-1, heads, step.values[x].shape[1] // heads) for x in (a, b)], axis=2
            )
            for a, b, heads in parts
        )
        cache.write(step.batch.slot_mapping[cache.group], key, key[..., :0])
        return attend_cached(step, q.reshape(q.shape[0], -1), p, None)
