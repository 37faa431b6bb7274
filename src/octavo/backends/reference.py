"""The specification: a numpy interpreter of graphs in float32 or float64, paged cache included.

Every other backend is tested against it, operation by operation. What an operation means is written where it
is defined, in `octavo.graph.ops`; here are only the step, the weights and the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import DTypeLike

from octavo.backends import ExecutorLimits, FinishedStep, PackCacheOptions
from octavo.backends.sampling import sample
from octavo.batch import Batch, StepOutput
from octavo.config import KVDtype
from octavo.errors import UsageError
from octavo.graph.builder import Graph
from octavo.graph.layer_formats import layer_formats
from octavo.graph.ops import Array, LayerCache
from octavo.graph.values import Parameter, Rows, Value
from octavo.quantization.packed import Weight


def compile(  # noqa: A001 - the backend protocol's name
    graph: Graph,
    weights: Mapping[str, Weight],
    limits: ExecutorLimits,
    *,
    num_threads: int = 0,  # noqa: ARG001 - numpy decides
    progress: Callable[[int, int], None] | None = None,
    pack_cache: PackCacheOptions | None = None,  # noqa: ARG001 - nothing is packed
    kv_dtype: KVDtype | None = None,
    dtype: DTypeLike = np.float32,
) -> ReferenceExecutor:
    """An executor of `graph` in `dtype`, float32 or float64. See `octavo.backends.Backend.compile`.

    kv_dtype: what keys and values are rounded to; they are kept in `dtype` all the same. None: nothing is rounded.
    """
    dense: dict[str, Array] = {}
    total = sum(weights[p.name].nbytes for p in graph.parameters)
    loaded = 0
    for parameter in graph.parameters:
        weight = weights[parameter.name]
        dense[parameter.name] = weight.dequantize().astype(dtype, copy=False).reshape(parameter.shape)
        loaded += weight.nbytes
        if progress is not None:
            progress(loaded, total)
    return ReferenceExecutor(graph, dense, limits, kv_dtype, dtype)


class ReferenceExecutor:
    """Walks the graph, one numpy expression a node. Implements `octavo.backends.Executor`."""

    max_in_flight = 1

    def __init__(
        self,
        graph: Graph,
        weights: dict[str, Array],
        limits: ExecutorLimits,
        kv_dtype: KVDtype | None,
        dtype: DTypeLike,
    ) -> None:
        self._graph = graph
        self._weights = weights
        self._limits = limits
        self._kv_dtype = kv_dtype
        self._dtype = np.dtype(dtype)
        self._caches: dict[int, LayerCache] = {}

    @property
    def kv_bytes_per_token(self) -> int:
        return self._graph.kv_elements_per_token * self._dtype.itemsize

    @property
    def mapped_bytes(self) -> int:
        return 0

    @property
    def num_threads(self) -> int:
        """The caller's; what numpy adds to it is numpy's own affair."""
        return 1

    @property
    def workspace_bytes(self) -> int:
        """All values of the largest step: nothing is reused here."""
        limits = self._limits
        rows = {
            Rows.TOKENS: limits.max_num_batched_tokens,
            Rows.OUTPUTS: limits.max_num_outputs,
        }
        return sum(rows[n.output.rows] * n.output.cols for n in self._graph.nodes) * self._dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        return sum(w.nbytes for w in self._weights.values())

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        formats = {}
        if self._kv_dtype is not None:
            formats = layer_formats(self._graph, lambda p: self._weights[p.name], self._kv_dtype)
        for p in self._graph.attention_layers:
            # NaN, so that a slot that is read before it is written shows.
            keys = np.full((num_blocks * block_size, p.num_kv_heads, p.head_dim), np.nan, self._dtype)
            cache = LayerCache(keys, keys.copy(), block_size)
            if p.layer in formats:
                cache.kv_dtype, mean = formats[p.layer].kv_dtype, formats[p.layer].key_mean
                cache.key_mean = None if mean is None else mean.reshape(p.num_kv_heads, p.head_dim)
            self._caches[p.layer] = cache

    def submit(self, batch: Batch) -> FinishedStep:
        self._check(batch)
        return FinishedStep(lambda: self._compute(batch))

    def _compute(self, batch: Batch) -> StepOutput:
        for source, destination in batch.block_copies.tolist():
            self._copy_block(source, destination)
        step = _Step(batch, self._dtype, self._weights, self._caches)
        result = self._graph.hidden_states if batch.return_hidden_states else self._graph.output
        for node in self._graph.nodes:
            step.results[node.output] = node.op.evaluate(step)
            if node.output == result:
                break
        if batch.return_hidden_states:
            output = _unsampled(len(batch.logits_indices))
            output.hidden_states = step.results[result]  # float64 where the executor was asked for it
            return output
        logits = step.results[result]
        if batch.sampling is None:
            output = _unsampled(logits.shape[0])
        else:
            output = sample(logits.astype(np.float32), batch.sampling)
        if batch.return_logits:
            output.logits = logits  # float64 where the executor was asked for it
        return output

    def _copy_block(self, source: int, destination: int) -> None:
        for cache in self._caches.values():
            size = cache.block_size
            for array in (cache.keys, cache.values):
                array[destination * size : (destination + 1) * size] = array[source * size : (source + 1) * size]

    def close(self) -> None:
        self._weights.clear()
        self._caches.clear()

    def _check(self, batch: Batch) -> None:
        limits = self._limits
        for what, count, limit in (
            ("tokens", len(batch.token_ids), limits.max_num_batched_tokens),
            ("requests", len(batch.seq_lens), limits.max_num_seqs),
            ("outputs", len(batch.logits_indices), limits.max_num_outputs),
        ):
            if count > limit:
                raise UsageError(f"a step with {count} {what} exceeds the executor's limit of {limit}")


class _Step:
    """One step's values. Implements `octavo.graph.ops.Evaluation`."""

    def __init__(
        self, batch: Batch, dtype: DTypeLike, weights: Mapping[str, Array], caches: Mapping[int, LayerCache]
    ) -> None:
        self.batch = batch
        self.dtype = dtype
        self.results: dict[Value, Array] = {}
        self._weights = weights
        self._caches = caches

    def value(self, value: Value) -> Array:
        return self.results[value]

    def weight(self, parameter: Parameter) -> Array:
        return self._weights[parameter.name]

    def cache(self, layer: int) -> LayerCache:
        return self._caches[layer]


def _unsampled(num_outputs: int) -> StepOutput:
    """Nothing was sampled: token -1, no probabilities."""
    return StepOutput(
        token_ids=np.full(num_outputs, -1, np.int32),
        logprobs=np.full(num_outputs, np.nan, np.float32),
        ranks=np.zeros(num_outputs, np.int32),
        top_ids=np.zeros((num_outputs, 0), np.int32),
        top_logprobs=np.zeros((num_outputs, 0), np.float32),
    )
