"""A running request: the outputs of its prompts as events, in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.core.client import AnswerStream
from octavo.errors import EngineDeadError
from octavo.outputs import RequestMetrics, RequestOutput
from octavo.server.generation.choice import ChoiceReader
from octavo.server.generation.events import Event, Usage

if TYPE_CHECKING:
    from octavo.server.admission import Ticket

# Outputs that wait here for a slow reader; the engine's client merges what comes beyond that.
_MAX_WAITING_OUTPUTS = 4


class Generation:
    """A running request: an async iterator of `Event`s, the last of them one `Usage`.

    Raises what ended the request otherwise: an ApiError or OctavoError. One task per prompt fetches its outputs, so
    that the limits of the request apply even while nobody reads.

    request_id: the server's own. prompt_token_ids: of each prompt, as the engine got them; a conversation is one.
    num_truncated_tokens: cut off the prompts because the request asked for it. prompt_logprobs: of each prompt, as
    in `RequestOutput`; complete with the first event.
    """

    def __init__(
        self,
        ticket: Ticket,
        prompts: Sequence[Sequence[int]],
        num_truncated_tokens: int,
        streams: Sequence[AnswerStream],
        readers: Sequence[ChoiceReader],
    ) -> None:
        """prompts, streams: one per prompt. readers: one per choice; those of prompt i are i * n to i * n + n - 1."""
        self.request_id = ticket.request_id
        self.prompt_token_ids: Sequence[Sequence[int]] = prompts
        self.num_truncated_tokens = num_truncated_tokens
        self.prompt_logprobs: list[Any] = [None] * len(streams)
        self._ticket = ticket
        self._streams = streams
        self._readers = readers
        self._num_choices = len(readers) // len(streams)  # of one prompt
        self._num_running = len(streams)
        self._metrics: list[RequestMetrics] = [RequestMetrics()] * len(streams)
        self._events: deque[Event] = deque()
        self._outputs: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(_MAX_WAITING_OUTPUTS)
        self._is_over = False
        self._tasks = [asyncio.create_task(self._fetch(i, stream)) for i, stream in enumerate(streams)]

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            prompt, output = await self._outputs.get()
            if isinstance(output, Exception):
                await self.aclose()
                raise output
            self._ticket.started()
            try:
                self._read(prompt, output)
            except Exception:
                await self.aclose()
                raise
            if self._num_running == 0:
                self._events.append(self._usage())
                await self.aclose()
        return self._events.popleft()

    async def aclose(self) -> None:
        """Ends the streams that still run and returns the admission. May be called twice."""
        self._is_over = True
        running = [task for task in self._tasks if not task.done()]
        for task in running:
            task.cancel()
        self._ticket.release()
        try:
            if running:
                await asyncio.wait(running)
        finally:
            # A task that was cancelled before it began has closed nothing.
            for stream in self._streams:
                await stream.aclose()

    async def _fetch(self, prompt: int, stream: AnswerStream) -> None:
        async def forward() -> None:
            async for output in stream:
                assert isinstance(output, RequestOutput)
                await self._outputs.put((prompt, output))
                if output.finished:
                    return
            raise EngineDeadError("the engine stopped answering before the end")

        try:
            await self._ticket.wait(forward)
        except Exception as error:
            await stream.aclose()
            await self._outputs.put((prompt, error))

    def _read(self, prompt: int, output: RequestOutput) -> None:
        self._metrics[prompt] = output.metrics
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt] = output.prompt_logprobs
        for choice in output.outputs:
            self._events.extend(self._readers[prompt * self._num_choices + choice.index].push(choice))
        if output.finished:
            self._num_running -= 1

    def _usage(self) -> Usage:
        prompts = self.prompt_token_ids
        return Usage(
            num_prompt_tokens=sum(map(len, prompts)),
            num_cached_tokens=sum(metrics.num_cached_tokens for metrics in self._metrics),
            num_completion_tokens=sum(reader.num_tokens for reader in self._readers),
            num_reasoning_tokens=sum(reader.num_reasoning_tokens for reader in self._readers),
            metrics=_combine(self._metrics),
        )


def _combine(metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    """The metrics of several prompts that ran side by side: the times of the slowest, the sums of the counts."""
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
    )
