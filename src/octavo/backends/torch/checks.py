"""Checks of every number in a batch on the host, because a wrong one would destroy a GPU's whole context."""

from __future__ import annotations

import numpy as np

from octavo.backends import ExecutorLimits, check_token_types
from octavo.backends.torch.cache import PagedCache
from octavo.backends.torch.step_arrays import seen_blocks
from octavo.backends.torch.token_board import NUM_GUESSES
from octavo.batch import Batch
from octavo.graph.builder import Graph
from octavo.graph.domains import check_domains, check_range, check_sequences, domain_needs
from octavo.graph.ops.linear import Embedding
from octavo.graph.ops.recurrence import check_states
from octavo.graph.segments import check_inputs
from octavo.graph.values import TOKENS


class BatchChecks:
    """Checks the batches of one graph. What depends only on the graph is computed once, not in every step."""

    def __init__(self, graph: Graph, limits: ExecutorLimits) -> None:
        self._graph, self._limits = graph, limits
        self._needs, self._rows = domain_needs(graph), limits.rows
        self._inputs, self._makes_logits = graph.inputs, graph.makes_logits
        self._has_states, self._has_keys = bool(graph.state_caches), bool(graph.kv_caches)
        groups = enumerate(graph.cache_layout.groups)
        self._num_groups = len(graph.cache_layout.groups)
        # `check_domains` checks the lengths of other domains.
        self._groups = [(number, group) for number, group in groups if group.domain is TOKENS]
        tables = (n.op.num_rows for n in graph.nodes if isinstance(n.op, Embedding) and n.op.has_all)
        self._vocab = min(tables, default=0)
        self.last_token = self._vocab - 1 if self._vocab else None  # largest id in the embedding; None if it takes any
        self.num_source_rows = limits.max_num_outputs  # in the step that tokens come from

    def check(self, batch: Batch, cache: PagedCache) -> None:
        """Raise UsageError or ValueError naming the first invalid number of the batch."""
        limits = self._limits
        if batch.hidden_at is None:
            check_inputs(self._inputs, self._makes_logits, batch)
        if self._has_states:
            check_states(batch, cache.num_states)
        check_token_types(self._graph, batch)
        check_domains(self._needs, self._rows, batch, (cache.num_blocks, cache.block_size))
        check_sequences(batch, limits.max_num_seqs, limits.max_model_len)
        if self._vocab:
            check_range("token_ids", batch.token_ids, self._vocab)
        if batch.token_sources is not None:
            check_range("token_sources", batch.token_sources, self.num_source_rows, first=-1 - NUM_GUESSES)
        check_range("positions", batch.positions, limits.max_model_len)
        check_range("block_copies", batch.block_copies, cache.num_blocks)
        cache.moved_sizes.check(batch)
        if self._has_keys:
            self._check_blocks(batch, cache)

    def _check_blocks(self, batch: Batch, cache: PagedCache) -> None:
        size, groups = cache.block_size, self._num_groups
        tokens, requests = len(batch.token_ids), len(batch.seq_lens)
        slots, tables = batch.slot_mapping.shape, batch.block_tables.shape
        if min(slots[0], tables[0]) < groups or (slots[1], tables[1]) != (tokens, requests):
            raise ValueError(
                f"slot_mapping and block_tables are not of {groups} groups, {tokens} tokens, {requests} requests"
            )
        written = batch.slot_mapping
        if len(self._groups) < groups:
            written = written[[number for number, _ in self._groups]]
        check_range("slot_mapping", written, cache.num_blocks * size)
        ends = batch.seq_lens
        if tokens != requests or (batch.query_start_loc != np.arange(requests + 1)).any():
            ends = np.repeat(ends, np.diff(batch.query_start_loc))
        if (batch.positions >= ends).any():
            raise ValueError("a position is not before the end of its sequence (seq_lens)")
        if requests and -(-int(batch.seq_lens.max()) // size) > tables[2]:
            raise ValueError(f"{tables[2]} blocks are too few for a sequence of {batch.seq_lens.max()} tokens")
        for number, group in self._groups:
            seen = seen_blocks(batch, group, number, slice(None), size, whole=True)
            check_range("block_tables", seen.tables, cache.num_blocks)
