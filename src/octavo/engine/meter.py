"""Counts steps and requests into the engine's metrics."""

from __future__ import annotations

import time

from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import FinishReason, Request
from octavo.engine.schedule import Schedule
from octavo.engine.scheduler import Scheduler


class Meter:
    """Writes `metrics` from the events of an engine."""

    def __init__(self, metrics: EngineMetrics, scheduler: Scheduler) -> None:
        self.metrics = metrics
        self._scheduler = scheduler

    def step(self, step: Schedule, elapsed_s: float) -> None:
        """A step has ended. elapsed_s: from the start of scheduling until its tokens were taken."""
        metrics, scheduler = self.metrics, self._scheduler
        num_tokens = scheduler.max_num_batched_tokens - step.num_tokens_left
        if step.gives_hidden_states:
            if scheduler.step_budget is not None:
                scheduler.step_budget.observe_pooled(num_tokens, step.chunk_start, elapsed_s)
        else:
            metrics.num_steps_total += 1
            metrics.step_s.observe(elapsed_s)
            metrics.batched_tokens.observe(num_tokens)
            if scheduler.step_budget is not None:
                scheduler.step_budget.observe(
                    step.num_decodes,
                    num_tokens - step.num_decodes,
                    step.chunk_start,
                    elapsed_s,
                    skips_decodes=step.skips_decodes,
                )
            self._slots()
        self.state()

    def _slots(self) -> None:
        """Slots of cache blocks, those aside that the next step has already taken."""
        cache, size = self._scheduler.kv_cache, self._scheduler.kv_cache.block_size
        num_ahead = num_wasted = 0
        for sequence in self._scheduler.running:
            num_blocks = -(-sequence.num_computed_tokens // size)
            num_ahead += sum(table.num_entries - num_blocks for table in sequence.block_tables)
            num_wasted += (num_blocks * size - sequence.num_computed_tokens) * len(sequence.block_tables)
        self.metrics.num_allocated_slots_total += (cache.pool.num_used_blocks - num_ahead) * size
        self.metrics.num_wasted_slots_total += num_wasted

    def state(self) -> None:
        """Notes what is true now, also after requests have ended between steps."""
        metrics, scheduler = self.metrics, self._scheduler
        metrics.num_running = scheduler.num_running
        metrics.num_waiting = scheduler.num_waiting
        metrics.num_embedding, metrics.num_embedding_waiting = scheduler.num_embedding
        metrics.num_preemptions_total = scheduler.num_preemptions
        metrics.num_evictions_total = scheduler.kv_cache.pool.num_evictions
        metrics.num_prefix_queries_total = scheduler.num_prefix_queries
        metrics.num_prefix_hits_total = scheduler.num_prefix_hits
        metrics.num_used_blocks = scheduler.kv_cache.pool.num_used_blocks

    def added(self, request: Request) -> None:
        if request.is_measured:
            self.metrics.num_requests_total += 1
            self.metrics.num_prompt_tokens_total += request.num_prompt_tokens

    def tokens(self, request: Request, num_accepted: int, now: float) -> None:
        """A request has got tokens in a step that ended at `now`."""
        times = request.times
        if times.first_token:
            self.metrics.inter_token_s.observe(now - times.last_token, num_accepted)
        else:
            times.first_token = now
        times.last_token = now
        request.num_generated_tokens += num_accepted

    def sequence_ended(self, reason: FinishReason) -> None:
        finished = self.metrics.num_finished_total
        finished[reason.value] = finished.get(reason.value, 0) + 1

    def request_ended(self, request: Request) -> None:
        """Counts an ended request, whether it was answered, aborted or failed."""
        if not request.is_measured:
            return
        metrics, now, times = self.metrics, time.perf_counter(), request.times
        metrics.num_generated_tokens_total += request.num_generated_tokens
        metrics.num_cached_tokens_total += request.num_cached_tokens
        metrics.e2e_s.observe(now - times.arrival)
        metrics.prompt_tokens.observe(request.num_prompt_tokens)
        metrics.generated_tokens.observe(request.num_generated_tokens)
        metrics.computed_tokens.observe(request.num_prompt_tokens - request.num_cached_tokens)
        metrics.longest_choice.observe(max([sequence.num_output_tokens for sequence in request.sequences], default=0))
        metrics.preemptions.observe(request.num_preemptions)
        metrics.params_n.observe(request.params.num_choices)
        if request.params.max_tokens is not None:
            metrics.params_max_tokens.observe(request.params.max_tokens)
        if times.scheduled:
            metrics.queue_s.observe(times.queue_s)
            metrics.prefill_s.observe((times.first_token or now) - times.scheduled)
            metrics.inference_s.observe((times.last_token or now) - times.scheduled)
        if times.time_to_first_token_s is not None:
            metrics.time_to_first_token_s.observe(times.time_to_first_token_s)
            metrics.decode_s.observe(times.decode_s)
        steps_after_first = request.num_generated_tokens / sum(len(group.members) for group in request.groups) - 1
        if steps_after_first > 0:
            metrics.time_per_output_token_s.observe(times.decode_s / steps_after_first)
