"""What a graph takes of memory beside its weights, known before it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo.graph.memory_plan import plan
from octavo.graph.values import Rows

if TYPE_CHECKING:
    from octavo.backends import ExecutorLimits
    from octavo.graph.builder import Graph
    from octavo.graph.layer_formats import LayerFormat

ELEMENT_BYTES = 4  # of a value: the kernels compute in float32

_PADDED_TO = 16  # dimensions of a value in the cache
_KEY_SCALE_DIMS = 32  # dimensions of a key with one scale
_SCALE_BYTES = 2


def cache_bytes_per_token(graph: Graph, formats: Mapping[int, LayerFormat]) -> int:
    """What a token takes in the cache: keys as they are, values padded, and their scales (csrc/kv_cache.h)."""
    total = 0
    for layer in graph.attention_layers:
        elements = layer.head_dim + -(-layer.head_dim // _PADDED_TO) * _PADDED_TO
        if formats[layer.layer].kv_dtype == "int8":
            scales = -(-layer.head_dim // _KEY_SCALE_DIMS) + 1
            total += layer.num_kv_heads * (elements + scales * _SCALE_BYTES)
        else:
            total += layer.num_kv_heads * elements * 2
    return total


def largest_rows(limits: ExecutorLimits) -> dict[Rows, int]:
    """The most rows that each kind of value has in a step."""
    return {
        Rows.TOKENS: limits.max_num_batched_tokens,
        Rows.OUTPUTS: limits.max_num_outputs,
    }


def estimate_workspace_bytes(graph: Graph, limits: ExecutorLimits, num_threads: int) -> int:
    """Bytes of the values of an optimized graph and of the sampler's scratch, a few hundredths below the truth.

    The sampler has seven numbers for each token of the vocabulary on each thread (csrc/sampling.cpp). What products
    and attention need depends on the instruction set and is missing.
    """
    return plan(graph, largest_rows(limits), ELEMENT_BYTES).total_bytes + num_threads * graph.output.cols * 7 * 4
