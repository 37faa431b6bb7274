"""Runs a graph, or a segment of one, on the CPU backend over whole texts of one length, all in a single step."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from octavo.backends import Executor, ExecutorLimits, get_backend
from octavo.backends.layers import Values
from octavo.batch import Batch
from octavo.graph.builder import Graph
from octavo.quantization.packed import Weight

_BLOCK_STEP = 16  # the CPU's cache blocks hold a multiple of this many tokens
MAX_BLOCK_TOKENS = 256


class TextRunner:
    """A compiled graph with a cache for texts [texts, tokens]. Close it to free its memory.

    rows: indices of the tokens whose logits are wanted, the same in every text.
    """

    def __init__(
        self, graph: Graph, weights: Mapping[str, Weight], texts: NDArray[np.int32], rows: NDArray[np.int32]
    ) -> None:
        self._graph, self._rows = graph, rows
        self._batch = whole_texts(graph, texts, rows)
        count, length = texts.shape
        limits = ExecutorLimits(texts.size, count, count * len(rows), length)
        self._executor: Executor = get_backend("cpu").compile(graph, weights, limits)
        num_blocks = self._batch.block_tables.size
        self._executor.allocate_cache(max(num_blocks, 1), _block_tokens(length), count)

    def run(self, inputs: Values = ()) -> Values:
        """Return the values at the end of the segment; for the last segment, only the logits [texts x rows,
        vocabulary].
        """
        self._batch.inputs = inputs
        output = self._executor.submit(self._batch).wait()
        return output.values if output.logits is None else (output.logits,)

    def take(self, texts: NDArray[np.int32]) -> None:
        """Switch to other texts of the same length, at most as many as the first ones."""
        self._batch = whole_texts(self._graph, texts, self._rows)

    def close(self) -> None:
        self._executor.close()

    def __enter__(self) -> TextRunner:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _block_tokens(length: int) -> int:
    return min(-(-length // _BLOCK_STEP) * _BLOCK_STEP, MAX_BLOCK_TOKENS)


def whole_texts(graph: Graph, texts: NDArray[np.int32], rows: NDArray[np.int32]) -> Batch:
    """Return a step over all texts, each with its own blocks in every group of layers.

    rows: as in `TextRunner`.
    """
    count, length = texts.shape
    groups, size = len(graph.cache_layout.groups), _block_tokens(length)
    width = -(-length // size)
    tables = np.arange(groups * count * width, dtype=np.int32).reshape(groups, count, width)
    places = np.arange(length)
    slots = tables[:, :, places // size] * np.int32(size) + (places % size).astype(np.int32)
    starts = np.arange(count + 1, dtype=np.int32) * np.int32(length)
    return Batch(
        token_ids=np.ascontiguousarray(texts.reshape(-1)),
        positions=np.tile(places.astype(np.int32), count),
        query_start_loc=starts,
        seq_lens=np.full(count, length, np.int32),
        block_tables=tables,
        slot_mapping=np.ascontiguousarray(slots.reshape(groups, -1)),
        logits_indices=(starts[:-1, None] + rows[None]).reshape(-1).astype(np.int32),
        state_slots=np.arange(count, dtype=np.int32),
        return_logits=graph.makes_logits,
    )
