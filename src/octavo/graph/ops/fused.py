"""Composite operations, made only by passes. Their meaning is that of the operations they replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.cache import KVCache
from octavo.graph.ops.attention import (
    AttentionParams,
    RopeParams,
    attention_flops,
    paged_attention,
    require_attention,
    require_rope,
    rotate,
)
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require
from octavo.graph.ops.elementwise import ACTIVATIONS, require_activation
from octavo.graph.ops.linear import linear, linear_flops, require_linear
from octavo.graph.ops.norm import rms_norm
from octavo.graph.values import Parameter, Rows, Value


@dataclass(frozen=True, slots=True)
class FusedLinear(Op):
    """norm -> several linears side by side (or gate and up with an activation) -> + residual.

    Without `kind`, the columns are the outputs of all weights side by side. With `kind` there are two weights,
    gate and up, and the output is kind(gate) * up.
    """

    row_wise: ClassVar[bool] = True

    x: Value
    residual: Value | None
    weights: tuple[Parameter, ...]
    biases: tuple[Parameter | None, ...]  # one a weight
    norm: Parameter | None = None  # RMSNorm of x before the product
    eps: float = 0.0
    kind: str | None = None

    def infer_shape(self) -> tuple[Rows, int]:
        require(len(self.weights) == len(self.biases) > 0, f"{len(self.weights)} weights, {len(self.biases)} biases")
        sizes = [require_linear(self.x, w, b) for w, b in zip(self.weights, self.biases, strict=True)]
        if self.norm is not None:
            require(
                self.norm.shape == (self.x.cols,),
                f"x {describe(self.x)} does not fit {self.norm.name} {list(self.norm.shape)}",
            )
        cols = sum(sizes)
        if self.kind is not None:
            require_activation(self.kind)
            require(len(sizes) == 2 and sizes[0] == sizes[1], f"gate and up have {sizes} features")
            cols = sizes[0]
        if self.residual is not None:
            require(
                (self.residual.rows, self.residual.cols) == (self.x.rows, cols),
                f"residual {describe(self.residual)} is not [{self.x.rows.value}, {cols}]",
            )
        return self.x.rows, cols

    def flops(self, sizes: StepSizes) -> int:
        rows = sizes.rows(self.x.rows)
        products = sum(linear_flops(rows, w, b) for w, b in zip(self.weights, self.biases, strict=True))
        norm = 4 * rows * self.x.cols if self.norm is not None else 0
        activation = 5 * rows * self.weights[0].shape[0] if self.kind is not None else 0
        residual = rows * self.residual.cols if self.residual is not None else 0
        return products + norm + activation + residual

    def evaluate(self, step: Evaluation) -> Array:
        x = step.values[self.x]
        if self.norm is not None:
            x = rms_norm(x, step.weights[self.norm], self.eps)
        parts = [linear(step, x, w, b) for w, b in zip(self.weights, self.biases, strict=True)]
        out = ACTIVATIONS[self.kind](parts[0]) * parts[1] if self.kind is not None else np.concatenate(parts, axis=-1)
        return out if self.residual is None else out + step.values[self.residual]

    @property
    def in_place(self) -> tuple[Value, ...]:
        # Every row of the product needs all of x, so x itself can never be overwritten.
        return () if self.residual is None or self.residual == self.x else (self.residual,)


@dataclass(frozen=True, slots=True)
class FusedAttention(Op):
    """Per-head norms, rope, cache write and attention on q, k and v side by side in one value."""

    qkv: Value  # [TOKENS, sum of params.widths]
    params: AttentionParams
    rope: RopeParams | None
    sinks: Parameter | None = None
    q_norm: Parameter | None = None  # RMSNorm [head_dim]
    k_norm: Parameter | None = None
    eps: float = 0.0

    def infer_shape(self) -> tuple[Rows, int]:
        p = self.params
        require_attention(p, self.sinks)
        if self.rope is not None:
            require_rope(self.rope, p.head_dim)
        cols = sum(p.widths)
        require(
            self.qkv.rows is Rows.TOKENS and self.qkv.cols == cols, f"qkv {describe(self.qkv)} is not [tokens, {cols}]"
        )
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                require(norm.shape == (p.head_dim,), f"{norm.name} {list(norm.shape)} is not [{p.head_dim}]")
        return Rows.TOKENS, p.output_width

    def flops(self, sizes: StepSizes) -> int:
        p = self.params
        total = attention_flops(p, sizes)
        if self.rope is not None:
            total += sizes.tokens * ((p.num_heads + p.num_kv_heads) * 6 + 3) * len(self.rope.frequencies)
        for norm, heads in ((self.q_norm, p.num_heads), (self.k_norm, p.num_kv_heads)):
            total += 4 * sizes.tokens * heads * p.head_dim if norm is not None else 0
        return total

    @property
    def cache(self) -> KVCache:
        return self.params.cache

    def evaluate(self, step: Evaluation) -> Array:
        p = self.params
        q, k, v = np.split(step.values[self.qkv], np.cumsum(p.widths)[:2], axis=-1)
        if self.q_norm is not None:
            q = rms_norm(q, step.weights[self.q_norm], self.eps)
        if self.k_norm is not None:
            k = rms_norm(k, step.weights[self.k_norm], self.eps)
        if self.rope is not None:
            q, k = (rotate(x, p.head_dim, self.rope, step.batch.positions) for x in (q, k))
        return paged_attention(step, q, k, v, p, None if self.sinks is None else step.weights[self.sinks])
