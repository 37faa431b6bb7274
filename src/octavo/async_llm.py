"""`AsyncLLM`: a model in this process, for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from octavo.config import LoadProgress
from octavo.engine.local_client import LocalClient
from octavo.generation_request import Params, Pooling, PoolingParams, PromptInput, RequestOptions
from octavo.llm import (
    LoadedLLM,
    beams_of,
    check_beams,
    embedding_output,
    in_conversation,
    open_session,
    take_options,
    token_vectors,
)
from octavo.outputs import (
    BeamSearchOutput,
    EmbeddingRequestOutput,
    OutputBuilder,
    OutputDelta,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.tokenizer.chat_template import Message


class AsyncLLM(LoadedLLM):
    """A loaded model for asyncio. Event loops in several threads can share one engine."""

    def __init__(
        self,
        model: str = "smollm2",
        *,
        load_progress: LoadProgress | None = None,
        will_chat: bool = False,
        **options: Any,
    ) -> None:
        """Load a model, with the arguments of `LLM`.

        Loading blocks: do it before the loop runs, or in `asyncio.to_thread`.
        """
        super().__init__(open_session(model, options, load_progress, will_chat=will_chat))
        self._client = LocalClient(self._session)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt: `async for output in llm.generate(...)`; each output holds the whole answer so far.

        With `output_kind` DELTA each output holds only the new part; with FINAL_ONLY there is one output. If the
        program falls behind, one output covers several steps. Closing the iterator or cancelling its task ends the
        request.

        request_id: unique among running requests.
        options: fields of `RequestOptions`, such as priority, and lora_request, a `LoRARequest`.

        Raises UsageError if the request is wrong and EngineDeadError if the engine fails.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        async with aclosing(self._outputs(prompt, params, request_id, options)) as outputs:
            async for output in outputs:
                assert isinstance(output, RequestOutput)
                yield output

    async def _outputs(
        self, prompt: PromptInput, params: Params, request_id: str | None, options: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput | PoolingOutput, None]:
        # Tokenizing a book takes long enough to delay other requests of this loop.
        known = RequestOptions(**await asyncio.to_thread(self._session.with_adapter, dict(options)))
        request = await asyncio.to_thread(self._session.describe, prompt, params, options=known)
        builder = OutputBuilder(request.params, request.prompt, request.text)
        async with aclosing(await self._client.generate(request, request_id)) as stream:
            async for item in stream:
                yield builder.add(item) if isinstance(item, OutputDelta) else item

    async def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt piece by piece: each output holds only the new part, as with `LLM.stream`."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        deltas = params.with_output_kind(RequestOutputKind.DELTA)
        async with aclosing(self.generate(prompt, deltas, **options)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self, prompt: PromptInput, params: BeamSearchParams, request_id: str | None = None, **options: Any
    ) -> BeamSearchOutput:
        """Return the most likely answers to one prompt: `sequences` are the finished beams, best first."""
        whole = check_beams(params).with_output_kind(RequestOutputKind.FINAL_ONLY)
        async with aclosing(self.generate(prompt, whole, request_id, **options)) as outputs:
            return beams_of(await anext(outputs))

    async def chat(
        self,
        messages: str | Sequence[Message],
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        **template_arguments: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation like `generate`.

        template_arguments: see `LLM.chat`.
        """
        options = take_options(template_arguments)
        prompt = await asyncio.to_thread(self._session.chat_prompt, messages, chat_template, **template_arguments)
        params = in_conversation(self.get_default_sampling_params() if sampling_params is None else sampling_params)
        async with aclosing(self.generate(prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompt: PromptInput,
        pooling: Pooling | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> EmbeddingRequestOutput:
        """Return the embedding of one text.

        pooling: see `LLM.embed`. The other arguments are as in `generate`.
        """
        params = PoolingParams(pooling=pooling)
        encoded = await asyncio.to_thread(self._session.to_prompt, prompt)
        output = await self._vector(encoded, params, request_id, options)
        return embedding_output(list(encoded.token_ids), output)

    async def token_embed(
        self, prompt: PromptInput, request_id: str | None = None, **options: Any
    ) -> PoolingRequestOutput:
        """Return an embedding for each token of one text. See `LLM.token_embed`."""
        encoded = await asyncio.to_thread(self._session.to_prompt, prompt)
        output = await self._vector(encoded, PoolingParams(task="token_embed"), request_id, options)
        return token_vectors(list(encoded.token_ids), output)

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts. See `LLM.score`."""
        plan = await asyncio.to_thread(self._session.plan_scores, data_1, data_2, truncate_prompt_tokens, instruction)
        tasks = [asyncio.create_task(self._vector(*prompt, None, options)) for prompt in plan.prompts]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        scores = plan.scores([output.vector for output in outputs])
        return [ScoringRequestOutput(ScoringOutput(score)) for score in scores]

    async def _vector(
        self, prompt: PromptInput, params: PoolingParams, request_id: str | None, options: Mapping[str, Any]
    ) -> PoolingOutput:
        async with aclosing(self._outputs(prompt, params, request_id, options)) as outputs:
            output = await anext(outputs)
        assert isinstance(output, PoolingOutput)
        return output

    def abort(self, request_id: str) -> None:
        """End a request within a step. Its iterator yields a last output with finish_reason `abort`."""
        self._session.abort(request_id)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
