"""The engine: requests in, one step after another, outputs out. Not thread-safe; see `async_engine`."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.backends import Executor
from octavo.backends.sampling import RowError, SamplingError
from octavo.batch import StepOutput
from octavo.engine.batch_builder import BatchBuilder
from octavo.engine.beam_search import BeamSearch, Candidate
from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.metrics import EngineMetrics
from octavo.engine.model_runner import ModelRunner
from octavo.engine.output_builder import OutputBuilder
from octavo.engine.pooling import PoolingQueue
from octavo.engine.request import FinishReason, Request, Sequence, derive_seed
from octavo.engine.request_checks import (
    check_params,
    check_prompt,
    find_bad_words,
)
from octavo.engine.scheduler import Schedule, Scheduler
from octavo.engine.step_budget import StepBudget
from octavo.engine.text_stream import TextStream
from octavo.errors import NumericalError, OctavoError, UsageError
from octavo.generation_request import GenerationRequest
from octavo.outputs import PoolingOutput, RequestOutput
from octavo.sampling_params import BeamSearchParams, RequestOutputKind
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.engine.constrained import GrammarCompiler


logger = logging.getLogger(__name__)


class RequestFailure(NamedTuple):
    """A request that ended without an answer, through no fault of the others."""

    request_id: str
    error: OctavoError


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine may use. max_model_len: prompt and output of one sequence, in tokens."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_outputs: int
    block_size: int
    num_blocks: int
    vocab_size: int  # columns of the logits
    enable_prefix_caching: bool = True
    max_itl_s: float = 0.0  # what a step may take while streams wait for their next token; 0: no limit


class Engine:
    """Schedules, executes, updates. The executor has its cache already."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer, limits: EngineLimits) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics(num_blocks=limits.num_blocks)
        self.scheduler = Scheduler(
            KVCacheManager(limits.num_blocks, limits.block_size, limits.enable_prefix_caching),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_outputs=limits.max_num_outputs,
            step_budget=StepBudget(limits.max_itl_s) if limits.max_itl_s else None,
        )
        max_blocks_per_seq = -(-limits.max_model_len // limits.block_size)
        self._model_runner = ModelRunner(
            executor,
            BatchBuilder(limits.max_num_seqs, max_blocks_per_seq, limits.block_size, limits.vocab_size),
        )
        self._pooling = PoolingQueue(executor, self.scheduler.kv_cache.pool, limits, self.scheduler.step_budget)
        self._output_builder = OutputBuilder(tokenizer)
        self._requests: dict[str, Request] = {}
        self._arrivals = itertools.count()
        self._grammar_lock = threading.Lock()
        self._grammar_compiler: GrammarCompiler | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._pooling)

    # --- requests ---

    def create_request(self, request_id: str, generation: GenerationRequest) -> Request:
        """A checked request, not yet queued. Safe to call from any thread.

        Raises UsageError with the numbers if it is wrong or could never fit.
        """
        limits, params, options = self.limits, generation.params, generation.options
        num_tokens = min(limits.vocab_size, self.tokenizer.vocab_size)  # either may be padded
        longest = limits.max_model_len
        if not params.is_answered:
            longest = min(longest, limits.num_blocks * limits.block_size)
        token_ids = check_prompt(
            generation.prompt_token_ids,
            num_tokens,
            longest,
            is_text=generation.prompt is not None,
            is_answered=params.is_answered,
        )
        room = limits.max_model_len - len(token_ids)
        check_params(params, num_tokens, room)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival=next(self._arrivals),
            max_total_tokens=len(token_ids) + max_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids,
            prompt=generation.prompt,
            priority=options.priority,
            cache_salt=options.cache_salt,
            bad_words_ids=find_bad_words(params.sampling, self.tokenizer, num_tokens),
            arrival_time=time.perf_counter(),
        )
        if not params.is_answered:
            return request
        self.scheduler.check_fits(request)
        self._create_sequences(request, max_tokens)
        if params.structured_outputs is not None:
            grammar = self._grammars().compile(params.structured_outputs)
            self.metrics.grammar_cache_bytes = self._grammars().cached_bytes
            for sequence in request.sequences:
                sequence.grammar = grammar.start()
        return request

    def prepare_structured_outputs(self) -> None:
        """Does ahead of the first structured output what takes half a second. Safe to call from any thread.

        Most of it holds the interpreter's lock: best done before streams are watched.
        """
        self._grammars().prepare()

    def _grammars(self) -> GrammarCompiler:
        """Made when it is first needed: it brings a library along."""
        with self._grammar_lock:
            if self._grammar_compiler is None:
                from octavo.engine.constrained import GrammarCompiler

                self._grammar_compiler = GrammarCompiler(self.tokenizer, self.limits.vocab_size)
            return self._grammar_compiler

    def _create_sequences(self, request: Request, max_tokens: int) -> None:
        params = request.params.sampling
        if isinstance(request.params, BeamSearchParams):
            request.beam_search = BeamSearch(request.params, max_tokens, request.eos_token_ids)
            request.sequences = [Sequence(request, 0, list(request.prompt_token_ids))]
            return
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request.sequences = [
            Sequence(
                request,
                index,
                list(request.prompt_token_ids),
                seed=derive_seed(seed, index),
                text_stream=TextStream(self.tokenizer, params) if params.detokenize else None,
            )
            for index in range(params.num_choices)
        ]

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises UsageError if its id is in use."""
        if not request.params.is_answered:
            self._pooling.add(request)
            return
        if request.request_id in self._requests:
            raise UsageError(
                f"request id {request.request_id!r} is in use; give each running request its own",
                param="request_id",
                code="invalid_value",
            )
        self.scheduler.add(request)
        self._requests[request.request_id] = request
        self.metrics.num_requests_total += 1
        self.metrics.num_prompt_tokens_total += request.num_prompt_tokens

    def abort(self, request_id: str) -> RequestOutput | RequestFailure | None:
        """Ends a request at once; returns what it had, with finish_reason `abort`. None: it is not here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            was_here = self._pooling.abort(request_id)
            self._measure_state()
            return RequestFailure(request_id, OctavoError(f"{request_id} was aborted")) if was_here else None
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._note_end(sequence, FinishReason.ABORT)
        self.scheduler.finish_request(request)
        self._measure_request(request)
        self._measure_state()
        output = self._output_builder.build(request, request.params.output_kind, finished=True)
        request.release()
        return output

    # --- a step ---

    def step(self) -> list[RequestOutput | PoolingOutput | RequestFailure]:
        """One step for all; returns what the requests that have news are to show.

        Prompts to embed have a step of their own after that of the others.
        """
        embedded, start = len(self._pooling) > 0, time.perf_counter()
        outputs: list[RequestOutput | PoolingOutput | RequestFailure] = [*self._generate()]
        if embedded:
            pooled = self._pooling.step(len(self.scheduler.running), time.perf_counter() - start)
            outputs += [item if isinstance(item, PoolingOutput) else RequestFailure(*item) for item in pooled]
            self._measure_state()
        return outputs

    def _generate(self) -> list[RequestOutput | RequestFailure]:
        start = time.perf_counter()
        schedule = self.scheduler.schedule()
        if not schedule.scheduled:
            if self._requests and not self._pooling:
                raise RuntimeError(f"the scheduler finds nothing to do for {len(self._requests)} requests")
            return []
        try:
            output = self._model_runner.submit(schedule).wait()
        except SamplingError as error:
            return [*self._fail_rows(schedule, error)]
        outputs = self._update(schedule, output, start)
        self._measure(schedule, time.perf_counter() - start)
        return outputs

    def _fail_rows(self, schedule: Schedule, error: SamplingError) -> list[RequestFailure]:
        """Ends the requests whose rows have no outcome. For all others the step did not happen; they repeat it."""
        row = 0
        errors: dict[Request, RowError] = {}
        for item in schedule.scheduled.values():
            for _ in range(item.num_logprob_rows + len(item.samplers)):
                if row in error.errors:
                    errors.setdefault(item.sequence.request, error.errors[row])
                row += 1
        failures: list[RequestFailure] = []
        for request, row_error in errors.items():
            failure = self._describe_failure(request, row_error)
            if isinstance(failure, NumericalError):
                self.metrics.num_corrupted_total += 1
                self.scheduler.kv_cache.quarantine(request.sequences)
                logger.error("%s", failure)
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    self._note_end(sequence, FinishReason.ERROR)
            self.scheduler.finish_request(request)
            del self._requests[request.request_id]
            self._measure_request(request)
            request.release()
            failures.append(RequestFailure(request.request_id, failure))
        num_damaged = sum(isinstance(failure.error, NumericalError) for failure in failures)
        if 1 < num_damaged == len({item.sequence.request for item in schedule.scheduled.values()}):
            logger.critical("all %d requests of a step failed: the weights in memory may be damaged", num_damaged)
        self._measure_state()
        return failures

    @staticmethod
    def _describe_failure(request: Request, row_error: RowError) -> OctavoError:
        """Whose fault it is that there is no next token: the grammar's, the numbers' or the parameters'."""
        name, params = request.request_id, request.params
        for sequence in request.sequences:
            if sequence.grammar is not None and sequence.grammar.error is not None:
                return UsageError(
                    f"{name} failed: its structured output got stuck, as no token of this model can go on in the way "
                    f"that it asks for: {sequence.grammar.error}",
                    param="structured_outputs",
                    code="invalid_grammar",
                )
        if row_error.kind is UsageError and not params.sampling.forbids_tokens:
            return NumericalError(f"{name} failed: the model finds every token impossible (all logits are -inf)")
        return row_error.kind(f"{name} failed: {row_error.reason}")

    def _update(self, schedule: Schedule, output: StepOutput, start: float) -> list[RequestOutput | RequestFailure]:
        """Takes the tokens of a step into their sequences."""
        self.scheduler.mark_computed(schedule)
        now = time.perf_counter()
        token_ids = output.token_ids.tolist()
        sampled: dict[Request, list[tuple[Sequence, int]]] = {}  # with the row of its logits
        row = 0
        for item in schedule.scheduled.values():
            request = item.sequence.request
            if not request.scheduled_time:
                request.scheduled_time = start
            num_prompt_logprobs = request.num_prompt_logprobs or 0
            for _ in range(item.num_logprob_rows):
                request.prompt_logprobs.append(self._output_builder.logprobs(output, row, num_prompt_logprobs))
                row += 1
            if item.samplers:
                rows = sampled.setdefault(request, [])
                for sampler in item.samplers:
                    rows.append((sampler, row))
                    row += 1
        for request, rows in sampled.items():
            if request.first_token_time:
                self.metrics.inter_token_s.observe(now - request.last_token_time, len(rows))
            else:
                request.first_token_time = now
            request.last_token_time = now
            request.num_generated_tokens += len(rows)
            if request.beam_search is None:
                for sequence, row in rows:
                    self._accept(sequence, token_ids[row], output, row)
            else:
                self._advance_beams(request, request.beam_search, rows, output)
        return self._collect_outputs(list(sampled))

    def _accept(self, sequence: Sequence, token_id: int, output: StepOutput, row: int) -> None:
        """One more token of a plain sequence, and perhaps its end."""
        params = sequence.request.params.sampling
        sequence.token_ids.append(token_id)
        if sequence.grammar is not None:
            sequence.grammar.accept(token_id)
        if params.logprobs is not None:
            logprobs = self._output_builder.logprobs(output, row, params.logprobs)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob += logprobs[token_id].logprob
        reason = self._find_end(sequence, token_id)
        if reason is not None:
            self._note_end(sequence, reason)
            self.scheduler.finish(sequence)

    def _find_end(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        request, params, stream = sequence.request, sequence.request.params.sampling, sequence.text_stream
        if token_id in params.stop_token_ids:
            sequence.stop_reason = token_id
            return FinishReason.STOP
        if token_id in request.eos_token_ids:
            return FinishReason.STOP
        if stream is not None and (stream.watches_text or params.output_kind is not RequestOutputKind.FINAL_ONLY):
            may_stop = sequence.num_output_tokens > params.min_tokens
            sequence.stop_reason = stream.push(_unseen(sequence), may_stop)
            if sequence.stop_reason is not None:
                return FinishReason.STOP
        if sequence.grammar is not None and sequence.grammar.is_complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.token_ids) >= request.max_total_tokens else None

    def _note_end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        key = reason.value
        self.metrics.num_finished_total[key] = self.metrics.num_finished_total.get(key, 0) + 1
        stream, params = sequence.text_stream, sequence.request.params.sampling
        if stream is None:
            return
        token_ids = _unseen(sequence)
        hides_stop = not params.include_stop_str_in_output
        if reason is FinishReason.STOP and hides_stop and token_ids:
            ends_by_token = token_ids[-1] in (*sequence.request.eos_token_ids, sequence.stop_reason)
            token_ids = token_ids[:-1] if ends_by_token else token_ids
        stream.push(token_ids)
        stream.flush()

    def _advance_beams(
        self, request: Request, search: BeamSearch, rows: list[tuple[Sequence, int]], output: StepOutput
    ) -> None:
        """All beams of a search have their candidates: the best go on in place of the old ones."""
        num_prompt_tokens = request.num_prompt_tokens
        candidates = [
            Candidate(beam, token_id, sequence.cumulative_logprob + logprob)
            for beam, (sequence, row) in enumerate(rows)
            for token_id, logprob in zip(output.top_ids[row].tolist(), output.top_logprobs[row].tolist(), strict=True)
            if token_id >= 0
        ]
        chosen = search.advance([sequence.token_ids[num_prompt_tokens:] for sequence, _ in rows], candidates)
        if search.is_finished:
            self.scheduler.finish_request(request)
            for sequence, hypothesis in zip(request.sequences, search.hypotheses, strict=False):
                self._note_end(sequence, hypothesis.finish_reason)
            return
        beams = []
        for index, (beam, token_id, cumulative_logprob) in enumerate(chosen):
            parent = rows[beam][0]
            child = Sequence(request, index, [*parent.token_ids, token_id], cumulative_logprob=cumulative_logprob)
            beams.append((parent, child))
        self.scheduler.replace_beams(request, beams)

    def _collect_outputs(self, requests: list[Request]) -> list[RequestOutput | RequestFailure]:
        outputs: list[RequestOutput | RequestFailure] = []
        for request in requests:
            kind = request.params.output_kind
            finished = request.is_finished
            if finished:
                del self._requests[request.request_id]
                self._measure_request(request)
            if finished or kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(self._output_builder.build(request, kind, finished))
            if finished:
                request.release()
        return outputs

    def _measure(self, schedule: Schedule, elapsed_s: float) -> None:
        metrics, scheduler = self.metrics, self.scheduler
        pool = scheduler.kv_cache.pool
        metrics.num_steps_total += 1
        metrics.step_s.observe(elapsed_s)
        num_tokens = self.limits.max_num_batched_tokens - schedule.num_tokens_left
        metrics.batched_tokens.observe(num_tokens)
        if scheduler.step_budget is not None:
            num_chunk_tokens = num_tokens - schedule.num_decodes
            scheduler.step_budget.observe(
                schedule.num_decodes,
                num_chunk_tokens,
                schedule.chunk_start,
                elapsed_s,
                skips_decodes=schedule.skips_decodes,
            )
        self._measure_state()
        size = self.limits.block_size
        metrics.num_allocated_slots_total += pool.num_used_blocks * size
        metrics.num_wasted_slots_total += sum(
            len(sequence.block_table) * size - sequence.num_computed_tokens for sequence in scheduler.running
        )

    def _measure_state(self) -> None:
        """What is true now, also after requests have ended between steps."""
        metrics, scheduler = self.metrics, self.scheduler
        pool = scheduler.kv_cache.pool
        metrics.num_running = len(scheduler.running)
        metrics.num_waiting = scheduler.num_waiting
        metrics.num_preemptions_total = scheduler.num_preemptions
        metrics.num_evictions_total = pool.num_evictions
        metrics.num_prefix_queries_total = scheduler.num_prefix_queries
        metrics.num_prefix_hits_total = scheduler.num_prefix_hits
        metrics.num_used_blocks = pool.num_used_blocks

    def _measure_request(self, request: Request) -> None:
        """What an ended request did, whether it was answered, aborted or failed."""
        metrics, now = self.metrics, time.perf_counter()
        scheduled, first, last = request.scheduled_time, request.first_token_time, request.last_token_time
        metrics.num_generated_tokens_total += request.num_generated_tokens
        metrics.num_cached_tokens_total += request.num_cached_tokens
        metrics.e2e_s.observe(now - request.arrival_time)
        metrics.prompt_tokens.observe(request.num_prompt_tokens)
        metrics.generated_tokens.observe(request.num_generated_tokens)
        metrics.params_n.observe(request.params.num_choices)
        if request.params.max_tokens is not None:
            metrics.params_max_tokens.observe(request.params.max_tokens)
        if scheduled:
            metrics.queue_s.observe(scheduled - request.arrival_time)
            metrics.prefill_s.observe((first or now) - scheduled)
            metrics.inference_s.observe((last or now) - scheduled)
        if first:
            metrics.time_to_first_token_s.observe(first - request.arrival_time)
            metrics.decode_s.observe(last - first)
        steps_after_first = request.num_generated_tokens / len(request.sequences) - 1
        if steps_after_first > 0:
            metrics.time_per_output_token_s.observe((last - first) / steps_after_first)


def _unseen(sequence: Sequence) -> list[int]:
    """Generated tokens whose text has not been made yet."""
    stream = sequence.text_stream
    assert stream is not None
    return sequence.token_ids[sequence.request.num_prompt_tokens + stream.num_tokens_pushed :]
