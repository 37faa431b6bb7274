"""What a graph takes of memory beside its weights, known before it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo.graph.memory_plan import plan
from octavo.graph.values import Rows

if TYPE_CHECKING:
    from octavo.backends import ExecutorLimits
    from octavo.config import KVDtype
    from octavo.graph.builder import Graph
    from octavo.graph.cache import KVCache
    from octavo.graph.layer_formats import LayerFormat

ELEMENT_BYTES = 4  # of a value: the kernels compute in float32

_PADDED_TO = 16  # dimensions of a value in the cache
_KEY_SCALE_DIMS = 32  # dimensions of a key with one scale
_SCALE_BYTES = 2


def cache_bytes_per_token(graph: Graph, formats: Mapping[int, LayerFormat]) -> int:
    """Bytes of a token in the caches of all layers."""
    return sum(layer_bytes_per_token(cache, formats[cache.layer].kv_dtype) for cache in graph.kv_caches)


def layer_bytes_per_token(cache: KVCache, kv_dtype: KVDtype) -> int:
    """Bytes of a token in one layer: keys as they are, values padded, and their scales (csrc/kv_cache.h)."""
    elements = cache.key_dim + -(-cache.value_dim // _PADDED_TO) * _PADDED_TO
    if kv_dtype == "int8":
        scales = -(-cache.key_dim // _KEY_SCALE_DIMS) + 1
        return cache.num_kv_heads * (elements + scales * _SCALE_BYTES)
    return cache.num_kv_heads * elements * 2


def largest_rows(limits: ExecutorLimits) -> dict[Rows, int]:
    """The most rows that each kind of value has in a step."""
    return {
        Rows.TOKENS: limits.max_num_batched_tokens,
        Rows.OUTPUTS: limits.max_num_outputs,
    }


def estimate_workspace_bytes(graph: Graph, limits: ExecutorLimits, num_threads: int) -> int:
    """Bytes of an optimized graph's values and states and of the sampler's scratch, a few hundredths below the truth.

    The sampler has seven numbers for each token of the vocabulary on each thread (csrc/sampling.cpp). What products
    and attention need depends on the instruction set and is missing.
    """
    values = plan(graph, largest_rows(limits), ELEMENT_BYTES).total_bytes
    states = limits.max_num_seqs * graph.state_elements_per_sequence * ELEMENT_BYTES
    vocab_size = graph.output.cols if graph.makes_logits else 0
    return values + states + num_threads * vocab_size * 7 * 4
