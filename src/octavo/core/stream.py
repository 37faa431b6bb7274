"""The stream of answers to one request; outputs that nobody has fetched yet are merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from octavo.errors import OctavoError
from octavo.generation_request import GenerationRequest
from octavo.outputs import CompletionOutput, Logprob, PoolingOutput, RequestOutput


class MergedStream:
    """Implements `octavo.core.client.AnswerStream`. Belongs to one event loop.

    It never holds more than one output: a slow reader costs memory for its answer's text, not for its steps.
    """

    engine = 0  # a client of several engines has streams of its own

    def __init__(self, request_id: str, request: GenerationRequest, abort: Callable[[str], None]) -> None:
        """abort: called with the id when the stream is closed before its end."""
        self._request_id = request_id
        self._prompt = request.text
        self._prompt_token_ids = list(request.prompt.token_ids)
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._abort = abort
        self._pending: RequestOutput | PoolingOutput | None = None
        self._error: OctavoError | None = None
        self._is_ended = False
        self._news = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_token_ids)

    def feed(self, output: RequestOutput | PoolingOutput) -> None:
        """Adds an output, whose lists then belong to the stream. Its fields about the prompt may be missing."""
        if self._is_ended:
            return
        if isinstance(output, RequestOutput) and isinstance(self._pending, RequestOutput):
            output = merge(self._pending, output)
        self._pending = output
        self._is_ended = output.finished
        self._news.set()

    def fail(self, error: OctavoError) -> None:
        """Ends the stream; the reader gets the earlier output, then the error."""
        if self._is_ended:
            return
        self._error = error
        self._is_ended = True
        self._news.set()

    def __aiter__(self) -> AsyncIterator[RequestOutput | PoolingOutput]:
        return self

    async def __anext__(self) -> RequestOutput | PoolingOutput:
        while self._pending is None:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._is_ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        output, self._pending = self._pending, None
        return output if isinstance(output, PoolingOutput) else self._with_prompt(output)

    async def aclose(self) -> None:
        self._pending = self._error = None
        if self._is_ended:
            return
        self._is_ended = True
        self._abort(self._request_id)
        self._news.set()

    def _with_prompt(self, output: RequestOutput) -> RequestOutput:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=output.outputs,
            finished=output.finished,
            prompt_logprobs=self._prompt_logprobs,
            metrics=output.metrics,
        )


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Merges two consecutive outputs with deltas. It takes over the lists of `first`."""
    choices = {choice.index: choice for choice in first.outputs}
    for choice in second.outputs:
        before = choices.get(choice.index)
        choices[choice.index] = choice if before is None else _join(before, choice)
    prompt_logprobs = first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs
    return replace(second, outputs=list(choices.values()), prompt_logprobs=prompt_logprobs)


def _join(before: CompletionOutput, choice: CompletionOutput) -> CompletionOutput:
    # In place: a stream that is left unread for thousands of steps must not copy its tokens at each of them.
    before.token_ids.extend(choice.token_ids)
    if before.logprobs is not None:
        before.logprobs.extend(choice.logprobs or ())
    return replace(choice, text=before.text + choice.text, token_ids=before.token_ids, logprobs=before.logprobs)
