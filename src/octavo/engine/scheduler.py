"""Who computes how many tokens in the next step.

There is no prefill or decode mode: a sequence has token_ids, the first num_computed_tokens of them are in
the cache, and a step gives it some of the rest. Sequences that need one token go first, the remaining token
budget is filled with chunks of longer ones. Only for a short prompt do they wait a step, within bounds.
When blocks run out, the last in the order of service (priority, then arrival) is preempted: its blocks are
freed and its tokens computed again later.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.request import Request, RequestStatus, Sequence
from octavo.engine.step_budget import StepBudget
from octavo.errors import UsageError


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step.

    samplers: the sequences whose next token comes from its last token's logits: itself, and with it the
    choices that start from the same prompt. Empty while a prompt is not yet complete.
    """

    sequence: Sequence
    num_tokens: int
    samplers: list[Sequence]
    logprob_start: int = 0  # the first token whose logits give the log-probability of the prompt token after it
    num_logprob_rows: int = 0
    copy: tuple[int, int] | None = None  # cache block to copy before the step: source, destination


@dataclass(slots=True)
class Schedule:
    """One step: who, and what is left of its budgets."""

    num_tokens_left: int
    num_rows_left: int
    num_tokens_held_back: int = 0  # taken out of what is left, so that the step does not become too long
    num_decodes: int = 0  # sequences whose one token came before all chunks; they are the first that are scheduled
    skips_decodes: bool = False  # a prompt is computed alone, while others could have had their next token
    chunk_start: int = 0  # where the first chunk begins in its sequence
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict)

    @property
    def has_chunks(self) -> bool:
        return len(self.scheduled) > self.num_decodes

    def add(self, item: ScheduledSequence) -> None:
        self.num_tokens_left -= item.num_tokens
        self.num_rows_left -= item.num_logprob_rows + len(item.samplers)
        self.scheduled[item.sequence] = item

    def remove(self, sequence: Sequence) -> None:
        if sequence not in self.scheduled:
            return
        if sequence in islice(self.scheduled, self.num_decodes):
            self.num_decodes -= 1
        item = self.scheduled.pop(sequence)
        self.num_tokens_left += item.num_tokens
        self.num_rows_left += item.num_logprob_rows + len(item.samplers)


