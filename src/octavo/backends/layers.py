"""Runs a model over texts in numpy, layer by layer, for calibration.

Only one layer's weights are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, reference
from octavo.batch import Array, Batch
from octavo.errors import NumericalError
from octavo.graph.builder import Graph
from octavo.graph.ops.base import Observer
from octavo.graph.segments import cut
from octavo.quantization.packed import Weight

Tokens = NDArray[np.int32]
Values = tuple[Array, ...]
"""The values that one layer passes to the next."""


def layers_of(graph: Graph) -> list[Graph]:
    """Return one graph for each layer; the first includes the embedding, and the last the output head."""
    indices = sorted({node.layer_index for node in graph.nodes if node.layer_index is not None})
    return cut(graph, [range(i, i + 1) for i in indices])


def run_layer(
    layer: Graph,
    weights: Mapping[str, Weight],
    texts: Sequence[Tokens],
    inputs: Sequence[Values],
    *,
    observe: Observer | None = None,
    all_logits: bool = True,
) -> list[Values]:
    """Return the values that a layer computes for each text.

    The last layer returns the logits of all tokens, or of only the last token without `all_logits`.

    inputs: the previous layer's values for each text; empty tuples for the first layer.
    """
    return [*each_text(layer, weights, texts, inputs, observe=observe, all_logits=all_logits)]


def each_text(
    layer: Graph,
    weights: Mapping[str, Weight],
    texts: Sequence[Tokens],
    inputs: Sequence[Values],
    *,
    observe: Observer | None = None,
    all_logits: bool = True,
) -> Iterator[Values]:
    """Yield the values of `run_layer` text by text. Raises NumericalError if a value is NaN."""
    longest = max(len(text) for text in texts)
    executor = reference.compile(layer, weights, ExecutorLimits(longest, 1, longest, longest))
    try:
        executor.observer = observe
        executor.allocate_cache(1, longest, 1)
        for text, values in zip(texts, inputs, strict=True):
            with np.errstate(invalid="ignore", over="ignore"):  # the check below says it in one line
                made = _run(executor, _batch(layer, text, values, all_logits))
            if not all(np.isfinite(value).all() for value in made):
                index = next(node.layer_index for node in layer.nodes if node.layer_index is not None)
                raise NumericalError(
                    f"layer {index} produces NaN or infinity on the calibration text; use an intact model"
                )
            yield made
    finally:
        executor.close()


def _batch(layer: Graph, text: Tokens, values: Values, all_logits: bool) -> Batch:
    """Return a batch with a whole text in one step; each cache group has a single block."""
    count, groups = len(text), len(layer.cache_layout.groups)
    places = np.arange(count, dtype=np.int32)
    return Batch(
        token_ids=text,
        positions=places,
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_tables=np.zeros((groups, 1, 1), np.int32),
        slot_mapping=np.tile(places, (groups, 1)),
        logits_indices=places if all_logits else places[-1:],
        state_slots=np.zeros(1, np.int32),
        return_logits=layer.makes_logits,
        inputs=values,
    )


def _run(executor: reference.ReferenceExecutor, batch: Batch) -> Values:
    output = executor.submit(batch).wait()
    return output.values if output.logits is None else (output.logits,)
