"""A running request: its start in the engine, and the outputs of its prompts as events, in order of arrival."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from anyio.to_thread import run_sync

from octavo.batch import Float32
from octavo.engine.client import AnswerStream
from octavo.errors import EngineDeadError, ModelLoadError, UsageError
from octavo.generation_request import GenerationRequest, Pin, PoolingParams, RequestOptions
from octavo.outputs import OutputDelta, PoolingOutput, RequestMetrics
from octavo.prompt import Prompt
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, changed
from octavo.server.admission import Ticket
from octavo.server.generation.chat_plan import AnswerFormat, plan_chat
from octavo.server.generation.documents import with_texts
from octavo.server.generation.events import ChoiceReader, Event, PromptProgress, Usage
from octavo.server.generation.infill import Infill, infill_ends
from octavo.server.generation.prompt import Prepared, find_pins, fit_max_tokens, prepare_prompts
from octavo.server.generation.spec import ChatSpec, TextSpec, constraint_named
from octavo.server.models.served_model import ServedModel

if TYPE_CHECKING:
    from octavo.server.server_state import ServerState

# Outputs that wait here for a slow reader. The engine's client merges further ones.
_MAX_WAITING_OUTPUTS = 4
# With more messages and tools than this, a conversation is planned on another thread: each takes some microseconds.
_LONG_CHAT = 64
# Maximum number of prompts of one request for vectors that the engine processes at once.
PROMPTS_AT_ONCE = 32


class Generation:
    """A running request: an async iterator of `Event`s that ends with a single `Usage`.

    Raises the ApiError or OctavoError that ended the request early. One task per prompt fetches its outputs, so that
    the request's limits apply even while nobody reads.

    request_id: the client's id or, if it sent none, the server's
    prompt_token_ids: the token ids of each prompt as passed to the engine; a conversation is a single prompt
    num_truncated_tokens: number of tokens cut off the prompts because the request asked for it
    prompt_logprobs: log-probabilities of each prompt, as in `RequestOutput`; complete once the first event has arrived
    ignored_fields: fields of the spec that have no effect on this model
    """

    def __init__(
        self,
        ticket: Ticket,
        prepared: Prepared,
        streams: Sequence[AnswerStream],
        readers: Sequence[ChoiceReader],
        ignored_fields: Sequence[str] = (),
        pins: tuple[Pin, ...] = (),
        *,
        is_followed: bool = False,
    ) -> None:
        """Initialize the generation.

        prepared, streams: one per prompt
        readers: one per choice; with n choices per prompt, prompt i has the readers i * n to i * n + n - 1
        is_followed: see `GenerationRequest`; there is at least one `PromptProgress` at the beginning and one at the end
        """
        prompts, num_truncated_tokens = prepared
        self.ignored_fields = ignored_fields
        self.request_id = ticket.request_id
        self.prompt_token_ids: Sequence[Sequence[int]] = [prompt.token_ids for prompt in prompts]
        self.num_truncated_tokens = num_truncated_tokens
        self.pins = pins
        self._num_image_tokens = sum(span.length for prompt in prompts for span in prompt.spans)
        self.prompt_logprobs: list[Any] = [None] * len(streams)
        self._ticket = ticket
        self._streams = streams
        self._readers = readers
        self._num_choices = len(readers) // len(streams)  # per prompt
        self._num_running = len(streams)
        self._metrics: list[RequestMetrics] = [RequestMetrics()] * len(streams)
        self._events: deque[Event] = deque()
        self._outputs: asyncio.Queue[tuple[int, OutputDelta | Exception]] = asyncio.Queue(_MAX_WAITING_OUTPUTS)
        self._is_over = False
        # The number of processed tokens last reported for each prompt, or None before the first report.
        self._processed: list[int | None] = [None] * len(streams) if is_followed else []
        self._tasks = [asyncio.create_task(self._fetch(i, stream)) for i, stream in enumerate(streams)]

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            prompt, output = await self._outputs.get()
            try:
                if isinstance(output, Exception):
                    raise output
                self._ticket.started()
                self._read(prompt, output)
            except Exception:
                await self.aclose()
                raise
            if self._num_running == 0:
                self._events.append(self.usage)
                await self.aclose()
        return self._events.popleft()

    async def aclose(self) -> None:
        """End the streams that are still running and release the admission. May be called twice."""
        self._is_over = True
        running = [task for task in self._tasks if not task.done()]
        for task in running:
            task.cancel()
        self._ticket.release()
        try:
            if running:
                await asyncio.wait(running)
        finally:
            # A task cancelled before it started has not closed its stream.
            for stream in self._streams:
                await stream.aclose()

    async def _fetch(self, prompt: int, stream: AnswerStream) -> None:
        async def forward() -> None:
            async for output in stream:
                assert isinstance(output, OutputDelta)
                await self._outputs.put((prompt, output))
                if output.finished:
                    return
            raise EngineDeadError("the engine stopped answering before the end")

        try:
            await self._ticket.wait(forward)
        except Exception as error:
            await stream.aclose()
            await self._outputs.put((prompt, error))

    def _read(self, prompt: int, output: OutputDelta) -> None:
        if output.metrics is not None:
            self._metrics[prompt] = output.metrics
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = output.prompt_logprobs
        if self._processed and output.metrics is not None:
            is_done = bool(output.outputs) or output.finished
            self._tell_progress(prompt, output.metrics, is_done)
        for choice in output.outputs:
            self._events.extend(self._readers[prompt * self._num_choices + choice.index].push(choice))
        if output.finished:
            self._num_running -= 1

    def _tell_progress(self, prompt: int, metrics: RequestMetrics, is_done: bool) -> None:
        """Add events for all progress that has not been reported yet. One output may need several events, because
        outputs may have been merged on their way.
        """
        total, cached = metrics.num_prompt_tokens, metrics.num_cached_tokens
        now = total if is_done else metrics.num_processed_tokens
        for processed, seconds in ((cached, 0.0), (now, metrics.prefill_s)):
            told = self._processed[prompt]
            if told is None or processed > told:
                self._processed[prompt] = processed
                index = prompt * self._num_choices
                self._events.append(PromptProgress(index, total, cached, processed, seconds))

    @property
    def usage(self) -> Usage:
        """Return the usage so far. Its metrics date from the first token or, if the request follows its progress, from
        the last output.
        """
        metrics = _combine(self._metrics)
        return Usage(
            num_prompt_tokens=sum(map(len, self.prompt_token_ids)),
            num_cached_tokens=metrics.num_cached_tokens,
            num_completion_tokens=sum(reader.num_tokens for reader in self._readers),
            num_reasoning_tokens=sum(reader.num_reasoning_tokens for reader in self._readers),
            metrics=metrics,
            num_image_tokens=self._num_image_tokens,
            pins=self.pins,
        )


async def start_generation(
    state: ServerState, model: ServedModel, spec: ChatSpec | TextSpec, request_id: str, *, is_batch: bool = False
) -> Generation:
    """Start answering a request and return when the engine has accepted it.

    is_batch: see `Admission.admit`

    Raises UsageError (with param and code) if the request is invalid, OverloadedError if there is no capacity.
    """
    model.info.texts.check(spec.params, 0)
    num_prompts = 1 if isinstance(spec, ChatSpec) else len(spec.prompts)
    ticket = state.admission.admit(
        model,
        request_id,
        num_sequences=spec.params.num_choices * num_prompts,
        num_prompts=num_prompts,
        tenant=spec.tenant,
        priority=spec.options.priority,
        is_batch=is_batch,
    )
    streams: list[AnswerStream] = []
    try:
        answer_format = AnswerFormat()
        if isinstance(spec, ChatSpec):
            chat = await ticket.wait(partial(with_texts, model, spec))
            is_long = len(chat.messages) + len(chat.tools) > _LONG_CHAT
            plan = partial(plan_chat, model, chat)
            spec, answer_format = await ticket.wait(partial(run_sync, plan)) if is_long else plan()
        prompts, num_truncated = await ticket.wait(lambda: prepare_prompts(model, spec))
        pins = await ticket.wait(partial(find_pins, model, spec, prompts))
        params = _params_of(model, spec, prompts)
        if is_batch and answer_format.is_plain:  # reporting each step's output would take time, and nobody reads it
            params = params.with_output_kind(RequestOutputKind.FINAL_ONLY)
        ticket.add_prompt_tokens(sum(map(len, prompts)))
        options = adapted(separated(spec.options, spec.tenant), model)

        async def submit() -> None:
            for prompt in prompts:
                request = GenerationRequest(
                    prompt=prompt,
                    params=params,
                    options=options,
                    pins=pins,
                    is_followed=spec.is_followed,
                    is_measured=not is_batch,
                )
                streams.append(await submit_to(model, request))

        with constraint_named(spec.constraint_field):
            await ticket.wait(submit)
        numbers = range(num_prompts * params.num_choices)
        readers = [answer_format.create_reader(index, model.tokenizer, prompts[0].token_ids) for index in numbers]
        ignored = answer_format.ignored_fields
        prepared = prompts, num_truncated
        return Generation(ticket, prepared, streams, readers, ignored, pins, is_followed=spec.is_followed)
    except BaseException:
        ticket.release()
        for stream in streams:
            await stream.aclose()
        raise


def _params_of(
    model: ServedModel, spec: ChatSpec | TextSpec, prompts: Sequence[Prompt]
) -> SamplingParams | BeamSearchParams:
    """Return the request's parameters, including the stop conditions that its model and its prompts require."""
    params = fit_max_tokens(model, spec.params, prompts)
    if not (isinstance(spec, TextSpec) and isinstance(spec.prompts[0], Infill)):
        return params
    sampling, ends = params.sampling, infill_ends(model.tokenizer)
    return changed(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))


