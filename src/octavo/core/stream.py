"""The answer to one request as a client sees it: what is new, merged while nobody fetches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from octavo.errors import OctavoError
from octavo.outputs import CompletionOutput, RequestOutput


class MergedStream:
    """Implements `octavo.core.client.AnswerStream`. Belongs to one event loop.

    It never holds more than one output: a slow reader costs the memory of its answer's text, not of its steps.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        """abort: called with the id when the stream is closed before its end."""
        self._request_id = request_id
        self._abort = abort
        self._pending: RequestOutput | None = None
        self._error: OctavoError | None = None
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def request_id(self) -> str:
        return self._request_id

    def feed(self, output: RequestOutput) -> None:
        """Takes what is new; its lists belong to the stream from now on."""
        if self._is_ended:
            return
        self._pending = output if self._pending is None else merge(self._pending, output)
        self._is_ended = output.finished
        self._wake()

    def fail(self, error: OctavoError) -> None:
        """Ends the stream; the reader gets what came before, then the error."""
        if self._is_ended:
            return
        self._error = error
        self._is_ended = True
        self._wake()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._pending is None:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._pending = self._pending, None
        return output

    async def aclose(self) -> None:
        self._pending = self._error = None
        if self._is_ended:
            return
        self._is_ended = True
        self._abort(self._request_id)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs with deltas, one after the other, as one. Takes over the lists of `first`."""
    choices = {choice.index: choice for choice in first.outputs}
    for choice in second.outputs:
        before = choices.get(choice.index)
        choices[choice.index] = choice if before is None else _join(before, choice)
    return replace(second, outputs=list(choices.values()))


def _join(before: CompletionOutput, choice: CompletionOutput) -> CompletionOutput:
    # In place: a stream that is left unread for thousands of steps must not copy its tokens at each of them.
    before.token_ids.extend(choice.token_ids)
    if before.logprobs is not None:
        before.logprobs.extend(choice.logprobs or ())
    return replace(choice, text=before.text + choice.text, token_ids=before.token_ids, logprobs=before.logprobs)
