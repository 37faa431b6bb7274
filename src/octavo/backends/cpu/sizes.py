"""The memory that a graph takes, known before it is compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo.backends.cpu import _native
from octavo.backends.cpu.lowering import PASSES
from octavo.backends.cpu.threads import plan_threads
from octavo.backends.cpu.weights import packed_types, plain_weight
from octavo.backends.parameters import parameter_info
from octavo.backends.sizes import PackedType, Sizes, sum_types
from octavo.graph.cache import CacheSizes
from octavo.graph.layer_formats import layer_formats
from octavo.graph.memory_plan import plan
from octavo.graph.passes import optimize
from octavo.graph.values import Parameter

if TYPE_CHECKING:
    from octavo.backends import ExecutorLimits
    from octavo.config import KVDtype
    from octavo.graph.builder import Graph
    from octavo.graph.cache import KVCache
    from octavo.graph.layer_formats import LayerFormat
    from octavo.quantization.packed import Weight

ELEMENT_BYTES = 4  # of a value: the kernels compute in float32

_PADDED_TO = 16  # dimensions of a value in the cache
_KEY_SCALE_DIMS = 32  # dimensions of a key with one scale
_SCALE_BYTES = 2


def sizes(
    graph: Graph,
    weights: Mapping[str, Weight],
    limits: ExecutorLimits,
    *,
    num_threads: int = 0,
    kv_dtype: KVDtype = "float16",
) -> Sizes:
    """See `octavo.backends.Backend`. Matrices without a kernel count as float16; few have numbers beyond it."""
    graph = optimize(graph, PASSES)
    formats = kv_formats(graph, weights, kv_dtype)
    matrices = {p: _packed_matrix(weights, p) for p in graph.parameters if len(p.shape) > 1}
    vectors = {p: 4 * p.shape[0] for p in graph.parameters if len(p.shape) == 1}
    return Sizes(
        graph=graph,
        weights=vectors | {parameter: matrix.packed_bytes for parameter, matrix in matrices.items()},
        types=sum_types(matrices.values()),
        workspace_bytes=estimate_workspace_bytes(graph, limits, plan_threads(num_threads).count),
        cache=cache_sizes(graph, formats),
        kv_formats=formats,
    )


def kv_formats(graph: Graph, weights: Mapping[str, Weight], kv_dtype: KVDtype) -> dict[int, LayerFormat]:
    """The number format of each layer's cache, which depends on the biases of its keys."""
    return layer_formats(graph, lambda p: plain_weight(weights, p), kv_dtype)


def _packed_matrix(weights: Mapping[str, Weight], parameter: Parameter) -> PackedType:
    info = parameter_info(weights, parameter)
    packed_as = packed_types(info.type_name)[0]
    num_bytes = _native.packed_nbytes(packed_as, math.prod(parameter.shape[:-1]), parameter.shape[-1])
    return PackedType(info.type_name, packed_as, info.nbytes, num_bytes)


def cache_sizes(graph: Graph, formats: Mapping[int, LayerFormat]) -> CacheSizes:
    """The layers of a block's slot share memory: it is as large as the largest of them needs."""
    layout = graph.cache_layout
    layers = {cache.layer: layer_bytes_per_token(cache, formats[cache.layer].kv_dtype) for cache in graph.kv_caches}
    slots = [0] * layout.slots
    for layer, num_bytes in layers.items():
        slot, _ = layout.place(layer)
        slots[slot] = max(slots[slot], num_bytes)
    return CacheSizes(layout, sum(layers.values()), sum(slots))


def layer_bytes_per_token(cache: KVCache, kv_dtype: KVDtype) -> int:
    """Bytes of a token in one layer: keys, padded values, and their scales (csrc/kv_cache.h)."""
    elements = cache.key_dim + -(-cache.value_dim // _PADDED_TO) * _PADDED_TO
    if kv_dtype == "int8":
        scales = -(-cache.key_dim // _KEY_SCALE_DIMS) + 1
        return cache.num_kv_heads * (elements + scales * _SCALE_BYTES)
    return cache.num_kv_heads * elements * 2


def estimate_workspace_bytes(graph: Graph, limits: ExecutorLimits, num_threads: int) -> int:
    """Bytes of an optimized graph's values and states and of the sampler's scratch, a few percent too low.

    The sampler has seven numbers for each token of the vocabulary on each thread (csrc/sampling.cpp). The scratch of
    products and attention depends on the instruction set and is not included.
    """
    values = plan(graph, limits.rows, ELEMENT_BYTES).total_bytes
    states = limits.max_num_seqs * graph.state_elements_per_sequence * ELEMENT_BYTES
    vocab_size = graph.output.cols if graph.makes_logits else 0
    return values + states + num_threads * vocab_size * 7 * 4
