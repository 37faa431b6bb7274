"""The engine: accepts requests, runs step after step, and returns outputs. Not thread-safe; see `engine_thread`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as Row
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from octavo.backends import BorrowingExecutor, Executor, GuessingExecutor, PendingStep, SleepingExecutor
from octavo.backends.sampling import RowError, SamplingError, report_processed
from octavo.batch import Batch, StepOutput
from octavo.engine.admission import GroupAdmission
from octavo.engine.batch_builder import BatchBuilder
from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.kv.block_tier import BlockStore, BlockTier, SavedKeys
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.kv.kv_cache import KVCacheManager
from octavo.engine.kv.load_rates import LoadRates
from octavo.engine.limits import EngineLimits
from octavo.engine.metrics import EngineMetrics
from octavo.engine.overlap import as_if_done, can_be_foreseen
from octavo.engine.publisher import Publisher
from octavo.engine.request import FinishReason, Request, RequestStatus, Sequence
from octavo.engine.request_factory import RequestFactory
from octavo.engine.row_failures import failure_of
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler
from octavo.engine.slot_prompts import SlotPrompts
from octavo.engine.speculation.ahead_drafts import AheadDrafts, guess_tokens
from octavo.engine.speculation.draft_source import DraftSource
from octavo.engine.speculation.model_drafter import ModelDrafter
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.texts.text_heads import NO_HEADS, TextHeads
from octavo.engine.texts.text_model import ANSWERS_ONLY, TextModel
from octavo.errors import NumericalError, OctavoError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.outputs import OutputDelta, PoolingOutput
from octavo.speculative_config import MAX_DRAFTS, MAX_STATE_DRAFTS
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.adapters.registry import AdapterRegistry
    from octavo.engine.encoder_turns import EncoderTurns
    from octavo.engine.encoding.encodings import Encodings
    from octavo.engine.loading.draft_head import DraftHead

logger = logging.getLogger(__name__)

_ARRIVAL_S = 0.005  # wait for blocks of a store while idle, before listening to callers again


class RequestFailure(NamedTuple):
    """A request that ended without an answer. Other requests are not affected."""

    request_id: str
    error: OctavoError


Output: TypeAlias = "OutputDelta | PoolingOutput | RequestFailure"


@dataclass(slots=True)
class _Step:
    """A submitted step.

    started_at: when its scheduling began.
    result: None while it is in flight.
    """

    schedule: Schedule
    batch: Batch
    pending: PendingStep
    started_at: float
    saved: SavedKeys | None  # None without a store
    ahead: AheadDrafts | None = None  # its guesses, if they are not known on the host yet
    result: StepOutput | SamplingError | None = None
    ended_at: float = 0.0


class Engine:
    """Schedules and executes steps, takes their tokens and publishes outputs.

    The executor's cache must already be allocated. `step` runs a whole step. A loop that calls `start`, `publish`,
    `prepare` and `finish` in turn publishes the outputs of one step and prepares the arrays of the next while a step
    runs. An executor that takes two steps gets the next one before the first ends. Each stage of a pipeline has a step
    with different sequences. Requests may be added and aborted at any time.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        texts: TextModel = ANSWERS_ONLY,
        heads: TextHeads = NO_HEADS,
        identity: CacheIdentity | None = None,
        store: BlockStore | None = None,
    ) -> None:
        """texts: the text tasks that the model supports.
        heads: the steps that follow pooling.
        identity: see `KVCacheManager`.
        store: holds evicted blocks and the states of prefixes. Needs prefix caching.
        """
        self.executor = executor
        self.texts = texts
        self.limits = limits
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics(num_blocks=limits.num_blocks)
        self.encodings: Encodings | None = None
        self._encoder_turns: EncoderTurns | None = None
        layout = executor.cache_sizes.layout
        kv_cache = KVCacheManager(
            limits.num_blocks,
            limits.block_size,
            limits.enable_prefix_caching,
            layout,
            limits.max_num_batched_tokens,
            limits.num_states,
            identity,
        )
        if kv_cache.states is not None:
            kv_cache.states.num_draft_slots_left = limits.num_draft_states
        self._kv_cache, self._is_asleep = kv_cache, False
        self.admission = GroupAdmission(kv_cache, limits.max_num_seqs, self.metrics, executor.num_stages)
        self.scheduler = Scheduler(self.admission, limits, self.metrics, takes_whole_texts=texts.takes_whole_texts)
        sizes = executor.cache_sizes
        kv_cache.moved_bytes = sizes.moved_bytes(limits.block_size), sizes.moved_state_bytes
        if store is not None and limits.enable_prefix_caching:
            rates = LoadRates(self.scheduler.times.chunk_token_s)
            kv_cache.use(BlockTier(store, rates, *kv_cache.moved_bytes))
        elif store is not None:
            logger.warning("the block store is not used: prefix caching is off")
        self.speculation: Speculation | None = None
        self._batch_builder = BatchBuilder(limits, limits.max_num_seqs, layout)
        self._factory = RequestFactory(tokenizer, limits, kv_cache, self.metrics, texts, heads)
        self._publisher = Publisher(tokenizer, self.admission, self.metrics)
        self.slots = SlotPrompts(kv_cache)
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[_Step] = deque()  # the oldest first
        self._last_ended_at = 0.0
        self._ended: _Step | None = None  # its tokens are not taken yet
        self._prepared: tuple[Schedule, Batch] | None = None  # the step after the one in flight, except for its tokens
        # The results of a step that have not been published yet.
        self._accepted: dict[Request, int] = {}  # tokens
        self._accepted_at = 0.0
        self._failures: list[RequestFailure] = []
        self._progress: list[OutputDelta] = []  # progress of the prompts of followed requests

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._failures or self._in_flight or self._ended or self._kv_cache.moves)

    @property
    def _settles_drafts(self) -> bool:
        """True if a step may be submitted before it is known which guesses of the previous step are right.

        This is not possible for models with states, multi-component positions or source texts, because a device cannot
        select the right ones by itself.
        """
        limits = self.limits
        is_plain = not limits.num_states and limits.images.position_components == 1 and not limits.sources.width
        return is_plain and self.executor.settles_drafts

    @property
    def adapters(self) -> AdapterRegistry | None:
        """The adapters that requests may name, or None if they cannot name any."""
        return self.admission.adapters

    def adapt_with(self, adapters: AdapterRegistry | None) -> None:
        """Use these adapters for requests from now on. None disables adapters."""
        self.admission.adapters = self._factory.adapters = adapters
        if adapters is not None:
            adapters.steps_run = lambda: self.has_work

    def speculate(self, sources: Row[DraftSource]) -> None:
        """Use drafts from these sources from now on."""
        most = MAX_DRAFTS if self._kv_cache.states is None else MAX_STATE_DRAFTS
        self.speculation = Speculation(sources, self.scheduler.times, self.metrics, most)

    def see(self, encodings: Encodings) -> None:
        """Accept images or sources from now on. Their rows come from `encodings`."""
        from octavo.engine.encoder_turns import EncoderTurns

        self.encodings = self.scheduler.encodings = encodings
        self._encoder_turns = EncoderTurns(encodings, self.scheduler)
        self._batch_builder.rows_of = encodings.rows_of
        self._batch_builder.rows_of_source = encodings.rows_of_source
        encodings.metrics = self.metrics

    def draft_with(self, draft: Executor, max_drafts: int = MAX_DRAFTS, head: DraftHead | None = None) -> None:
        """Also use drafts from a model whose cache mirrors this engine's blocks. Raises UsageError if it cannot draft.

        max_drafts: limit per sequence in one step.
        head: for a draft that reads this model's hidden states. The executor must have room for the hidden states of
        all tokens of a step.
        """
        speculation, limits = self.speculation, self.limits
        windows = [group.window for group in self.executor.cache_sizes.layout.groups]
        if speculation is None or None not in windows:
            raise UsageError("draft_model needs a model with full-attention layers; leave it out")
        most, group = min(max_drafts, speculation.limit), windows.index(None)
        if head is not None and head.borrows_cache:
            from octavo.engine.speculation.assistant_drafter import AssistantDrafter

            if not isinstance(draft, BorrowingExecutor):
                raise UsageError(
                    "this draft_model reads the model's keys and values, so both must be on the same device: put all "
                    "layers on the GPU or none (gpu_layers), or leave draft_model out"
                )
            draft.borrow_cache(self.executor)
            speculation.drafter = AssistantDrafter(draft, self.scheduler.times, limits, most, group)
            return
        names = (None, None) if head is None else (head.target_ids, head.bias)
        shares = isinstance(draft, GuessingExecutor) and draft.share_tokens(self.executor, *names)
        draft.allocate_cache(limits.num_blocks + limits.max_num_seqs, limits.block_size)
        if head is None:
            speculation.drafter = ModelDrafter(draft, self.scheduler.times, limits, most, group)
        elif head.taps:
            from octavo.engine.speculation.eagle_drafter import EagleDrafter

            speculation.drafter = EagleDrafter(draft, self.scheduler.times, limits, most, head, group)
        else:
            from octavo.engine.speculation.head_drafter import HeadDrafter

            speculation.drafter = HeadDrafter(draft, self.scheduler.times, limits, most, group)
        speculation.drafter.is_on_device = shares

    # --- sleep ---

    def sleep(self) -> None:
        """Release the device's memory and keep the weights in main memory. Raises UsageError if that is impossible."""
        if self.has_work or not isinstance(self.executor, SleepingExecutor):
            why = "requests are running" if self.has_work else "its weights are already in main memory"
            raise UsageError(f"the engine cannot free device memory: {why}", code="cannot_sleep")
        self._kv_cache.discard_all()
        for executor in self._sleepers():
            executor.sleep()
        self._is_asleep = True

    def wake_up(self) -> None:
        """End any sleep. If memory is short, raises InsufficientMemoryError and stays asleep."""
        if self._is_asleep:
            for executor in self._sleepers():
                executor.wake_up()
            self._is_asleep = False

    def _sleepers(self) -> list[SleepingExecutor]:
        """Return the executors that use device memory: the model's and its encoder's."""
        executors = [self.executor] if self.encodings is None else [self.executor, self.encodings.encoder.executor]
        return [each for each in executors if isinstance(each, SleepingExecutor)]

    # --- blocks outside the cache ---

    @property
    def identity(self) -> CacheIdentity:
        """The cache identity. The keys of blocks are derived from it."""
        return self._kv_cache.identity

    @property
    def has_unsaved(self) -> bool:
        """True if the last step computed something that is not in the store yet."""
        return self._kv_cache.tier is not None and self._kv_cache.tier.has_losses

    def save_computed(self) -> None:
        """Save the last step's blocks and states to the store in a separate step. There must be no requests."""
        if self.has_unsaved and not (self._is_asleep or self._in_flight or self._ended):
            self._move_alone()
            self.admission.observe_state()

    def _move_alone(self) -> None:
        """Move blocks between the cache and memory in a separate step, when there is nothing else to do."""
        batch = self._kv_cache.saving_batch()
        if batch is not None:
            saved = self._kv_cache.begin_step(batch, [])
            self.executor.submit(batch).wait()
            self._kv_cache.end_step(batch, saved)

    def close(self) -> None:
        """Close the store and the encoder, if any. The executor stays open."""
        if self.encodings is not None:
            self.encodings.encoder.close()
        if self._kv_cache.tier is not None:
            with suppress(Exception):  # a failed executor has nothing to save
                self.save_computed()
            self._kv_cache.tier.close()

    # --- requests ---

    def create_request(self, request_id: str, generation: GenerationRequest) -> Request:
        """Create a checked request without queuing it. Thread-safe.

        Raises UsageError with the numbers if it is invalid or could never fit.
        """
        return self._factory.create(request_id, generation)

    def prepare_structured_outputs(self) -> None:
        """Prepare for the first structured output. This takes half a second. Thread-safe.

        It holds the GIL most of that time, so call it before streams run.
        """
        self._factory.grammars().prepare()

    def add_request(self, request: Request) -> None:
        """Queue a request and end a sleep. Raises UsageError if its id is in use."""
        if request.request_id in self._requests:
            raise UsageError(
                f"request id {request.request_id!r} is in use; give each running request its own id",
                param="request_id",
                code="invalid_value",
            )
        self.wake_up()
        self.admission.add(request)
        self._requests[request.request_id] = request
        if request.is_measured:
            self.metrics.num_requests_total += 1
            self.metrics.num_prompt_tokens_total += request.num_given_tokens

    def abort(self, request_id: str) -> Output | None:
        """End a request at once and return its output so far, with finish_reason `abort`.

        If the request has already ended but its last output has not been published yet, return that output. Return None
        for an unknown request.
        """
        self._take()
        request = self._requests.get(request_id)
        if request is None:
            return None
        if self.encodings is not None and (request.prompt.spans or request.prompt.source):
            self.encodings.begin_round()  # perhaps no other request wants its rows
        self._settle(request)
        was_finished = request.is_finished
        self._publisher.end(request, FinishReason.ABORT)
        output = self._last_output(request)
        if not was_finished and not request.params.is_answered:
            return RequestFailure(request_id, OctavoError(f"{request_id} was aborted"))
        return output

    # --- a step ---

    def step(self) -> list[Output]:
        """Run one whole step and return the new outputs."""
        self.start()
        self.finish()
        return self.publish()

    def start(self) -> None:
        """Pass the next steps, if any, to the executor, and take the tokens of the last one."""
        if self._in_flight and self.executor.num_stages == 1:  # `prepare` has submitted it
            self._take()
            return
        started_at = time.perf_counter()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and self._complete(*prepared):
            self._submit(*prepared, started_at)
            self._take()
            return
        self._take()
        turns = self._encoder_turns
        if turns is not None and turns.is_due and self._in_flight:  # drain the stages of a pipeline first
            return
        has_time = turns is None or not turns.run()
        while len(self._in_flight) < self.executor.num_stages:
            if self.speculation is not None:
                self._propose(self.speculation)
                started_at = time.perf_counter()  # a draft model's time does not count for the step
            schedule = self.scheduler.schedule(has_time=has_time)
            if not schedule.scheduled:
                break
            self._submit(schedule, self._batch_builder.build(schedule), started_at)
        if self._kv_cache.moves and not self._in_flight:
            self._move_alone()
        if self._requests and not (self._in_flight or self._accepted or self._failures):
            if self.admission.arriving:
                self.admission.take_arrived(_ARRIVAL_S)
                return
            if self.encodings is not None and self.encodings.has_work:
                return
            raise RuntimeError(f"the scheduler finds nothing to do for {len(self._requests)} requests")

    def _propose(self, speculation: Speculation) -> None:
        """Give sequences drafts for the next step. While prompts wait, do not try larger steps than have been timed."""
        busy, running = self.admission.stages.busy, self.admission.running
        idle = [sequence for sequence in running if sequence.group not in busy] if busy else running
        self._batch_builder.gives_hidden = speculation.reads_hidden
        speculation.propose(idle, self.limits.max_num_outputs, may_explore=not self.admission.may_admit)

    def prepare(self) -> None:
        """Prepare the step after the one in flight, if its sequences are certain to continue.

        Also submit it if the executor takes two steps and no sequence has to wait for its token.
        """
        if len(self._in_flight) != 1 or self.executor.num_stages > 1:  # with stages, the next step has other sequences
            return
        if self.encodings is not None and self.encodings.has_work:
            return
        last, takes_two = self._in_flight[0], self.executor.max_in_flight > 1
        if takes_two:
            self._take()
            if self.speculation is not None and self.speculation.may_draft_next(last.schedule.scheduled):
                lengths = self._lengths_ahead(self.speculation, last.schedule)
                if lengths is not None:
                    self._submit_ahead(last.schedule, time.perf_counter(), lengths)
                return
        started_at = time.perf_counter()
        schedule = self.scheduler.schedule_ahead(last.schedule)
        self._prepared = None
        if schedule is not None:
            batch = self._batch_builder.follow(last.batch, schedule)
            if takes_two:
                batch.token_sources = np.arange(len(batch.token_ids), dtype=np.int32)
                self._submit(schedule, batch, started_at)
            else:
                self._prepared = schedule, batch
        elif takes_two and self._is_foreseen(last.schedule):
            self._submit_ahead(last.schedule, started_at, {})

    def _is_foreseen(self, last: Schedule) -> bool:
        """True if the step after `last` can be scheduled while `last` is in flight, before its tokens are known."""
        can = can_be_foreseen(last, settles_drafts=self._settles_drafts)
        return can and not self.admission.would_preempt

    def _lengths_ahead(self, speculation: Speculation, last: Schedule) -> dict[Sequence, int] | None:
        """Return the number of guesses per sequence that a draft model makes while a step runs.

        Return None if the host must know the step's tokens first.
        """
        if not self._settles_drafts or not self._is_foreseen(last):
            return None
        return speculation.lengths_ahead(last, self.limits.max_num_outputs)

    def _submit_ahead(self, last: Schedule, started_at: float, lengths: dict[Sequence, int]) -> None:
        """Schedule and submit the step after the one in flight.

        lengths: number of guesses for each of its sequences.
        """
        with as_if_done(last) as drawn:
            for sequence in drawn:
                sequence.draft_token_ids = guess_tokens(lengths.get(sequence, 0))
            schedule, ahead = self.scheduler.schedule(is_ahead=True), None
            if not schedule.scheduled:
                return
            if self.speculation is not None and lengths:
                ahead = self.speculation.draft_ahead(schedule, drawn)
            self._submit(schedule, self._batch_builder.build(schedule, drawn, ahead), started_at, ahead)

    def finish(self) -> float:
        """Wait for the oldest step in flight and return its duration in seconds.

        Its tokens are taken later, by `start` or `publish`.
        """
        if not self._in_flight:
            return 0.0
        step = self._in_flight.popleft()
        try:
            step.result = step.pending.wait()
        except SamplingError as error:
            step.result = error
        step.ended_at = time.perf_counter()
        self._kv_cache.end_step(step.batch, step.saved)
        step.started_at = max(step.started_at, self._last_ended_at)  # it waited while another step ran
        self._last_ended_at = step.ended_at
        self._ended = step
        return step.ended_at - step.started_at

    def publish(self) -> list[Output]:
        """Return the outputs of the last finished step."""
        self._take()
        outputs: list[Output] = [*self._failures]
        outputs += [delta for delta in self._progress if delta.request_id in self._requests]
        self._failures, self._progress = [], []
        for request in list(self._accepted):
            self._settle(request)
            output: Output | None
            if request.error is not None:
                output = self._fail(request, request.error)
            elif request.is_finished:
                output = self._last_output(request)
            else:
                output = self._publisher.build(request, finished=False)
            if output is not None:
                outputs.append(output)
        return outputs

    def _submit(self, schedule: Schedule, batch: Batch, started_at: float, ahead: AheadDrafts | None = None) -> None:
        saved = self._kv_cache.begin_step(batch, schedule.scheduled.values())
        if self.speculation is not None:
            self.speculation.note_submitted(batch)
        self._in_flight.append(_Step(schedule, batch, self.executor.submit(batch), started_at, saved, ahead))
        self.admission.stages.begin(schedule)
        for item in schedule.chunks():
            request = item.sequence.request
            if request.is_followed and not request.times.scheduled and item.start == request.num_cached_tokens:
                self._progress.append(self._publisher.build_progress(request, item.start, started_at))

    def _complete(self, schedule: Schedule, batch: Batch) -> bool:
        """Fill the tokens of the previous step into the prepared step.

        Return False if the prepared step is no longer the next one, because a request was added or removed, a token
        ended its sequence, or there are drafts now.
        """
        if self._ended is None or not isinstance(self._ended.result, StepOutput) or self.admission.may_admit:
            return False
        batch.token_ids = self._ended.result.token_ids
        token_ids = batch.token_ids.tolist()
        pairs = zip(schedule.scheduled, token_ids, strict=True)
        if any(token_id in sequence.request.end_token_ids for sequence, token_id in pairs):
            return False
        return self.speculation is None or not self.speculation.would_draft(schedule.scheduled, token_ids)

    def _take(self) -> None:
        """Take the tokens of the finished step, unless they have been taken already."""
        step, self._ended = self._ended, None
        if step is None:
            return
        self.admission.stages.end(step.schedule)
        if isinstance(step.result, SamplingError):
            later = [] if self.executor.num_stages > 1 else self._drop_in_flight()
            self._failures += self._fail_rows(step.schedule, step.result)
            for schedule in later:
                self.scheduler.repeat(schedule)
        elif step.result is not None:
            self.scheduler.mark_computed(step.schedule)
            if self.speculation is not None:
                self.speculation.note_result(step.schedule, step.batch, step.result)
                if step.ahead is not None:
                    self.speculation.take_ahead(step.ahead, step.schedule, step.result)
            self._accepted, self._accepted_at = self._consume(step, step.result), step.ended_at
            if self.speculation is not None and self._in_flight:
                self.speculation.note_ahead(self._in_flight[0].ahead)
            # This time includes the guesses of a draft model.
            self.scheduler.observe(step.schedule, step.ended_at - step.started_at, is_timed=step.ahead is None)

    def _consume(self, step: _Step, output: StepOutput) -> dict[Request, int]:
        """Pass the rows to their consumers. Return the number of new tokens of each request with new results."""
        schedule = step.schedule
        for item in schedule.chunks():  # decodes were scheduled before
            request, times = item.sequence.request, item.sequence.request.times
            if not times.scheduled:
                times.scheduled = step.started_at
            num_processed = item.start + item.num_tokens
            if request.is_followed and num_processed < request.num_prompt_tokens:  # otherwise the first token shows it
                self._progress.append(self._publisher.build_progress(request, num_processed, step.ended_at))
        if output.logits is not None and step.batch.sampling is not None:
            report_processed(output, step.batch.sampling, schedule.processed_rows())
            output.logits = None  # the rest of the output is kept until it is published
        rows: dict[RowConsumer, list[tuple[RowUse, int]]] = {}
        running = RequestStatus.RUNNING
        for use, row, _ in schedule.rows():
            if use.sequence.status is running:  # otherwise it ended after it was scheduled
                if use.consumer in rows:
                    rows[use.consumer].append((use, row))
                else:
                    rows[use.consumer] = [(use, row)]
        accepted: dict[Request, int] = {}
        for consumer, uses in rows.items():
            request, outcome = uses[0][0].sequence.request, consumer.consume(uses, output)
            self._apply(uses, outcome)
            if outcome.num_tokens or request.is_finished:
                accepted[request] = accepted.get(request, 0) + outcome.num_tokens
        return accepted

    def _apply(self, uses: list[tuple[RowUse, int]], outcome: Outcome) -> None:
        """Carry out the outcome of a consumer."""
        group = uses[0][0].sequence.group
        if outcome.tokens:
            for i, tokens in enumerate(outcome.tokens):  # a strict zip takes twice as long, per sequence and step
                use = uses[i][0]
                if use.count > 1 and self.speculation is not None:
                    self.speculation.count(use.sequence, use.count - 1, tokens)
                use.sequence.token_ids += tokens
                if use.count > 1:
                    num_claimed = self._move_back(use.sequence, use.count - len(tokens))
                    self.scheduler.accept_drafts(use.sequence, len(tokens) - 1, num_claimed)
        if outcome.finish is not None:
            for member in group.members:
                member.finish_reason = outcome.finish
            self.admission.finish(group)
        elif outcome.members is not None:
            self.admission.replace_members(group, outcome.members)

    def _move_back(self, sequence: Sequence, num_wrong: int) -> int:
        """Tell the next step, if it is in flight, about the wrong guesses of a sequence.

        Return the number of the sequence's tokens in the cache after that step, or 0 if the sequence is not part of it.
        """
        item = self._in_flight[0].schedule.scheduled.get(sequence) if self._in_flight else None
        if item is None:
            return 0
        item.move_back(num_wrong)
        return item.start + item.num_tokens

    def _settle(self, request: Request) -> None:
        """Process the last step's results of a request."""
        num_accepted, now, times = self._accepted.pop(request, 0), self._accepted_at, request.times
        if num_accepted:
            if times.first_token:
                self.metrics.inter_token_s.observe(now - times.last_token, num_accepted)
            else:
                times.first_token = now
            times.last_token = now
            request.num_generated_tokens += num_accepted
        self._publisher.settle(request)

    def _last_output(self, request: Request) -> Output | None:
        """Release an ended request and return its last output."""
        del self._requests[request.request_id]
        self.slots.note(request)
        output: Output | None = self._publisher.build(request, finished=True)
        self.metrics.observe_request(request)
        self.admission.observe_state()
        request.release()
        return output

    # --- failures ---

    def _drop_in_flight(self) -> list[Schedule]:
        """Wait for the steps that follow a failed step, discard their results, and return their schedules to be
        repeated.
        """
        dropped, self._in_flight = self._in_flight, deque()
        for step in dropped:
            with suppress(SamplingError):
                step.pending.wait()
            self._kv_cache.end_step(step.batch, step.saved)
        return [step.schedule for step in dropped]

    def _fail_rows(self, schedule: Schedule, error: SamplingError) -> list[RequestFailure]:
        """End the requests whose rows have no outcome. All other requests repeat the step as if it had not happened.

        A row after a draft is needed only if that draft is right. If only such a row fails, the request does not end:
        its sequence repeats the step without drafts.
        """
        errors: dict[Request, RowError] = {}
        for use, row, _ in schedule.rows():
            if use.sequence.status is not RequestStatus.RUNNING or use.consumer.kind is RowKind.HIDDEN:
                continue
            for i in range(row, row + use.count):
                if i not in error.errors:
                    continue
                if i > row and use.consumer.kind is RowKind.SAMPLE:
                    use.sequence.draft_token_ids = []
                    if self.speculation is not None:
                        self.speculation.bar(use.sequence)
                else:
                    errors.setdefault(use.sequence.request, error.errors[i])
        failures = [self._fail(request, failure_of(request, row_error)) for request, row_error in errors.items()]
        self.scheduler.repeat(schedule)
        num_damaged = sum(isinstance(failure.error, NumericalError) for failure in failures)
        if 1 < num_damaged == len({item.sequence.request for item in schedule.scheduled.values()}):
            logger.critical("all %d requests of a step failed: the weights in memory may be damaged", num_damaged)
        return failures

    def _fail(self, request: Request, error: OctavoError) -> RequestFailure:
        if isinstance(error, NumericalError):
            self.metrics.num_corrupted_total += 1
            self.scheduler.kv_cache.quarantine([member for group in request.groups for member in group.members])
            logger.error("%s", error)
        self._publisher.end(request, FinishReason.ERROR)
        self._last_output(request)
        return RequestFailure(request.request_id, error)
