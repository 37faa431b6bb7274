"""The stream of outputs of one request. Outputs that have not been fetched yet are merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from octavo.errors import OctavoError
from octavo.generation_request import GenerationRequest
from octavo.outputs import OutputDelta, PoolingOutput


class MergedStream:
    """Implements `octavo.engine.client.AnswerStream`. Belongs to one event loop.

    It never holds more than one output, so a slow reader costs only the memory for its text.
    """

    engine = 0  # a client of several engines has its own streams

    def __init__(self, request_id: str, request: GenerationRequest, abort: Callable[[str], None]) -> None:
        """abort: called with the request's id if the stream is closed before the answer is complete."""
        self._request_id = request_id
        self.num_prompt_tokens = len(request.prompt)
        self._abort = abort
        self._pending: OutputDelta | PoolingOutput | None = None
        self._error: OctavoError | None = None
        self._is_ended = False
        self._news = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self._request_id

    def feed(self, output: OutputDelta | PoolingOutput) -> None:
        """Add an output, whose lists then belong to the stream."""
        if self._is_ended:
            return
        if isinstance(output, OutputDelta) and isinstance(self._pending, OutputDelta):
            self._pending.add(output)
        else:
            self._pending = output
        self._is_ended = output.finished
        self._news.set()

    def fail(self, error: OctavoError) -> None:
        """End the stream; the reader gets the earlier output, then the error."""
        if self._is_ended:
            return
        self._error = error
        self._is_ended = True
        self._news.set()

    def __aiter__(self) -> AsyncIterator[OutputDelta | PoolingOutput]:
        return self

    async def __anext__(self) -> OutputDelta | PoolingOutput:
        while self._pending is None:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        output, self._pending = self._pending, None
        return output

    async def aclose(self) -> None:
        self._pending = self._error = None
        if self._is_ended:
            return
        self._is_ended = True
        self._abort(self._request_id)
        self._news.set()