async def compute_vectors(
    ticket: Ticket,
    model: ServedModel,
    prompts: Sequence[tuple[Prompt, PoolingParams]],
    options: RequestOptions,
) -> list[Float32]:
    """Return the vectors of prompts, computed a few at a time so that other requests can run in between.

    Raises the same errors as `start_generation`.
    """
    options = adapted(separated(options, ticket.tenant), model)
    vectors: list[Float32] = []
    for i in range(0, len(prompts), PROMPTS_AT_ONCE):
        vectors += await ticket.wait(partial(_vectors, model, prompts[i : i + PROMPTS_AT_ONCE], options))
        ticket.started()
    return vectors


async def _vectors(
    model: ServedModel, prompts: Sequence[tuple[Prompt, PoolingParams]], options: RequestOptions
) -> list[Float32]:
    async def compute(prompt: Prompt, params: PoolingParams) -> Float32:
        request = GenerationRequest(prompt=prompt, params=params, options=options)
        async with aclosing(await submit_to(model, request)) as stream:
            output = await anext(stream)
        assert isinstance(output, PoolingOutput)
        return output.vector

    tasks = [asyncio.create_task(compute(*prompt)) for prompt in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def submit_to(model: ServedModel, request: GenerationRequest) -> AnswerStream:
    """Submit a request to the model's engine. If the engine does not have the model's adapter, load the adapter first.

    The engine lacks an adapter before the adapter's first request, and after the engine has restarted.
    """
    try:
        return await model.client.generate(request)
    except UsageError as error:
        if model.adapter is None or error.code != "adapter_not_found":
            raise
    adapter = model.adapter
    try:
        await model.client.add_adapter(adapter.engine_name, str(adapter.path), adapter.scale)
    except ModelLoadError as error:
        raise UsageError(f"adapter {adapter.name!r:.100}: {error}", param="model", code="invalid_value") from error
    return await model.client.generate(request)


def adapted(options: RequestOptions, model: ServedModel) -> RequestOptions:
    """Return the options with the adapter that the model's name refers to."""
    return options if model.adapter is None else changed(options, adapter=model.adapter.engine_name)


def separated(options: RequestOptions, tenant: str) -> RequestOptions:
    """Return the options with a salt of bounded length that is unique to the tenant."""
    if not tenant and not options.cache_salt:
        return options
    salt = hashlib.sha256(f"{len(tenant)}:{tenant}{options.cache_salt}".encode()).hexdigest()
    return changed(options, cache_salt=salt)


def _combine(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    """Combine the metrics of several prompts that ran at the same time: the times of the slowest prompt, but the
    shortest time to a first token, and the sums of the counts.
    """
    if len(metrics) == 1:
        return metrics[0]
    slowest = max(metrics, key=lambda item: item.queue_s + item.prefill_s + item.decode_s)
    return replace(
        slowest,
        time_to_first_token_s=min((m.time_to_first_token_s for m in metrics if m.time_to_first_token_s), default=None),
        num_prompt_tokens=sum(item.num_prompt_tokens for item in metrics),
        num_cached_tokens=sum(item.num_cached_tokens for item in metrics),
        num_generated_tokens=sum(item.num_generated_tokens for item in metrics),
        num_preemptions=sum(item.num_preemptions for item in metrics),
        num_draft_tokens=sum(item.num_draft_tokens for item in metrics),
        num_accepted_draft_tokens=sum(item.num_accepted_draft_tokens for item in metrics),
        num_prediction_tokens=sum(item.num_prediction_tokens for item in metrics),
        num_accepted_prediction_tokens=sum(item.num_accepted_prediction_tokens for item in metrics),
    )
