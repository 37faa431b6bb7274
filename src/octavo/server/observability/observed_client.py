"""An engine client that reports every request to metrics and traces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import zip_longest

from octavo.engine.client import AnswerStream, EngineClient, EngineReplica, EngineStatus, ModelInfo
from octavo.engine.metrics import EngineMetrics
from octavo.engine.slots import SlotAction, SlotReport
from octavo.errors import NumericalError, OctavoError
from octavo.generation_request import GenerationRequest
from octavo.outputs import OutputDelta, PoolingOutput, RequestMetrics
from octavo.server.observability.metrics import (
    FINISHED_REASONS,
    AdapterFigures,
    CancelPhase,
    ModelFigures,
    ServerMetrics,
)
from octavo.server.observability.tracing import RequestSpan


class ObservedClient:
    """A wrapper that reports another client's requests under the name of its served model.

    All endpoints reach the engine through it, so no endpoint can forget to count.
    """

    def __init__(self, client: EngineClient, metrics: ServerMetrics, model_name: str) -> None:
        self._client = client
        self._metrics, self._tracer = metrics, metrics.tracer
        self._model_name = model_name
        self._figures = metrics.models.setdefault(model_name, [])
        self._figures += [ModelFigures() for _ in range(len(self._figures), len(client.replicas))]
        self._serve(client.replicas)

    @property
    def replicas(self) -> Sequence[EngineReplica]:
        return self._client.replicas

    @property
    def info(self) -> ModelInfo:
        return self._client.info

    def status(self) -> EngineStatus:
        return self._client.status()

    async def wait_ready(self) -> None:
        await self._client.wait_ready()

    async def metrics(self) -> EngineMetrics:
        return await self._client.metrics()

    async def restart(self) -> None:
        await self._client.restart()

    async def sleep(self) -> None:
        await self._client.sleep()

    async def wake_up(self) -> None:
        await self._client.wake_up()

    async def act_on_slot(self, action: SlotAction) -> SlotReport:
        return await self._client.act_on_slot(action)

    async def add_adapter(self, name: str, path: str, scale: float) -> None:
        await self._client.add_adapter(name, path, scale)
        self._metrics.adapter(name).num_loads += 1

    async def remove_adapter(self, name: str) -> None:
        await self._client.remove_adapter(name)

    async def generate(self, request: GenerationRequest) -> AnswerStream:
        is_answered = request.params.is_answered
        span = self._tracer.begin(self._model_name, request) if self._tracer is not None and is_answered else None
        answer = ObservedStream(self._figures, span, is_answered=is_answered)
        if request.options.adapter:
            answer.adapter = self._metrics.adapter(request.options.adapter)
            answer.adapter.num_running += 1
        try:
            answer.stream = await self._client.generate(request)
        except BaseException as error:
            # A request that the engine refuses never began. Only its response counts, as an error.
            if isinstance(error, asyncio.CancelledError):
                answer.count_cancelled()
            answer.end(type(error).__name__)
            raise
        return answer

    async def close(self) -> None:
        if self._figures[0].client is self._client.replicas[0]:  # otherwise another client has taken over
            self._serve([])
        await self._client.close()

    def _serve(self, replicas: Sequence[EngineReplica]) -> None:
        for figures, replica in zip_longest(self._figures, replicas):
            figures.serve(replica)


class ObservedStream:
    """The stream of an answer, counted in metrics and traces while it is read.

    stream: the engine's stream, once it has accepted the request
    """

    stream: AnswerStream | None = None
    adapter: AdapterFigures | None = None

    def __init__(self, all_figures: Sequence[ModelFigures], span: RequestSpan | None, *, is_answered: bool) -> None:
        """Start counting a request.

        all_figures: figures of each replica
        is_answered: False for a text to embed, which counts as running only while the engine processes it
        """
        self._all_figures = all_figures
        self._span = span
        self._is_answered = is_answered
        self._reasons: dict[int, str] = {}  # by choice
        self._metrics = RequestMetrics()
        self._phase: CancelPhase = "prefill"
        self._has_ended = False

    @property
    def request_id(self) -> str:
        assert self.stream is not None
        return self.stream.request_id

    @property
    def engine(self) -> int:
        return self.stream.engine if self.stream is not None else 0

    @property
    def _figures(self) -> ModelFigures:
        return self._all_figures[self.engine]

    def __aiter__(self) -> AsyncIterator[OutputDelta | PoolingOutput]:
        return self

    async def __anext__(self) -> OutputDelta | PoolingOutput:
        assert self.stream is not None
        try:
            output = await self.stream.__anext__()
        except OctavoError as error:
            if self._is_answered and not self._has_ended:
                self._figures.finished["error"] += 1
                self._figures.num_corrupted += isinstance(error, NumericalError)
            self.end(type(error).__name__)
            raise
        if isinstance(output, OutputDelta):
            self._count(output)
        if output.finished:
            self.end()
        return output

    async def aclose(self) -> None:
        self.count_cancelled()
        self.end("cancelled")
        assert self.stream is not None
        await self.stream.aclose()

    def count_cancelled(self) -> None:
        """Count a cancellation: the client disconnected, the request was cancelled, or its time limit expired."""
        if self._is_answered and not self._has_ended:
            self._figures.cancelled[self._phase] += 1
            self._figures.finished["abort"] += 1

    def end(self, error: str | None = None) -> None:
        """Stop counting the request. May be called twice.

        error: the reason why the answer is incomplete
        """
        if not self._has_ended and self._span is not None:
            self._span.end(self._metrics, [self._reasons[index] for index in sorted(self._reasons)], error)
        if not self._has_ended and self.adapter is not None:
            self.adapter.num_running -= 1
            self.adapter.num_requests += self.stream is not None
        self._has_ended = True

    def _count(self, output: OutputDelta) -> None:
        figures = self._figures
        if output.metrics is not None:
            self._metrics = output.metrics
        num_new = sum(len(choice.token_ids) for choice in output.outputs)
        if num_new and self._phase == "prefill":
            self._phase = "decode"
            figures.num_prompt_tokens += self._metrics.num_prompt_tokens
            figures.num_cached_tokens += self._metrics.num_cached_tokens
            figures.num_loaded_tokens += self._metrics.num_loaded_tokens
        figures.num_generated_tokens += num_new
        self._reasons |= {choice.index: choice.finish_reason for choice in output.outputs if choice.finish_reason}
        if output.finished and not self._has_ended:
            for reason in self._reasons.values():
                figures.finished[reason if reason in FINISHED_REASONS else "stop"] += 1
