"""Admission and preemption: which groups of sequences wait and which run.

A running group counts towards max_num_seqs, and holds cache blocks and rows of the batch builder's table. Groups are
served by priority, then answers before texts (to embed or score), then by arrival. When blocks run out, the last group
in this order is preempted: its blocks are freed, and its tokens are computed again later.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from octavo.engine.kv.block_tier import BlockLoad
from octavo.engine.kv.kv_cache import KVCacheManager
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import Request, RequestStatus, Sequence, SequenceGroup

if TYPE_CHECKING:
    from octavo.adapters.registry import AdapterRegistry
    from octavo.engine.schedule import Schedule

_by_key, _by_turn = attrgetter("key"), attrgetter("turn")

ANSWERS_A_TEXT = 8  # answers admitted per text while both wait


class ServiceQueue:
    """Running groups in service order, waiting groups in admission order, and the number of running sequences.

    Answers are admitted before texts (to embed or score), because thousands of texts may arrive at once while a user
    waits for a first token. If there are always answers waiting, one text is admitted after every ANSWERS_A_TEXT
    answers.
    """

    def __init__(self) -> None:
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.num_seqs_taken = 0
        self.num_texts_waiting = 0
        # Virtual times, as in start-time fair queueing (Goyal et al., 1996): of the last admitted group,
        # and of the latest answer and the latest text.
        self._now = 0
        self._last = {False: 0, True: 0}

    def take_turn(self, groups: list[SequenceGroup]) -> None:
        """Give the groups of a new request their place in the admission order."""
        is_text = groups[0].is_text
        time = max(self._now, self._last[is_text]) + (ANSWERS_A_TEXT if is_text else 1)
        self._last[is_text] = time
        for group in groups:
            group.turn = group.turn_at(time)

    @property
    def sequences(self) -> list[Sequence]:
        """The running sequences, in order of service."""
        return [member for group in self.running for member in group.members]

    def wait(self, group: SequenceGroup) -> None:
        insort(self.waiting, group, key=_by_turn)
        self.num_texts_waiting += group.is_text

    def enter(self, group: SequenceGroup) -> None:
        """Mark a group as running."""
        self._stop_waiting(group)
        self._now = max(self._now, group.turn[1])
        insort(self.running, group, key=_by_key)
        self.num_seqs_taken += group.num_seqs
        for member in group.members:
            member.status = RequestStatus.RUNNING

    def leave(self, group: SequenceGroup, status: RequestStatus) -> None:
        """Remove a running or waiting group from the queue, and set the status of its members."""
        if group.status is RequestStatus.RUNNING:
            _discard(self.running, group, _by_key)
            self.num_seqs_taken -= group.num_seqs
        self._stop_waiting(group)
        for member in group.members:
            member.status = status

    def _stop_waiting(self, group: SequenceGroup) -> None:
        self.num_texts_waiting -= group.is_text * _discard(self.waiting, group, _by_turn)


class Stages:
    """The steps in flight of a pipeline. Each step gets a share of the groups, and a group is in at most one step.

    busy: groups that are in a step. It stays empty without a pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.busy: set[SequenceGroup] = set()

    def begin(self, step: Schedule) -> None:
        """Record that a step is in flight."""
        if self._num_stages > 1:
            self.busy |= step.groups

    def end(self, step: Schedule) -> None:
        """Record that a step has ended."""
        if self._num_stages > 1:
            self.busy -= step.groups

    def share(self, num_groups: int) -> int:
        """Return the most groups that one step may take, so that every stage gets some.

        Without a pipeline there is no limit.
        """
        return -(-num_groups // self._num_stages) if self._num_stages > 1 else sys.maxsize

    def last_idle(self, queue: ServiceQueue) -> SequenceGroup | None:
        """Return the last running group in service order that is not part of a step in flight."""
        return next((group for group in reversed(queue.running) if group not in self.busy), None)


def _discard(groups: list[SequenceGroup], group: SequenceGroup, order: Callable[[SequenceGroup], Any]) -> bool:
    """Remove a group from a list in service order. Return False if it is not in the list."""
    position = bisect_left(groups, order(group), key=order)
    is_there = position < len(groups) and groups[position] is group
    if is_there:
        del groups[position]
    return is_there


class GroupAdmission:
    """A queue of waiting and running groups over one KV cache, with at most max_num_seqs running sequences.

    num_stages: number of steps in flight at once.
    """

    def __init__(
        self, kv_cache: KVCacheManager, max_num_seqs: int, metrics: EngineMetrics, num_stages: int = 1
    ) -> None:
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.queue = ServiceQueue()
        self.stages = Stages(num_stages)
        self.arriving: dict[SequenceGroup, BlockLoad] = {}  # groups whose blocks are being loaded, not in the queue
        self._swapped: set[SequenceGroup] = set()  # preempted groups, whose blocks a store may have
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))  # in the batch builder's table (`Sequence.row`)
        self.adapters: AdapterRegistry | None = None
        self._metrics = metrics

    @property
    def num_seqs_left(self) -> int:
        return self.max_num_seqs - self.queue.num_seqs_taken

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, in service order."""
        return self.queue.sequences

    @property
    def would_preempt(self) -> bool:
        """True if a waiting group has a better priority than a running one."""
        waiting, running = self.queue.waiting, self.queue.running
        return bool(waiting and running) and _priority(waiting[0]) < _priority(running[-1])

    @property
    def may_admit(self) -> bool:
        """False if no waiting group can run before a running one ends or is preempted."""
        self.take_arrived()
        waiting = self.queue.waiting
        return bool(waiting) and (waiting[0].num_seqs <= self.num_seqs_left or self.would_preempt)

    # --- requests come and go ---

    def add(self, request: Request) -> None:
        """Queue a request that fits (see `RequestFactory`)."""
        first, *others = request.groups
        request.pending_groups = others
        self.queue.take_turn(request.groups)
        if not self._load(first):
            self.queue.wait(first)

    def _load(self, group: SequenceGroup) -> bool:
        """Load more of a group's prefix from a store, if the store has more of it than the cache."""
        tier, max_tokens = self.kv_cache.tier, group.max_cached_tokens()
        if tier is None:
            return False
        prefix = self.kv_cache.stored_prefix(group.members[0], max_tokens)
        self._metrics.num_store_queries_total += max(max_tokens - prefix.start, 0)
        load = tier.load(prefix)
        if load is None:
            return False
        self.arriving[group] = load
        for member in group.members:
            member.status = RequestStatus.ARRIVING
        return True

    def take_arrived(self, timeout_s: float = 0.0) -> None:
        """Return groups to the queue once their blocks have arrived from the store, or will not arrive any more.

        timeout_s: how long to wait for one of them.
        """
        for group, load in list(self.arriving.items()) if self.arriving else ():
            found, timeout_s = load.wait(timeout_s), 0.0
            if found is not None:
                del self.arriving[group]
                group.members[0].arrived = found
                was_preempted = group.request.num_preemptions > 0
                for member in group.members:
                    member.status = RequestStatus.PREEMPTED if was_preempted else RequestStatus.WAITING
                self.queue.wait(group)

    def finish(self, group: SequenceGroup) -> None:
        """End a group in any state and free its blocks.

        A step in flight may still write to them. This does no harm, because later steps run after it.
        """
        self._leave(group, RequestStatus.FINISHED)

    def finish_request(self, request: Request) -> None:
        """End all sequences of a request."""
        for group in request.groups:
            self.finish(group)
        request.pending_groups = []

    def replace_members(self, group: SequenceGroup, members: list[tuple[Sequence, Sequence]]) -> None:
        """Replace the members of a running group.

        members: (parent, child) pairs; a child shares its parent's blocks.
        """
        for parent, child in members:
            self.kv_cache.fork(parent, child, parent.num_computed_tokens)
        self._leave(group, RequestStatus.FINISHED)
        group.adopt([child for _, child in members])
        self.enter(group)

    # --- room ---

    def admit(self, group: SequenceGroup, step: Schedule) -> bool:
        """Admit a waiting group if sequences, adapter slots and blocks allow it.

        Blocks that running groups still need for their known tokens stay reserved. A request with a better priority
        preempts groups with a worse one.
        """
        request, first, queue = group.request, group.members[0], self.queue
        if group in self._swapped and self._swap_in(group):
            return False
        worse = [
            other
            for other in queue.running
            if _priority(other) > _priority(group) and not step.is_ahead and other not in self.stages.busy
        ]
        adapter = request.adapter
        if adapter is not None and self.adapters is not None and not self.adapters.may_run(adapter):
            return False
        if group.num_seqs - self.num_seqs_left > sum(other.num_seqs for other in worse):
            return False
        num_cached_tokens = self.kv_cache.match_prefix(first, group.max_cached_tokens())
        needed = self._num_blocks_missing(group)
        to_gain = sum(member.num_held_blocks for other in worse for member in other.members)
        if needed > self._num_blocks_to_spare() + to_gain:
            self.kv_cache.free(first)
            return False
        while True:
            if group.num_seqs <= self.num_seqs_left and needed <= self._num_blocks_to_spare():
                break
            victim = self.stages.last_idle(queue)
            if victim is None or _priority(victim) <= _priority(group):
                self.kv_cache.free(first)
                return False
            self.preempt(victim, step)
        num_loaded_tokens = self._count_prefix(first, num_cached_tokens)
        if self.kv_cache.enable_prefix_caching:
            self.kv_cache.pin_prompt(first)
        if group.status is RequestStatus.WAITING and first.index == 0:
            request.num_cached_tokens, request.num_loaded_tokens = num_cached_tokens, num_loaded_tokens
        self.enter(group)
        return True

    def _count_prefix(self, sequence: Sequence, num_cached_tokens: int) -> int:
        """Count the cached prefix of an admitted sequence. Return how many of its tokens come from a store."""
        if not self.kv_cache.enable_prefix_caching:
            return 0
        size = self.kv_cache.block_size
        num_tokens = size * min((each.position for each in sequence.loads), default=num_cached_tokens // size)
        self._metrics.num_prefix_queries_total += len(sequence.token_ids)
        self._metrics.num_prefix_hits_total += num_tokens  # tokens from a store do not count
        self._metrics.num_store_hits_total += num_cached_tokens - num_tokens
        self.kv_cache.touch_prefix(sequence)
        return num_cached_tokens - num_tokens

    def _swap_in(self, group: SequenceGroup) -> bool:
        """Start to load the blocks that a preempted group lost, if loading them is faster than computing them.

        If so, remove the group from the queue and return True.
        """
        self._swapped.discard(group)
        if not self._load(group):
            return False
        self.queue.leave(group, RequestStatus.ARRIVING)
        return True

    def preempt(self, group: SequenceGroup, step: Schedule) -> None:
        """Free a running group's blocks, remove it from the step, and queue it again."""
        for member in group.members:
            member.draft_token_ids, member.hidden_rows = [], None
            step.remove(member)
        self._leave(group, RequestStatus.PREEMPTED)
        self.queue.wait(group)
        if self.kv_cache.tier is not None and len(group.members) == 1:
            self._swapped.add(group)
        self._metrics.num_preemptions_total += 1
        group.request.num_preemptions += 1

    def _num_blocks_missing(self, group: SequenceGroup) -> int:
        """Return how many blocks the group's known tokens still need.

        Members that have not started share the prompt's full blocks.
        """
        shared = group.request.num_prompt_tokens
        return sum(self.kv_cache.num_blocks_missing(each, shared if i else 0) for i, each in enumerate(group.members))

    def _num_blocks_to_spare(self) -> int:
        promised = sum(self._num_blocks_missing(group) for group in self.queue.running)
        return self.kv_cache.pool.num_free_blocks - promised

    # --- running ---

    def enter(self, group: SequenceGroup) -> None:
        """Start a group: give each sequence a row of the batch builder's table."""
        self.queue.enter(group)
        if self.adapters is not None and group.request.adapter is not None:
            self.adapters.enter(group.request.adapter)
        for sequence in group.members:
            sequence.row = self.free_rows.pop()
        request = group.request
        if request.slot < 0 and request.params.is_answered:
            request.slot = request.options.id_slot if request.options.id_slot >= 0 else group.members[0].row

    def _leave(self, group: SequenceGroup, status: RequestStatus) -> None:
        if group.status is RequestStatus.RUNNING:
            if self.adapters is not None and group.request.adapter is not None:
                self.adapters.leave(group.request.adapter)
            for sequence in group.members:
                self.kv_cache.free(sequence)
                self.free_rows.append(sequence.row)
                sequence.row = -1
        self.arriving.pop(group, None)
        self._swapped.discard(group)
        self.queue.leave(group, status)

    def observe_slots(self) -> None:
        """Count the allocated and wasted cache slots, without blocks allocated ahead for the next step."""
        size, num_ahead, num_wasted = self.kv_cache.block_size, 0, 0
        for sequence in self.running:
            num_blocks = -(-sequence.num_computed_tokens // size)
            for index in self.kv_cache.token_groups if sequence.block_tables else ():
                num_ahead += len(sequence.block_tables[index].block_ids) - num_blocks
                num_wasted += num_blocks * size - sequence.num_computed_tokens
        self._metrics.num_allocated_slots_total += (self.kv_cache.pool.num_used_blocks - num_ahead) * size
        self._metrics.num_wasted_slots_total += num_wasted

    def observe_state(self) -> None:
        """Record the current state, including requests that ended between steps."""
        metrics, pool = self._metrics, self.kv_cache.pool
        metrics.num_embedding = sum(group.is_text for group in self.queue.running)
        metrics.num_running = len(self.running) - metrics.num_embedding
        metrics.num_embedding_waiting = self.queue.num_texts_waiting
        metrics.num_waiting = len(self.queue.waiting) + len(self.arriving) - metrics.num_embedding_waiting
        metrics.num_evictions_total = pool.num_evictions
        metrics.num_used_blocks = pool.num_used_blocks
        if (tier := self.kv_cache.tier) is not None:
            metrics.num_store_bytes_written_total = tier.num_bytes_written
            metrics.num_store_bytes_read_total = tier.num_bytes_read
            metrics.num_store_records_dropped_total = tier.num_dropped


def _priority(group: SequenceGroup) -> int:
    return group.request.options.priority
