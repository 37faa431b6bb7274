"""An engine client that tells the metrics (and traces) of everything that passes through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from octavo.core.client import AnswerStream, EngineClient, EngineStatus, ModelInfo
from octavo.errors import OctavoError
from octavo.generation_request import GenerationRequest
from octavo.outputs import PoolingOutput, RequestOutput
from octavo.server.observability.metrics import RequestMeter, ServerMetrics
from octavo.server.observability.tracing import RequestSpan


class ObservedClient:
    """Another client, seen by the metrics under the name that its model is served by.

    It stands between the engine and every endpoint, so no endpoint can forget to count.
    """

    def __init__(self, client: EngineClient, metrics: ServerMetrics, model_name: str) -> None:
        self._client = client
        self._metrics = metrics
        self._model_name = model_name
        metrics.served(model_name, client)

    @property
    def info(self) -> ModelInfo:
        return self._client.info

    def status(self) -> EngineStatus:
        return self._client.status()

    async def wait_ready(self) -> None:
        await self._client.wait_ready()

    async def generate(self, request: GenerationRequest) -> AnswerStream:
        meter = self._metrics.request_started(self._model_name, request)
        tracer = self._metrics.tracer
        span = tracer.begin(self._model_name, request) if tracer is not None and request.params.is_answered else None
        try:
            stream = await self._client.generate(request)
        except BaseException as error:
            # One that the engine refuses never began: its response counts, as an error, and nothing else.
            if isinstance(error, asyncio.CancelledError):
                meter.cancelled()
            meter.close()
            if span is not None:
                span.end(meter.metrics, (), type(error).__name__)
            raise
        return ObservedStream(stream, meter, span)

    async def metrics(self) -> dict[str, object]:
        return await self._client.metrics()

    async def close(self) -> None:
        self._metrics.ended(self._model_name, self._client)
        await self._client.close()


class ObservedStream:
    """An answer on its way to the user."""

    def __init__(self, stream: AnswerStream, meter: RequestMeter, span: RequestSpan | None) -> None:
        self._stream = stream
        self._meter = meter
        self._span = span

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def __aiter__(self) -> AsyncIterator[RequestOutput | PoolingOutput]:
        return self

    async def __anext__(self) -> RequestOutput | PoolingOutput:
        try:
            output = await self._stream.__anext__()
        except OctavoError as error:
            self._meter.failed(error)
            self._end_span(type(error).__name__)
            raise
        self._meter.saw(output)
        if output.finished:
            self._end_span()
        return output

    async def aclose(self) -> None:
        self._meter.cancelled()
        self._end_span("cancelled")
        await self._stream.aclose()

    def _end_span(self, error: str | None = None) -> None:
        if self._span is not None:
            self._span.end(self._meter.metrics, self._meter.finish_reasons, error)
