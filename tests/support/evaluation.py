"""Runs one operation on given arrays in the reference backend, creating parameters and values from the arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from octavo.batch import Batch
from octavo.graph.cache import KVCache
from octavo.graph.ops.base import Evaluation, LayerCache, Op
from octavo.graph.values import Parameter, Value
from tests.support.batches import BLOCK_SIZE, Request, blocks_for, step


def evaluate(
    op: Op, values: Mapping[Value, np.ndarray], weights: Mapping[Parameter, np.ndarray], batch: Batch | None = None
) -> np.ndarray:
    """Return the output of `op`, checked against its shape rule. Without a batch, all rows belong to one request."""
    count = len(next(iter(values.values()))) if values else 1
    batch = batch if batch is not None else whole_prompt(count)
    caches = {}
    if isinstance(op.cache, KVCache):
        caches[op.cache.layer] = LayerCache.empty(op.cache, 64, BLOCK_SIZE, np.float64)
    out = op.evaluate(Evaluation(batch, np.float64, weights, caches, {}, dict(values)))
    assert out.shape[1] == op.infer_shape()[1]
    return out


def whole_prompt(num_tokens: int) -> Batch:
    """Return a batch of one request with `num_tokens` tokens, blocks in random order, and all rows requested."""
    blocks = np.random.default_rng(num_tokens).permutation(64)[: blocks_for(num_tokens)].tolist()
    return step([(Request(list(range(num_tokens)), blocks), num_tokens)])