class Scheduler:
    """Queues of waiting and running sequences over one KV cache.

    The beams of one beam search run in lockstep: they are admitted, sampled and preempted together.
    max_num_outputs: rows of logits that a step can compute; at least max_num_seqs. step_budget: bounds the time of
    steps, if given; it never changes an answer.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_outputs: int,
        step_budget: StepBudget | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_outputs = max_num_outputs
        self.step_budget = step_budget
        self.running: list[Sequence] = []  # in order of service
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # heap; those not in _queued are skipped
        self._queued: set[Sequence] = set()
        self._num_seats_taken = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens; of those, found in the cache
        self.num_prefix_hits = 0

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, of a waiting or preempted beam search one."""
        return len(self._queued)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self._next_waiting() is not None

    # --- requests come and go ---

    def add(self, request: Request) -> None:
        """Queues a request that `check_fits` has let through."""
        first, *others = request.sequences
        request.pending_choices = others
        self._wait(first)

    def check_fits(self, request: Request) -> None:
        """Raises UsageError with the arithmetic if the request could not run even alone."""
        seats = request.num_seats
        if seats > self.max_num_seqs:
            raise UsageError(
                f"beam_width is {seats}, but only {self.max_num_seqs} sequences run at once; "
                f"lower it or raise max_num_seqs",
                param="beam_width",
                code="integer_above_max_value",
            )
        # The last token of a sequence is never computed, and beams share the full blocks of their prompt.
        total = self.kv_cache.num_blocks_for(request.max_total_tokens - 1)
        shared = request.num_prompt_tokens // self.kv_cache.block_size if seats > 1 else 0
        needed, size = shared + seats * (total - shared), self.kv_cache.block_size
        if needed > self.kv_cache.pool.num_blocks:
            raise UsageError(
                f"a request of {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} new ones in {seats} sequence(s) needs "
                f"{needed} cache blocks of {size} tokens; the cache has {self.kv_cache.pool.num_blocks}. "
                f"Lower max_tokens{' or beam_width' if seats > 1 else ''}, or give the cache more memory",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def finish(self, sequence: Sequence) -> None:
        """Ends one sequence, wherever it is, and gives its blocks back. For a beam search there is finish_request."""
        if sequence.status is RequestStatus.RUNNING:
            self._leave([sequence], RequestStatus.FINISHED)
        self._queued.discard(sequence)
        sequence.status = RequestStatus.FINISHED

    def finish_request(self, request: Request) -> None:
        """Ends all sequences of a request."""
        if request.beam_search is not None and request.sequences[0].status is RequestStatus.RUNNING:
            self._leave(request.sequences, RequestStatus.FINISHED)
        for sequence in request.sequences:
            self.finish(sequence)
        request.pending_choices = []

    def replace_beams(self, request: Request, beams: list[tuple[Sequence, Sequence]]) -> None:
        """The next beams of a running search, as (parent, child): children share their parents' blocks."""
        for parent, child in beams:
            self.kv_cache.fork(parent, child, parent.num_computed_tokens)
        self._leave(request.sequences, RequestStatus.FINISHED)
        request.sequences = [child for _, child in beams]
        self._enter(request.sequences)

    # --- a step ---

    def schedule(self) -> Schedule:
        """The next step. Empty only if nothing is left to do."""
        step = Schedule(self.max_num_batched_tokens, self.max_num_outputs)
        step.skips_decodes = self._schedule_alone(step)
        if not step.skips_decodes:
            behind = self._schedule_decodes(step)
            step.num_decodes = len(step.scheduled)
            if self.step_budget is None or self.step_budget.lets_in(step.num_decodes):
                self._schedule_chunks(behind, step)
        step.num_tokens_left += step.num_tokens_held_back
        self._invite_choices(step)
        return step

    def _schedule_alone(self, step: Schedule) -> bool:
        """Gives a short prompt a step of its own, if those who run may wait for it."""
        first, budget = self._next_waiting(), self.step_budget
        if first is None or budget is None or not self.running:
            return False
        # A prompt that is under way is not overtaken.
        if any(len(other.token_ids) - other.num_computed_tokens > 1 for other in self.running):
            return False
        num_missing = len(first.token_ids) - self.kv_cache.num_cached_tokens(first, _max_cached_tokens(first))
        if not budget.lets_skip(len(self.running), num_missing):
            return False
        if not self._admit(first, step):
            return False
        self._schedule_chunk(first, step)
        return step.has_chunks

    def _hold_back(self, first: Sequence, step: Schedule) -> None:
        """Takes tokens out of the step that would make it too long for those who wait for its end.

        first: who gets its first chunk; it runs, so that what the cache has of it is known.
        """
        if self.step_budget is None:
            return
        left = step.num_tokens_left + step.num_tokens_held_back
        missing = len(first.token_ids) - first.num_computed_tokens
        to_compute = len(first.token_ids) - (0 if first.index else first.request.num_cached_tokens)
        allowed = self.step_budget.max_prefill_tokens(
            step.num_decodes, first.num_computed_tokens, missing, max(to_compute, missing)
        )
        step.num_tokens_left = min(left, allowed)
        step.num_tokens_held_back = left - step.num_tokens_left

    def mark_computed(self, step: Schedule) -> None:
        """After the step: its tokens are in the cache, and choices share the prompt of their first."""
        for item in step.scheduled.values():
            sequence = item.sequence
            before = sequence.num_computed_tokens
            sequence.num_computed_tokens = before + item.num_tokens
            self.kv_cache.register_full_blocks(sequence, before)
            for choice in item.samplers[1:]:
                self.kv_cache.fork(sequence, choice, sequence.num_computed_tokens)

    def _schedule_decodes(self, step: Schedule) -> deque[Sequence]:
        """Gives one token to every sequence that needs just one; returns those that need more."""
        behind: deque[Sequence] = deque()
        position = 0
        while position < len(self.running):  # preemption shortens the list from its end
            sequence = self.running[position]
            behind_by = len(sequence.token_ids) - sequence.num_computed_tokens
            if behind_by == 1 and sequence.request.beam_search is None and self.kv_cache.has_room(sequence):
                step.add(ScheduledSequence(sequence, 1, [sequence]))
                position += 1
                continue
            group = self._lockstep(sequence)
            position += len(group)
            if any(len(member.token_ids) - member.num_computed_tokens > 1 for member in group):
                behind.append(group[0])
                continue
            counts = [1] * len(group)
            if self._make_room(group, counts, step):
                self._append(group, counts, step, samples=True)
        return behind

    def _schedule_chunks(self, behind: deque[Sequence], step: Schedule) -> None:
        """Fills the budget with running sequences that are behind and waiting ones, in order of service."""
        is_blocked = False
        while step.num_tokens_left > 0:
            waiting = None if is_blocked else self._next_waiting()
            if behind and (waiting is None or behind[0].key < waiting.key):
                sequence = behind.popleft()
                if sequence.status is RequestStatus.RUNNING and sequence not in step.scheduled:
                    self._schedule_chunk(sequence, step)
            elif waiting is None:
                break
            elif self._admit(waiting, step):
                self._schedule_chunk(waiting, step)
            else:
                is_blocked = True

    def _schedule_chunk(self, sequence: Sequence, step: Schedule) -> None:
        if not step.has_chunks:
            self._hold_back(sequence, step)
        group = self._lockstep(sequence)
        if len(group) > 1:
            self._schedule_beams(group, step)
            return
        computed, request = sequence.num_computed_tokens, sequence.request
        remaining = len(sequence.token_ids) - computed
        count = min(remaining, step.num_tokens_left)
        samples = count == remaining
        start, num_logprobs = 0, 0
        if request.needs_prompt_logprobs:
            start = max(computed, len(request.prompt_logprobs))
            num_logprobs = max(min(computed + count, request.num_prompt_tokens - 1) - start, 0)
        excess = num_logprobs + samples - step.num_rows_left
        if excess > 0:
            count, samples, num_logprobs = count - excess, False, min(num_logprobs, step.num_rows_left)
        if count > 0 and self._make_room(group, [count], step):
            if not step.has_chunks:
                step.chunk_start = computed
            self._append(group, [count], step, samples)
            item = step.scheduled[sequence]
            item.logprob_start, item.num_logprob_rows = start, num_logprobs
            step.num_rows_left -= num_logprobs

    def _schedule_beams(self, beams: list[Sequence], step: Schedule) -> None:
        """Brings preempted beams back: the first computes the prompt, the others fork there, all catch up."""
        first, num_prompt_tokens = beams[0], beams[0].request.num_prompt_tokens
        unstarted = [beam for beam in beams[1:] if not beam.block_table]
        if unstarted and first.num_computed_tokens < num_prompt_tokens:
            count = min(num_prompt_tokens - first.num_computed_tokens, step.num_tokens_left)
            if self._make_room([first], [count], step):
                self._append([first], [count], step, samples=False)
            return
        for beam in unstarted:
            self.kv_cache.fork(first, beam, num_prompt_tokens)
        counts = [len(beam.token_ids) - beam.num_computed_tokens for beam in beams]
        samples = sum(counts) <= step.num_tokens_left and len(beams) <= step.num_rows_left
        if not samples:
            left = step.num_tokens_left
            for i, count in enumerate(counts):
                counts[i] = min(count - 1, left)
                left -= counts[i]
        if self._make_room(beams, counts, step):
            self._append(beams, counts, step, samples)

    def _append(self, group: list[Sequence], counts: list[int], step: Schedule, samples: bool) -> None:
        for member, count in zip(group, counts, strict=True):
            if count:
                samplers = [member] if samples else []
                step.add(ScheduledSequence(member, count, samplers, copy=self.kv_cache.append(member, count)))

    def _invite_choices(self, step: Schedule) -> None:
        """Where a prompt becomes complete, its other choices sample from the same logits; the rest wait."""
        for item in step.scheduled.values():
            request = item.sequence.request
            if not request.pending_choices or not item.samplers:
                continue
            count = min(step.num_rows_left, self.max_num_seqs - self._num_seats_taken)
            for choice in request.pending_choices[:count]:
                self._enter([choice])
                item.samplers.append(choice)
            step.num_rows_left -= len(item.samplers) - 1
            for choice in request.pending_choices[count:]:
                self._wait(choice)
            request.pending_choices = []

    # --- room ---

    def _admit(self, sequence: Sequence, step: Schedule) -> bool:
        """Lets a waiting sequence run if there are seats, and blocks for all of its tokens.

        Blocks that running sequences still need for their known tokens are not given away. For a request of
        a better priority, those of a worse one are preempted.
        """
        request, group = sequence.request, self._lockstep(sequence)
        worse = [other for other in self.running if other.request.priority > request.priority]
        seats = self._num_seats_taken + request.num_seats - self.max_num_seqs
        if seats > sum(other.request.num_seats for other in worse if other is self._lockstep(other)[0]):
            return False
        num_cached_tokens = self.kv_cache.match_prefix(sequence, _max_cached_tokens(sequence))
        needed = self._num_blocks_missing(group)
        if needed > self._num_blocks_to_spare() + sum(len(other.block_table) for other in worse):
            self.kv_cache.free(sequence)
            return False
        while self._num_seats_taken + request.num_seats > self.max_num_seqs or needed > self._num_blocks_to_spare():
            if not self.running or self.running[-1].request.priority <= request.priority:
                self.kv_cache.free(sequence)
                return False
            self._preempt(self.running[-1], step)
        if sequence.status is RequestStatus.WAITING and sequence.index == 0:
            request.num_cached_tokens = num_cached_tokens
        if self.kv_cache.enable_prefix_caching:
            self.num_prefix_queries += len(sequence.token_ids)
            self.num_prefix_hits += num_cached_tokens
        heapq.heappop(self._waiting)
        self._enter(group)
        return True

    def _make_room(self, group: list[Sequence], counts: list[int], step: Schedule) -> bool:
        """Frees blocks for `append` by preempting from the end of the order; False: nobody is behind this group."""
        while self.kv_cache.pool.num_free_blocks < self.kv_cache.num_blocks_to_append(group, counts):
            victim = self.running[-1]
            if victim.request is group[0].request and victim in self._lockstep(group[0]):
                return False
            self._preempt(victim, step)
        return True

    def _preempt(self, sequence: Sequence, step: Schedule) -> None:
        group = self._lockstep(sequence)
        for member in group:
            step.remove(member)
        self._leave(group, RequestStatus.PREEMPTED)
        self._wait(group[0])
        self.num_preemptions += 1
        sequence.request.num_preemptions += 1

    def _num_blocks_missing(self, group: list[Sequence]) -> int:
        """Blocks that the group's known tokens still need; unstarted beams will share the prompt's full blocks."""
        shared = group[0].request.num_prompt_tokens // self.kv_cache.block_size
        missing = 0
        for i, member in enumerate(group):
            has = shared if i and not member.block_table else len(member.block_table)
            missing += self.kv_cache.num_blocks_for(len(member.token_ids)) - has
        return max(missing, 0)

    def _num_blocks_to_spare(self) -> int:
        groups = (self._lockstep(sequence) for sequence in self.running)
        promised = sum(self._num_blocks_missing(group) for group in groups)
        return self.kv_cache.pool.num_free_blocks - promised

    # --- queues ---

    def _lockstep(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that move together with this one: all beams of its search, else it alone."""
        return [sequence] if sequence.request.beam_search is None else sequence.request.sequences

    def _next_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1] not in self._queued:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _wait(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.key, sequence))
        self._queued.add(sequence)

    def _enter(self, group: list[Sequence]) -> None:
        """A group begins to run: it takes its seats, and each sequence a row of the batch builder's table."""
        self._num_seats_taken += group[0].request.num_seats
        for sequence in group:
            self._queued.discard(sequence)
            sequence.status = RequestStatus.RUNNING
            sequence.row = self._free_rows.pop()
            insort(self.running, sequence, key=_key)

    def _leave(self, group: list[Sequence], status: RequestStatus) -> None:
        self._num_seats_taken -= group[0].request.num_seats
        for sequence in group:
            self.kv_cache.free(sequence)
            self.running.remove(sequence)
            self._free_rows.append(sequence.row)
            sequence.row = -1
            sequence.status = status

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks, seats or rows are lost, or held by a sequence that does not run."""
        self.kv_cache.pool.check_integrity(sequence.block_table for sequence in self.running)
        rows = [sequence.row for sequence in self.running]
        if sorted(rows + self._free_rows) != list(range(self.max_num_seqs)):
            raise AssertionError(f"rows {rows} run and {self._free_rows} are free, of {self.max_num_seqs}")
        leaders = [sequence for sequence in self.running if self._lockstep(sequence)[0] is sequence]
        if self._num_seats_taken != sum(sequence.request.num_seats for sequence in leaders):
            raise AssertionError(f"{self._num_seats_taken} seats are taken by {len(leaders)} groups")
        if self.running != sorted(self.running, key=_key):
            raise AssertionError("running sequences are out of order")
        for sequence in self.running:
            # More blocks than that are there after a step that failed and is about to be repeated.
            if len(sequence.block_table) < self.kv_cache.num_blocks_for(sequence.num_computed_tokens):
                raise AssertionError(f"{sequence.num_computed_tokens} tokens lie in {len(sequence.block_table)} blocks")


def _key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.key


def _max_cached_tokens(sequence: Sequence) -> int:
    """How many of its tokens need not be computed where the cache has them: logits are wanted of the others."""
    limit, request = len(sequence.token_ids) - 1, sequence.request
    return min(limit, len(request.prompt_logprobs)) if request.needs_prompt_logprobs else limit
