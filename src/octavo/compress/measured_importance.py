"""Measures the importance of columns by running the model over texts, layer by layer in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.backends.layers import Tokens, Values, layers_of, run_layer
from octavo.batch import Array
from octavo.compress.importance import ColumnSquares
from octavo.graph.ops.linear import Logits
from octavo.graph.values import Parameter
from octavo.loader.checkpoint import Checkpoint
from octavo.models import build_graph


def measure(
    checkpoint: Checkpoint, texts: Sequence[Tokens], report: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[str, ColumnSquares]:
    """Return the sums of squared inputs of every matrix in the layers, by the name of the stored tensor.

    Embeddings and the output head are left out, as in llama.cpp.

    report: called with the number of finished layers and the number of all layers.
    """
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    found: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def observe(parameter: Parameter, x: Array, index: int | None) -> None:
        matrices = 1 if index is None else parameter.shape[0]
        for tensor in checkpoint.weights.info(parameter.name).tensors:
            sums, counts = found.setdefault(tensor, (np.zeros((matrices, x.shape[1])), np.zeros(matrices)))
            sums[index or 0] += np.einsum("ij,ij->j", x, x, dtype=np.float64)
            counts[index or 0] += len(x)

    layers = layers_of(graph)
    values: list[Values] = [()] * len(texts)
    for i, layer in enumerate(layers):
        values = run_layer(layer, checkpoint.weights, texts, values, observe=observe, all_logits=False)
        report(i + 1, len(layers))
    heads = [node.op.weight for node in graph.nodes if isinstance(node.op, Logits)]
    outputs = {tensor for head in heads for tensor in checkpoint.weights.info(head.name).tensors}
    # In the precision of a file, so that importance that was written and read again gives the same model.
    return {
        name: ColumnSquares(sums.astype(np.float32).astype(np.float64), counts)
        for name, (sums, counts) in found.items()
        if name not in outputs
    }
