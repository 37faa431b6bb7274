"""Every number of a batch, checked on the host: a wrong one would end a GPU's whole context."""

from __future__ import annotations

import numpy as np

from octavo.backends import ExecutorLimits, check_token_types
from octavo.backends.torch.cache import PagedCache
from octavo.backends.torch.step_arrays import seen_blocks
from octavo.batch import Batch
from octavo.errors import UsageError
from octavo.graph.builder import Graph
from octavo.graph.ops import Embedding
from octavo.graph.ops.state import check_states
from octavo.graph.segments import check_inputs


def check_batch(graph: Graph, limits: ExecutorLimits, batch: Batch, cache: PagedCache) -> None:
    """Raises UsageError or ValueError naming the first number of the batch that cannot be."""
    check_inputs(graph.inputs, graph.makes_logits, batch)
    if graph.state_caches:
        check_states(batch, cache.num_states)
    check_token_types(graph, batch)
    tokens, requests = len(batch.token_ids), len(batch.seq_lens)
    for what, count, limit in (
        ("tokens", tokens, limits.max_num_batched_tokens),
        ("requests", requests, limits.max_num_seqs),
        ("outputs", len(batch.logits_indices), limits.max_num_outputs),
    ):
        if count > limit:
            raise UsageError(f"a step with {count} {what} exceeds the executor's limit of {limit}")
    starts = batch.query_start_loc
    if len(starts) != requests + 1 or starts[0] != 0 or starts[-1] != tokens or (np.diff(starts) < 0).any():
        raise ValueError(f"query_start_loc {starts.tolist()} does not divide {tokens} tokens among {requests} requests")
    vocab = min((n.op.num_rows for n in graph.nodes if isinstance(n.op, Embedding) and n.op.has_all), default=0)
    if vocab:
        _in_range("token_ids", batch.token_ids, vocab)
    if batch.token_sources is not None:
        _in_range("token_sources", batch.token_sources + 1, limits.max_num_outputs + 1)
    _in_range("positions", batch.positions, limits.max_model_len)
    _in_range("seq_lens", batch.seq_lens, limits.max_model_len + 1)
    _in_range("logits_indices", batch.logits_indices, tokens)
    _in_range("block_copies", batch.block_copies, cache.num_blocks)
    _check_blocks(graph, batch, cache)


def _check_blocks(graph: Graph, batch: Batch, cache: PagedCache) -> None:
    size, groups = cache.block_size, len(graph.cache_layout.groups)
    tokens, requests = len(batch.token_ids), len(batch.seq_lens)
    if not graph.kv_caches:
        return
    shapes = batch.slot_mapping.shape, batch.block_tables.shape[:2]
    if min(shape[0] for shape in shapes) < groups or [shape[1] for shape in shapes] != [tokens, requests]:
        raise ValueError(
            f"slot_mapping and block_tables are not of {groups} groups, {tokens} tokens, {requests} requests"
        )
    _in_range("slot_mapping", batch.slot_mapping, cache.num_blocks * size)
    ends = np.repeat(batch.seq_lens, np.diff(batch.query_start_loc))
    if (batch.positions >= ends).any():
        raise ValueError("a position is not before the end of its sequence, seq_lens")
    if requests and -(-int(batch.seq_lens.max()) // size) > batch.block_tables.shape[2]:
        raise ValueError(
            f"{batch.block_tables.shape[2]} blocks do not hold a sequence of {batch.seq_lens.max()} tokens"
        )
    for number, group in enumerate(graph.cache_layout.groups):
        _in_range("block_tables", seen_blocks(batch, group, number, np.arange(requests), size).tables, cache.num_blocks)


def _in_range(name: str, numbers: np.ndarray, end: int) -> None:
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
        raise ValueError(f"{name} are {numbers.min()} to {numbers.max()}; they must be in 0 to {end - 1}")
