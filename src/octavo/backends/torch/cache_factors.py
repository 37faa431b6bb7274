"""Factors for a cache of E4M3 numbers, derived from the weights that produce its keys and values.

E4M3 has three mantissa bits for magnitudes from 2^-6 to 448, and fewer below. A layer's factor maps the expected
magnitude to about 4: numbers a hundred times larger still fit, and numbers a hundred times smaller keep their
precision. No calibration text is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import FusedAttention
from octavo.graph.ops.linear import FusedLinear
from octavo.graph.values import Parameter

_AT = 4.0
_ROWS = 256  # rows of a matrix to sample


def cache_factors(
    graph: Graph, weight: Callable[[Parameter], Tensor], types: Mapping[int, torch.dtype]
) -> dict[int, tuple[float, float]]:
    """Return (key factor, value factor), both powers of two, of each E4M3 layer whose projections are known.

    graph: the optimized graph.
    weight: returns the numbers of a parameter.
    types: number type of each layer.
    """
    makers = {node.output: node.op for node in graph.nodes}
    found: dict[int, tuple[float, float]] = {}
    for node in graph.nodes:
        op = node.op
        if not isinstance(op, FusedAttention) or not op.owns_cache or types[op.params.layer] != torch.float8_e4m3fn:
            continue
        product = makers[op.qkv]
        if not isinstance(product, FusedLinear) or len(product.weights) != 3 or product.norm is None:
            continue
        norm = weight(product.norm).double()
        keys, values = (_magnitude(weight(p), norm) for p in product.weights[1:])
        if op.norms_k:
            keys = 1.0 if op.k_norm is None else float(weight(op.k_norm).double().square().mean().sqrt())
        found[op.params.layer] = (_factor(keys), _factor(1.0 if op.norms_v else values))
    return found


def _magnitude(matrix: Tensor, norm: Tensor) -> float:
    """Return the expected root mean square of the matrix's products with rows whose columns have the magnitudes of the
    norm's weights.
    """
    some = matrix[:: max(len(matrix) // _ROWS, 1)].double()
    return float((some * norm).square().sum(dim=1).mean().sqrt())


def _factor(magnitude: float) -> float:
    return 2.0 ** round(math.log2(magnitude / _AT)) if 0 < magnitude < math.inf else 1.0
