"""Column scales at no cost: matrices are multiplied by a scale, and whatever produces their input is divided by it.

The producer is found in the graph: a norm whose output only feeds matrices, the values of an attention, or the `up`
half of a gated MLP. Source: SmoothQuant (Xiao et al., arXiv 2211.10438) and AWQ (Lin et al., arXiv 2306.00978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.graph.builder import Graph, Node
from octavo.graph.ops.attention import Attention
from octavo.graph.ops.linear import Linear
from octavo.graph.ops.rowwise import GatedActivation, LayerNorm, RMSNorm
from octavo.graph.values import Parameter, Value
from octavo.quantization.ggml_blocks import Floats


@dataclass(frozen=True, slots=True)
class ColumnFold:
    """Matrices that share an input, and the vectors or matrices whose elements or rows produce it.

    consumers: all matrices that read the input.
    producers: a norm's weight and bias, or a matrix and its bias.
    heads: if an attention operation is between producer and consumers: (query heads, kv heads, columns per head). The
        input has one part per query head, and the producer one per kv head. None if there is no attention in between.
    """

    consumers: tuple[Parameter, ...]
    producers: tuple[Parameter, ...]
    heads: tuple[int, int, int] | None = None

    @property
    def is_norm(self) -> bool:
        return len(self.producers[0].shape) == 1

    def shared(self, columns: Floats) -> Floats:
        """Convert one number per input column to one per producer row: the mean over the query heads of a kv head."""
        if self.heads is None:
            return columns
        heads, kv_heads, width = self.heads
        found: Floats = columns.reshape(kv_heads, heads // kv_heads, width).mean(1).reshape(-1)
        return found

    def spread(self, rows: Floats) -> Floats:
        """Convert one number per producer row to one per input column."""
        if self.heads is None:
            return rows
        heads, kv_heads, width = self.heads
        return np.repeat(rows.reshape(kv_heads, 1, width), heads // kv_heads, 1).reshape(-1)


def find_folds(layer: Graph) -> list[ColumnFold]:
    """Find the folds of a layer, in the order of its operations."""
    makers = {node.output: node for node in layer.nodes}
    readers: dict[Value, list[Node]] = {}
    for node in layer.nodes:
        for value in node.op.inputs:
            readers.setdefault(value, []).append(node)
    found = []
    for value, nodes in readers.items():
        if value in layer.outputs or value not in makers or not all(isinstance(node.op, Linear) for node in nodes):
            continue
        consumers = tuple(node.op.weight for node in nodes if isinstance(node.op, Linear))
        if (fold := _fold(consumers, makers[value], makers, readers)) is not None:
            found.append(fold)
    return found


def _fold(
    consumers: tuple[Parameter, ...],
    maker: Node,
    makers: dict[Value, Node],
    readers: dict[Value, list[Node]],
) -> ColumnFold | None:
    op = maker.op
    if isinstance(op, RMSNorm | LayerNorm) and op.weight is not None:
        bias = op.bias if isinstance(op, LayerNorm) else None
        whole = op.weight.shape[0] == maker.output.cols
        return ColumnFold(consumers, _present(op.weight, bias)) if whole else None
    heads = None
    if isinstance(op, Attention) and op.v is not None:
        heads = (op.params.num_heads, op.params.num_kv_heads, op.v.cols // op.params.num_kv_heads)
        source = op.v
    elif isinstance(op, GatedActivation):
        source = op.up
    else:
        return None
    producer = makers.get(source)
    if producer is None or not isinstance(producer.op, Linear) or len(readers[source]) > 1:
        return None
    return ColumnFold(consumers, _present(producer.op.weight, producer.op.bias), heads)


def _present(*parameters: Parameter | None) -> tuple[Parameter, ...]:
    return tuple(parameter for parameter in parameters if parameter is not None)


def smoothing_scale(largest: Floats, matrices: Sequence[Floats], strength: float) -> Floats:
    """Return SmoothQuant's scale: each column's largest input to the power of `strength`, divided by its largest weight
    to the power of 1 - `strength`.

    largest: largest magnitude of each column of the inputs, [columns].
    matrices: the matrices that read them, [rows, columns].
    """
    weights = np.max([np.abs(matrix).max(0) for matrix in matrices], axis=0)
    scale = np.power(np.maximum(largest, 1e-5), strength) / np.power(np.maximum(weights, 1e-5), 1 - strength)
    found: Floats = np.clip(scale, 1e-3, 1e3).astype(np.float32)
    return found
