"""Checks that a scheduler and its cache have lost no blocks, sequences or rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from octavo.engine.kv.block_pool import BlockPool
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler


def check_integrity(scheduler: Scheduler, in_flight: Iterable[Schedule] = ()) -> None:
    """Raise AssertionError if blocks, sequences or rows are lost, or held by a sequence that is not running.

    in_flight: steps whose results have not been taken yet. They hold slots for the states that they keep.
    """
    admission = scheduler.admission
    running = admission.running
    check_pool(scheduler.kv_cache.pool, (table.held for sequence in running for table in sequence.block_tables))
    if scheduler.kv_cache.states is not None:
        slots = ([sequence.state_slot, *sequence.draft_slots] for sequence in running if sequence.state_slot >= 0)
        items = (item for step in in_flight for item in step.scheduled.values())
        kept = ([item.snapshot.slot] for item in items if item.snapshot is not None)
        check_pool(scheduler.kv_cache.states.pool, [*slots, *kept])
    rows = [sequence.row for sequence in running]
    if sorted(rows + admission.free_rows) != list(range(admission.max_num_seqs)):
        raise AssertionError(f"rows {rows} run and {admission.free_rows} are free, of {admission.max_num_seqs}")
    queue = admission.queue
    if queue.num_seqs_taken != sum(group.num_seqs for group in queue.running):
        raise AssertionError(f"{queue.num_seqs_taken} sequences count as running, in {len(queue.running)} groups")
    if queue.num_texts_waiting != sum(group.is_text for group in queue.waiting):
        raise AssertionError(f"{queue.num_texts_waiting} texts wait in a queue of {len(queue.waiting)}")
    for groups, order in ((queue.running, attrgetter("key")), (queue.waiting, attrgetter("turn"))):
        if groups != sorted(groups, key=order) or len(set(groups)) < len(groups):
            raise AssertionError("groups are out of order")
    if set(queue.running) & set(queue.waiting):
        raise AssertionError("a running group waits")
    for sequence in running:
        # More blocks than that are there after a step that failed and is about to be repeated.
        entries = [len(table.block_ids) for table in sequence.block_tables]
        if min(entries, default=0) < scheduler.kv_cache.num_blocks_for(sequence.num_computed_tokens):
            raise AssertionError(f"{sequence.num_computed_tokens} tokens lie in {entries} blocks")


def check_pool(pool: BlockPool, block_tables: Iterable[list[int]]) -> None:
    """Raise AssertionError unless the counts match `block_tables` exactly and no block is lost."""
    references = Counter(block_id for table in block_tables for block_id in table)
    counts = [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
    for block_id, count in enumerate(counts):
        if references[block_id] != count:
            raise AssertionError(f"block {block_id} has {references[block_id]} owners but counts {count}")
    unused = {block_id for block_id, count in enumerate(counts) if count == 0}
    listed = Counter(pool._free) + Counter([*pool._evictable, *pool._pinned_evictable])
    if set(listed) != unused or max(listed.values(), default=1) > 1:
        raise AssertionError(f"unused blocks {sorted(unused)} are listed as {sorted(listed.elements())}")
    registered = {pool._hashes[block_id]: block_id for block_id in range(pool.num_blocks)}
    registered.pop(None, None)
    if registered != pool._block_of_hash:
        raise AssertionError("the hashes of blocks and the blocks of hashes differ")
    if any(pool._hashes[block_id] is not None for block_id in pool._free):
        raise AssertionError("a free block is registered")
