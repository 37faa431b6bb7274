"""Embeddings: prompts whose last hidden states are pooled to one vector, computed beside the generation.

They borrow blocks of the KV cache for as long as they take and give them back: nothing of them is kept for others.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.backends import Executor
from octavo.batch import Batch
from octavo.engine.block_pool import BlockPool
from octavo.engine.request import Request
from octavo.engine.step_budget import StepBudget
from octavo.errors import NumericalError
from octavo.generation_request import Pooling, PoolingParams
from octavo.outputs import PoolingOutput

if TYPE_CHECKING:
    from octavo.engine.engine import EngineLimits


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt through its life. Its blocks are all there from its first step on, so it always comes to its end."""

    request_id: str
    token_ids: list[int]
    pooling: Pooling
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    total: NDArray[np.float64] | None = None  # sum of the hidden states so far, or the last one


class PoolingQueue:
    """Prompts in their order of arrival; those that fit share a step.

    step_budget: bounds the time of steps, if given; it never changes a vector.
    """

    def __init__(
        self, executor: Executor, pool: BlockPool, limits: EngineLimits, step_budget: StepBudget | None = None
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._limits = limits
        self._step_budget = step_budget
        self._requests: deque[_Prompt] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Queues a request whose prompt has been checked, and is no longer than the cache."""
        assert isinstance(request.params, PoolingParams)
        self._requests.append(_Prompt(request.request_id, request.prompt_token_ids, request.params.pooling))

    def abort(self, request_id: str) -> bool:
        """Ends a request. False: it is not here."""
        request = next((item for item in self._requests if item.request_id == request_id), None)
        if request is not None:
            self._end(request)
        return request is not None

    def step(self, num_streams: int = 0, elapsed_s: float = 0.0) -> list[PoolingOutput | tuple[str, NumericalError]]:
        """One step over the first requests; the vectors of those that are complete. Empty if no blocks are free.

        num_streams: sequences that wait for its end; elapsed_s: for how long they have been waiting.
        """
        budget, context = self._step_budget, self._requests[0].num_computed_tokens
        most = self._limits.max_num_batched_tokens
        if budget is not None:
            most = min(most, budget.max_pooled_tokens(num_streams, context, elapsed_s))
        chunks = self._schedule(most)
        if not chunks:
            return []
        start = time.perf_counter()
        hidden_states = self._executor.submit(self._batch(chunks)).wait().hidden_states
        assert hidden_states is not None
        if budget is not None:
            budget.observe_pooled(sum(count for _, count in chunks), context, time.perf_counter() - start)
        embeddings: list[PoolingOutput | tuple[str, NumericalError]] = []
        row = 0
        for request, num_tokens in chunks:
            num_rows = self._num_rows(request, num_tokens)
            if num_rows:
                self._pool_rows(request, hidden_states[row : row + num_rows])
            row += num_rows
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens == len(request.token_ids):
                self._end(request)
                embeddings.append(self._embedding(request))
        return embeddings

    def block_tables(self) -> list[list[int]]:
        """Of all requests, for integrity checks."""
        return [request.block_table for request in self._requests]

    def _schedule(self, num_tokens: int) -> list[tuple[_Prompt, int]]:
        """Who computes how many tokens: first come, first served, within all limits of a step."""
        limits = self._limits
        chunks: list[tuple[_Prompt, int]] = []
        num_rows = limits.max_num_outputs
        for request in self._requests:
            if len(chunks) == limits.max_num_seqs or not self._has_blocks(request):
                break
            count = min(len(request.token_ids) - request.num_computed_tokens, num_tokens)
            if request.pooling == "mean":
                count = min(count, num_rows)
            elif num_rows == 0:
                break
            if count == 0:
                break
            chunks.append((request, count))
            num_tokens -= count
            num_rows -= self._num_rows(request, count)
        return chunks

    def _has_blocks(self, request: _Prompt) -> bool:
        """Takes the blocks of the whole prompt at once, or waits."""
        if not request.block_table:
            needed = -(-len(request.token_ids) // self._limits.block_size)
            if needed > self._pool.num_free_blocks:
                return False
            request.block_table = [self._pool.allocate() for _ in range(needed)]
        return True

    @staticmethod
    def _num_rows(request: _Prompt, num_tokens: int) -> int:
        """Hidden states that a chunk asks for."""
        if request.pooling == "mean":
            return num_tokens
        return int(request.num_computed_tokens + num_tokens == len(request.token_ids))

    def _batch(self, chunks: list[tuple[_Prompt, int]]) -> Batch:
        size = self._limits.block_size
        widest = max(len(request.block_table) for request, _ in chunks)
        tables = np.zeros((len(chunks), widest), np.int32)
        token_ids: list[int] = []
        positions: list[NDArray[np.int32]] = []
        slots: list[NDArray[np.int32]] = []
        rows: list[int] = []
        for i, (request, count) in enumerate(chunks):
            table = tables[i]
            table[: len(request.block_table)] = request.block_table
            first = request.num_computed_tokens
            at = np.arange(first, first + count, dtype=np.int32)
            token_ids += request.token_ids[first : first + count]
            positions.append(at)
            slots.append(table[at // size] * size + at % size)
            rows += range(len(token_ids) - self._num_rows(request, count), len(token_ids))
        counts = [count for _, count in chunks]
        return Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.concatenate(positions),
            query_start_loc=np.cumsum([0, *counts], dtype=np.int32),
            seq_lens=np.array([request.num_computed_tokens + count for request, count in chunks], np.int32),
            block_tables=tables,
            slot_mapping=np.concatenate(slots).astype(np.int32, copy=False),
            logits_indices=np.array(rows, np.int32),
            return_hidden_states=True,
        )

    @staticmethod
    def _pool_rows(request: _Prompt, rows: NDArray[np.floating]) -> None:
        added = rows.sum(axis=0, dtype=np.float64)
        request.total = added if request.total is None else request.total + added

    def _end(self, request: _Prompt) -> None:
        self._requests.remove(request)
        for block_id in request.block_table:
            self._pool.free(block_id)
        request.block_table = []

    @staticmethod
    def _embedding(request: _Prompt) -> PoolingOutput | tuple[str, NumericalError]:
        assert request.total is not None
        num_rows = len(request.token_ids) if request.pooling == "mean" else 1
        vector = (request.total / num_rows).astype(np.float32)
        if not np.isfinite(vector).all():
            name = request.request_id
            return name, NumericalError(f"{name} failed: its hidden states are not finite")
        return PoolingOutput(request.request_id, vector, len(request.token_ids))
