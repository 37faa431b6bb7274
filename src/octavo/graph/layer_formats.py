"""Chooses the number format of each layer's cache from the biases of its keys.

Some models (Qwen2) have key biases a hundred times larger than a token's own contribution, mostly in dimensions that
rotate slowly. A cache with few bits would spend its bits on them. Therefore the mean of the rotated bias is subtracted
from keys before rounding. A layer keeps float16 if its bias stays large even without the mean, because it rotates fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.config import KVDtype
from octavo.graph.builder import Graph
from octavo.graph.cache import KVCache
from octavo.graph.ops.attention import Attention, FusedAttention, Rope, RopeParams
from octavo.graph.ops.base import Op
from octavo.graph.ops.linear import FusedLinear, Linear
from octavo.graph.values import Parameter, Value

_MEAN_OVER = 4096  # positions; the mean of a bias over many more of them is nearly zero
# Length of the part of a bias that is left, at most, for int8. Of the layers of Qwen2.5-coder 0.5B and 1.5B only the
# first one of the smaller model has more: 71, the next 22.
_LARGEST_REST = 32.0


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The number format of one layer's cache.

    key_mean: mean that is subtracted from int8 keys, [num_kv_heads * key_dim].
    """

    kv_dtype: KVDtype
    key_mean: NDArray[np.float32] | None = None


def layer_formats(graph: Graph, weight: Callable[[Parameter], Array], kv_dtype: KVDtype) -> dict[int, LayerFormat]:
    """Choose the formats of all layers with attention for this `kv_dtype`.

    weight: returns the values of a parameter (a bias).
    """
    # A latent is a key and a value in one: it keeps float16.
    caches = (*graph.kv_caches, *graph.borrowed)
    formats = {cache.layer: LayerFormat(kv_dtype if cache.value_dim else "float16") for cache in caches}
    makers = {node.output: node.op for node in graph.nodes}
    for op in makers.values() if kv_dtype != "float16" else ():
        bias, rope = _bias_and_rope(op, makers)
        if not isinstance(op.cache, KVCache):
            continue
        cache = op.cache
        if kv_dtype == "fp8":
            # Its numbers have four bits, and a large bias would use them all up.
            if bias is not None:
                formats[cache.layer] = LayerFormat("float16")
        elif bias is not None:
            heads = weight(bias).astype(np.float64).reshape(cache.num_kv_heads, cache.key_dim)
            mean = _rotated_mean(heads, rope)
            is_large = rope is not None and _rest(heads, mean, rope) > _LARGEST_REST
            means = None if is_large else mean.astype(np.float32).reshape(-1)
            formats[cache.layer] = LayerFormat("float16" if is_large else "int8", means)
    return formats


def _bias_and_rope(op: Op, makers: dict[Value, Op]) -> tuple[Parameter | None, RopeParams | None]:
    """Return the bias of the key projection, and the keys' rotary embedding."""
    if isinstance(op, FusedAttention):
        maker = makers[op.qkv]
        if isinstance(maker, FusedLinear) and op.owns_cache and len(maker.biases) == 3 and not op.norms_k:
            return maker.biases[1], op.rope
        return None, op.rope
    if not isinstance(op, Attention) or op.k is None:
        return None, None
    source = makers[op.k]
    linear = makers[source.x] if isinstance(source, Rope) else source
    return (linear.bias if isinstance(linear, Linear) else None), source.rope if isinstance(source, Rope) else None


def _rest(heads: NDArray[np.float64], mean: NDArray[np.float64], rope: RopeParams) -> float:
    """Return the largest root mean square length of any rotated head after subtracting its mean."""
    rotated = slice(2 * len(rope.frequencies))
    squares = (heads[:, rotated] * rope.attention_factor) ** 2 - mean[:, rotated] ** 2  # a rotation keeps lengths
    return float(np.sqrt(np.maximum(squares.sum(axis=1), 0)).max())


def _rotated_mean(heads: NDArray[np.float64], rope: RopeParams | None) -> NDArray[np.float64]:
    """Average heads [num_kv_heads, key_dim] over their rotations at the first positions."""
    if rope is None:
        return heads
    half = len(rope.frequencies)
    step = np.exp(1j * np.asarray(rope.frequencies))
    # A geometric sum; a frequency of zero does not rotate.
    still = step == 1
    turn = np.where(still, 1, (step**_MEAN_OVER - 1) / np.where(still, 1, _MEAN_OVER * (step - 1)))
    turned = (heads[:, :half] + 1j * heads[:, half : 2 * half]) * turn * rope.attention_factor
    out: NDArray[np.float64] = heads.copy()
    out[:, :half], out[:, half : 2 * half] = turned.real, turned.imag
    return out
