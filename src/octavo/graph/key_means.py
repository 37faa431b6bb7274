"""What the keys of a layer have on average, as far as the graph tells: the rotated bias of their projection.

Some models (Qwen2) have key biases a hundred times larger than what a token adds to them, mostly in dimensions that
rotate slowly. A cache of few bits would spend them on that; what all keys of a layer have in common may as well be
taken off before and be put back after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.graph.builder import Graph
from octavo.graph.ops import Attention, FusedAttention, FusedLinear, Linear, Op, Rope, RopeParams
from octavo.graph.values import Parameter, Value

Array = NDArray[np.floating[Any]]

_MEAN_OVER = 4096  # positions; beyond, what rotates slowly moves away from the mean, but no farther than without it


def key_means(graph: Graph, weight: Callable[[Parameter], Array]) -> dict[int, NDArray[np.float32]]:
    """By layer, [num_kv_heads * head_dim]; layers whose keys have no bias are left out. weight: of a parameter."""
    makers = {node.output: node.op for node in graph.nodes}
    means: dict[int, NDArray[np.float32]] = {}
    for node in graph.nodes:
        if isinstance(node.op, (Attention, FusedAttention)):
            bias, rope = _bias_and_rope(node.op, makers)
            if bias is not None:
                params = node.op.params
                heads = weight(bias).astype(np.float64).reshape(params.num_kv_heads, params.head_dim)
                means[params.layer] = _rotated_mean(heads, rope).astype(np.float32).reshape(-1)
    return means


def _bias_and_rope(
    op: Attention | FusedAttention, makers: dict[Value, Op]
) -> tuple[Parameter | None, RopeParams | None]:
    if isinstance(op, FusedAttention):
        maker = makers[op.qkv]
        if isinstance(maker, FusedLinear) and len(maker.biases) == 3 and op.k_norm is None:
            return maker.biases[1], op.rope
        return None, op.rope
    source = makers[op.k]
    linear = makers[source.x] if isinstance(source, Rope) else source
    return (linear.bias if isinstance(linear, Linear) else None), source.rope if isinstance(source, Rope) else None


def _rotated_mean(heads: NDArray[np.float64], rope: RopeParams | None) -> NDArray[np.float64]:
    """heads [num_kv_heads, head_dim], averaged over their rotations at the first positions."""
    if rope is None:
        return heads
    half = len(rope.frequencies)
    step = np.exp(1j * np.asarray(rope.frequencies))
    # A geometric sum; a frequency of zero does not rotate.
    still = step == 1
    turn = np.where(still, 1, (step**_MEAN_OVER - 1) / np.where(still, 1, _MEAN_OVER * (step - 1)))
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if rope.interleaved else (slice(half), slice(half, 2 * half))
    turned = (heads[:, pairs[0]] + 1j * heads[:, pairs[1]]) * turn * rope.attention_factor
    out: NDArray[np.float64] = heads.copy()
    out[:, pairs[0]], out[:, pairs[1]] = turned.real, turned.imag
    return out
