"""The scheduler: picks the tokens of the next step.

There is no prefill or decode mode: a sequence has token_ids, the first num_computed_tokens of them are in the cache,
and a step computes some of the rest. Sequences that need one token go first; the remaining token budget is filled with
chunks of longer ones. Streams skip a step only for a short prompt, within limits. When blocks run out, groups are
preempted (`admission`).

An executor with several stages computes several steps at once, one per stage. A group is in at most one of them, and
until that step ends it is neither scheduled nor preempted. A step takes no more groups than its share, to leave some
for other steps.

Texts to embed or score are prompts without an answer. They wait in the same queue, behind the answers of their
priority, which let one text pass at a time (`ServiceQueue`).
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from typing import TYPE_CHECKING

from octavo.engine.admission import GroupAdmission
from octavo.engine.consumers.row_consumer import RowKind, RowUse
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import RequestStatus, Sequence, SequenceGroup
from octavo.engine.schedule import Schedule, ScheduledSequence
from octavo.engine.step_budget import StepBudget
from octavo.engine.step_times import StepTimes

if TYPE_CHECKING:
    from octavo.engine.encoding.encodings import Encodings
    from octavo.engine.limits import EngineLimits
    from octavo.prompt import Prompt

logger = logging.getLogger(__name__)

_BATCH_SLOWDOWN = 1.25  # how much the rows of batches may slow a step of live requests


class Scheduler:
    """Makes steps from the groups that `admission` holds and admits. Counts steps in the metrics.

    times: the times of the steps so far, also used for drafts and batches.
    step_budget: limits the time of steps, if given; it never changes an answer.
    """

    def __init__(
        self,
        admission: GroupAdmission,
        limits: EngineLimits,
        metrics: EngineMetrics,
        *,
        takes_whole_texts: bool = False,
    ) -> None:
        """takes_whole_texts: all tokens of a text are computed in one step."""
        self.encodings: Encodings | None = None  # for a model with images or sources
        self._takes_whole_texts = takes_whole_texts
        self.admission = admission
        self.kv_cache = admission.kv_cache
        self.metrics = metrics
        self.times = StepTimes()
        self.step_budget = StepBudget(limits.max_itl_s, self.times) if limits.max_itl_s else None
        self._keeps_spans_whole = bool(limits.images.longest_span)
        self._max_source_rows = limits.sources.max_rows
        self._max_num_tokens = limits.max_num_batched_tokens
        self._max_num_outputs = limits.max_num_outputs
        self._queue, self._stages = admission.queue, admission.stages

    # --- a step ---

    def schedule(self, *, is_ahead: bool = False, has_time: bool = True) -> Schedule:
        """Return the next step, made of groups that are in no step of another stage.

        It is empty only if these groups have no work, or wait for rows of images.

        has_time: False if streams cannot wait any longer; then no prompt is computed together with them.
        is_ahead: another step is in flight, and its sequences look as in `overlap.as_if_done`. No group is preempted
        then.
        """
        self._cut_drafts()
        self.admission.take_arrived()
        if self.encodings is not None:
            self.encodings.begin_round()
        num_groups = min(len(self._queue.running) + len(self._queue.waiting), self.admission.max_num_seqs)
        step = Schedule(self._max_num_tokens, self._max_num_outputs, self._stages.share(num_groups), is_ahead)
        step.skips_decodes = has_time and self._schedule_alone(step)
        if not step.skips_decodes:
            behind = self._schedule_decodes(step)
            step.num_decodes = len(step.scheduled)
            lets_in = self.step_budget is None or self.step_budget.lets_in(step.num_decode_rows)
            if lets_in and (has_time or not step.scheduled):
                self._schedule_chunks(behind, step)
        self._invite_choices(step)
        self.kv_cache.plan_snapshots(step.scheduled.values())
        step.num_tokens_left += step.num_tokens_held_back
        return step

    def schedule_ahead(self, step: Schedule) -> Schedule | None:
        """Return the step after one in flight, or None if its sequences may need more than their next tokens.

        The step may be dropped later, so it makes no copies and admits no groups.
        """
        count, pool = len(step.scheduled), self.kv_cache.pool
        is_decode = step.num_decodes == count == len(self._queue.running)
        if not is_decode or self.admission.may_admit:
            return None
        ahead = Schedule(self._max_num_tokens - count, self._max_num_outputs - count, 0, True, num_decodes=count)
        for item in step.scheduled.values():
            sequence, consumer, position = item.sequence, item.rows[-1].consumer, item.start + 1
            if item.num_tokens > 1 or len(item.rows) > 1 or not consumer.goes_on(sequence):
                return None
            tables = sequence.block_tables
            if position >= self.kv_cache.block_size * len(tables[0].block_ids):
                if len(tables) > pool.num_free_blocks:
                    return None
                self.kv_cache.append(sequence, position + 1 - sequence.num_computed_tokens)
            rows = [RowUse(consumer, sequence, position, 1)]
            ahead.scheduled[sequence] = ScheduledSequence(sequence, position, 1, rows)
        return ahead

    def _schedule_alone(self, step: Schedule) -> bool:
        """Give a short prompt a step of its own, if the running sequences can wait for it."""
        budget, running = self.step_budget, self.admission.running
        if budget is None or not running or not self._queue.waiting:
            return False
        # A prompt that has begun is not overtaken.
        if any(len(other.token_ids) - other.num_computed_tokens > 1 for other in running):
            return False
        first = self._queue.waiting[0]
        sequence, num_rows = first.members[0], sum(1 + len(other.draft_token_ids) for other in running)
        num_missing = len(sequence.token_ids) - self.kv_cache.num_cached_tokens(sequence, first.max_cached_tokens())
        if first.is_text or not budget.lets_skip(num_rows, num_missing) or not self.admission.admit(first, step):
            return False
        self._schedule_chunk(first, step)
        return step.has_chunks

    def _hold_back(self, first: Sequence, step: Schedule) -> None:
        """Remove tokens that would make the step too long for the streams that wait for it.

        first: the sequence of the first chunk. It is running, so the number of its cached tokens is known.
        """
        if self.step_budget is None:
            return
        left = step.num_tokens_left + step.num_tokens_held_back
        context = first.num_computed_tokens
        missing = len(first.token_ids) - context
        to_compute = max(len(first.token_ids) - (0 if first.index else first.request.num_cached_tokens), missing)
        # Streams never wait for a text, which has no first token.
        waited_for = 0 if first.group.is_text else missing
        allowed = self.step_budget.max_prefill_tokens(step.num_decode_rows, context, waited_for, to_compute)
        step.num_tokens_left = min(left, allowed)
        step.num_tokens_held_back = left - step.num_tokens_left

    def mark_computed(self, step: Schedule) -> None:
        """Record after a step that its tokens, except drafts, are cached. Choices then share the first one's prompt.

        Sequences that have ended since scheduling are ignored, here and by the consumers of the rows.
        """
        for item in step.scheduled.values():
            sequence = item.sequence
            is_running = sequence.status is RequestStatus.RUNNING
            self.kv_cache.end_snapshot(item, is_valid=is_running)
            if not is_running:
                continue
            end = min(sequence.num_computed_tokens + item.num_tokens, len(sequence.token_ids))
            if sequence.arrived:
                self.kv_cache.register_loads(sequence, item.loads)
            self.kv_cache.mark_computed(sequence, end)
            for use in item.rows:
                if use.sequence is not sequence:
                    self.kv_cache.fork(sequence, use.sequence, sequence.num_computed_tokens)

    def repeat(self, step: Schedule) -> None:
        """Prepare a failed step to be repeated.

        The states of its sequences have moved on. If the model has states, the sequences are computed from the start
        again.
        """
        for item in step.scheduled.values():
            self.kv_cache.end_snapshot(item, is_valid=False)
        if self.kv_cache.states is None:
            return
        running = [item.sequence for item in step.scheduled.values() if item.sequence.status is RequestStatus.RUNNING]
        for group in {sequence.group: None for sequence in running}:
            self.admission.preempt(group, step)

    def accept_drafts(self, sequence: Sequence, num_accepted: int, num_claimed: int = 0) -> None:
        """Accept num_accepted drafts of a step as tokens. The cache drops the rest.

        num_claimed: tokens that the sequence will have in the cache after the next step in flight.
        """
        self.kv_cache.accept_drafts(sequence, num_accepted, num_claimed)

    def _schedule_decodes(self, step: Schedule) -> deque[SequenceGroup]:
        """Schedule one token and its drafts for every sequence that needs just one. Return groups that need more."""
        behind: deque[SequenceGroup] = deque()
        running, has_room, scheduled = self._queue.running, self.kv_cache.has_room, step.scheduled
        position, num_left = 0, self._stages.share(len(running))
        while position < len(running) and num_left > 0:  # preemption shortens the list from its end
            group = running[position]
            position += 1
            if group.is_batch and not self._lets_batch_in(group, step):
                break  # and so are all after it
            if group in self._stages.busy:
                continue
            members = group.members
            sequence, known = members[0], len(members[0].token_ids)
            is_next = known - sequence.num_computed_tokens == 1
            if is_next and self.encodings is not None and _may_lack_rows(sequence):
                behind.append(group)
                continue
            if is_next and len(members) == 1 and not sequence.draft_token_ids and has_room(sequence):
                consumers = group.consumers
                is_plain = len(consumers) == 1
                rows = [RowUse(consumers[0], sequence, known - 1, 1)] if is_plain else group.rows(sequence, 1)
                step.num_tokens_left -= 1
                step.num_rows_left -= len(rows)
                scheduled[sequence] = ScheduledSequence(sequence, known - 1, 1, rows)
            elif any(len(member.token_ids) - member.num_computed_tokens > 1 for member in members):
                behind.append(group)
                continue
            elif known > sequence.num_computed_tokens:  # otherwise it ends with the step in flight
                self._schedule_members(group, self._decode_counts(group, step), step)
            num_left -= 1
            step.num_groups_left -= 1
        return behind

    def _lets_batch_in(self, group: SequenceGroup, step: Schedule) -> bool:
        """True if a batch group hardly slows down a step's live requests.

        Subtracts the group's rows from `Schedule.batch_rows_left`.
        """
        if step.batch_rows_left is None:
            num_rows = self._max_num_tokens - step.num_tokens_left - step.num_tokens_held_back
            step.batch_rows_left = self.times.rows_beside(num_rows, _BATCH_SLOWDOWN) if num_rows else sys.maxsize
        step.batch_rows_left -= len(group.members)
        return step.batch_rows_left >= 0

    def _cut_drafts(self) -> None:
        """Drop drafts that cannot be right: the first one that a grammar forbids, and those after it."""
        for sequence in self.admission.running:
            if sequence.draft_token_ids and sequence.grammar is not None:
                del sequence.draft_token_ids[sequence.grammar.num_allowed(sequence.draft_token_ids) :]

    def _decode_counts(self, group: SequenceGroup, step: Schedule) -> list[int]:
        """Return the number of tokens to compute for each member: one, and the drafts of a single sequence.

        A sequence gets drafts only if all others still get their token. Drafts never take blocks that other groups
        hold.
        """
        members, num_drafts = group.members, len(group.members[0].draft_token_ids)
        if num_drafts:
            num_others = self._queue.num_seqs_taken - len(step.scheduled)
            num_drafts = min(num_drafts, self.kv_cache.most_drafts(members[0]))
            num_drafts = max(min(num_drafts, min(step.num_tokens_left, step.num_rows_left) - num_others), 0)
            if not self.kv_cache.has_room(members[0], 1 + num_drafts):
                needed = self.kv_cache.num_blocks_to_append(members, [1 + num_drafts])
                num_drafts = num_drafts if needed <= self.kv_cache.pool.num_free_blocks else 0
        return [1 + num_drafts] * len(members)

    def _schedule_chunks(self, behind: deque[SequenceGroup], step: Schedule) -> None:
        """Fill the budget with running groups that are behind and with waiting ones, in service order."""
        is_blocked = False
        while step.num_tokens_left > 0 and step.num_groups_left > 0:
            waiting = self._queue.waiting[0] if self._queue.waiting and not is_blocked else None
            if behind and (waiting is None or behind[0].key < waiting.key):
                group = behind.popleft()
                if group.status is RequestStatus.RUNNING and group.members[0] not in step.scheduled:
                    self._schedule_chunk(group, step)
            elif waiting is None or not self._may_begin(waiting, step):
                break
            elif self.admission.admit(waiting, step):
                self._schedule_chunk(waiting, step)
            else:
                is_blocked = True

    def _may_begin(self, group: SequenceGroup, step: Schedule) -> bool:
        """False if the group would slow down live requests, or if a whole text does not fit into the step."""
        if group.is_batch and not self._lets_batch_in(group, step):
            return False
        first = group.members[0]
        return not self._takes_whole_texts or (len(first.token_ids) <= step.num_tokens_left and step.num_rows_left > 0)

    def _schedule_chunk(self, group: SequenceGroup, step: Schedule) -> None:
        first = group.members[0]
        step.num_groups_left -= 1
        if not step.has_chunks:
            self._hold_back(first, step)
        if len(group.members) > 1:
            self._schedule_lockstep(group, step)
            return
        count = min(first.num_missing_tokens, step.num_tokens_left)
        excess = sum(use.count for use in group.rows(first, count)) - step.num_rows_left
        count -= max(excess, 0)  # if any rows are wanted, they belong to the last tokens of a chunk
        start = first.num_computed_tokens
        count = self._num_ready(first, count, step)
        is_first = not step.has_chunks
        if count > 0 and self._schedule_members(group, [count], step) and is_first:
            step.chunk_start = start

    def _num_ready(self, sequence: Sequence, count: int, step: Schedule) -> int:
        """Return how many of the next `count` tokens can be computed with the available image or source rows.

        If the positions of a span attend to each other, a step takes all that are left of the span, or none.
        """
        prompt, start = sequence.request.prompt, sequence.num_computed_tokens
        if self.encodings is None or not (prompt.spans or prompt.source) or count <= 0:
            return count
        if prompt.source is not None and start == 0:
            begun = (item.sequence.request.num_source_tokens for item in step.scheduled.values() if item.start == 0)
            if sum(begun) + prompt.source.num_rows > self._max_source_rows:
                return 0
        if self._keeps_spans_whole:
            count = _with_whole_spans(prompt, start, count, step.num_tokens_left + step.num_tokens_held_back)
            missing = max(count - step.num_tokens_left, 0)
            step.num_tokens_left += missing
            step.num_tokens_held_back -= missing
        return self.encodings.num_ready(prompt, start, count)

    def _schedule_lockstep(self, group: SequenceGroup, step: Schedule) -> None:
        """Resume a preempted group: the first member computes the prompt, the others fork there, and all catch up."""
        members = group.members
        first, num_prompt_tokens = members[0], group.request.num_prompt_tokens
        unstarted = [member for member in members[1:] if not member.block_tables]
        if unstarted and first.num_computed_tokens < num_prompt_tokens:
            count = min(num_prompt_tokens - first.num_computed_tokens, step.num_tokens_left)
            self._schedule_members(group, [self._num_ready(first, count, step)], step)
            return
        for member in unstarted:
            self.kv_cache.fork(first, member, num_prompt_tokens)
        counts = [member.num_missing_tokens for member in members]
        if sum(counts) > step.num_tokens_left or len(members) > step.num_rows_left:
            left = step.num_tokens_left
            for i, count in enumerate(counts):
                counts[i] = min(count - 1, left)
                left -= counts[i]
        self._schedule_members(group, counts, step)

    def _schedule_members(self, group: SequenceGroup, counts: list[int], step: Schedule) -> bool:
        """Schedule the group's first members, each with its number of tokens from `counts`.

        Return False if blocks run out and no group can be preempted.
        """
        members = group.members[: len(counts)]
        while self.kv_cache.pool.num_free_blocks < self.kv_cache.num_blocks_to_append(members, counts):
            victim = self._stages.last_idle(self._queue)
            if victim is None or victim is group or step.is_ahead:
                step.is_starved = True
                return False
            self.admission.preempt(victim, step)
        for member, count in zip(members, counts, strict=True):
            if count:
                rows = group.rows(member, count)
                start, copies = member.num_computed_tokens, self.kv_cache.append(member, count)
                item = ScheduledSequence(member, start, count, rows, copies)
                self.kv_cache.prepare_states(item)
                item.loads, member.loads = member.loads, []
                step.add(item)
        return True

    def _invite_choices(self, step: Schedule) -> None:
        """Let the other choices of a complete prompt sample from the same logits. Those beyond max_num_seqs wait."""
        for item in step.scheduled.values():
            request = item.sequence.request
            if not request.pending_groups or not item.rows or item.rows[-1].consumer.kind is not RowKind.SAMPLE:
                continue
            last = item.rows[-1].start
            count = min(step.num_rows_left, self.admission.num_seqs_left)
            for group in request.pending_groups[:count]:
                self.admission.enter(group)
                item.rows.append(RowUse(group.consumers[-1], group.members[0], last, 1))
                step.num_rows_left -= 1
            for group in request.pending_groups[count:]:
                self._queue.wait(group)
            request.pending_groups = []

    # --- metrics ---

    def observe(self, step: Schedule, elapsed_s: float, *, is_timed: bool = True) -> None:
        """Count a step that has ended.

        elapsed_s: seconds from the start of scheduling until its tokens were taken.
        is_timed: False if elapsed_s includes the time of anything but this step.
        """
        metrics, budget = self.metrics, self.step_budget
        num_tokens, start = self._max_num_tokens - step.num_tokens_left, step.chunk_start
        num_rows = step.num_decode_rows
        if budget is not None and is_timed:
            budget.observe(num_rows, num_tokens - num_rows, start, elapsed_s, skips_decodes=step.skips_decodes)
        elif is_timed:
            self.times.observe(num_rows, num_tokens - num_rows, start, elapsed_s)
        if any(not sequence.group.is_text for sequence in step.scheduled):
            metrics.num_steps_total += 1
            metrics.step_s.observe(elapsed_s)
            metrics.batched_tokens.observe(num_tokens)
            self.admission.observe_slots()
        self.admission.observe_state()


def _may_lack_rows(sequence: Sequence) -> bool:
    """True if rows may be missing, because the prompt ends with an image or the answer has just begun."""
    prompt, known = sequence.request.prompt, len(sequence.token_ids)
    return prompt.touches(known - 1, known) or (prompt.source is not None and known == 1)


def _with_whole_spans(prompt: Prompt, start: int, count: int, most: int) -> int:
    """Return the size of a chunk of at most `count` tokens that does not split a span.

    It ends before a span or includes all of it.
    most: largest chunk that may include a span; the result is 0 if the first span does not fit.
    """
    end = start + count
    for span in prompt.overlapping(end - 1, end):
        if span.end > end:
            if span.start > start:
                return span.start - start
            return span.end - start if span.end - start <= most else 0
    return count
