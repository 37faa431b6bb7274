"""Starts a request: admission, chat template, tokens, engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.batch import Float32
from octavo.core.client import AnswerStream
from octavo.generation_request import GenerationRequest, Pooling, PoolingParams, RequestOptions
from octavo.outputs import PoolingOutput
from octavo.server.admission import Ticket
from octavo.server.generation.chat_plan import plan_chat
from octavo.server.generation.choice import ChoiceReader
from octavo.server.generation.prompt import fit_max_tokens, prepare_chat, prepare_texts
from octavo.server.generation.running import Generation
from octavo.server.generation.spec import ChatSpec, Common, TextSpec, constraint_named
from octavo.server.models.served_model import ServedModel

if TYPE_CHECKING:
    from octavo.server.state import ServerState


async def start_chat(state: ServerState, model: ServedModel, spec: ChatSpec, request_id: str) -> Generation:
    """Starts to answer a conversation; returns when the engine has accepted it.

    Raises UsageError (with param and code) if the request is invalid, OverloadedError if there is no capacity.
    """
    with _admitted(state, model, spec, request_id, num_prompts=1) as ticket:
        adapted, answer_format = plan_chat(model, spec)
        prompts, num_truncated = await ticket.wait(lambda: prepare_chat(model, adapted))
        readers = [
            answer_format.create_reader(index, spec, model.tokenizer, prompts[0])
            for index in range(spec.params.num_choices)
        ]
        # With tools the only constraint is the one that makes the model call them.
        with constraint_named("tools" if spec.tools and spec.tool_choice != "none" else spec.constraint_field):
            return await _start(model, adapted, prompts, num_truncated, ticket, readers)


async def start_text(state: ServerState, model: ServedModel, spec: TextSpec, request_id: str) -> Generation:
    """Starts to continue texts; otherwise like `start_chat`."""
    with _admitted(state, model, spec, request_id, num_prompts=len(spec.prompts)) as ticket:
        prompts, num_truncated = await ticket.wait(lambda: prepare_texts(model, spec))
        readers = [ChoiceReader(i) for i in range(spec.params.num_choices * len(spec.prompts))]
        with constraint_named(spec.constraint_field):
            return await _start(model, spec, prompts, num_truncated, ticket, readers)


async def embed(
    model: ServedModel, prompts: Sequence[Sequence[int]], pooling: Pooling, options: RequestOptions
) -> list[Float32]:
    """The vectors of prompts, [hidden_size] each, computed side by side. Raises the errors of `start_chat`."""
    params = PoolingParams(pooling=pooling)

    async def embed_one(token_ids: Sequence[int]) -> Float32:
        request = GenerationRequest(prompt_token_ids=token_ids, params=params, options=options)
        async with aclosing(await model.client.generate(request)) as stream:
            output = await anext(stream)
        assert isinstance(output, PoolingOutput)
        return output.vector

    tasks = [asyncio.create_task(embed_one(token_ids)) for token_ids in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def _admitted(
    state: ServerState, model: ServedModel, spec: Common, request_id: str, *, num_prompts: int
) -> Iterator[Ticket]:
    """The admission of a request, before any work is done. It is returned if the request does not start."""
    ticket = state.admission.admit(
        model,
        request_id,
        num_sequences=spec.params.num_choices * num_prompts,
        num_prompts=num_prompts,
        tenant=spec.tenant,
        priority=spec.options.priority,
    )
    try:
        yield ticket
    except BaseException:
        ticket.release()
        raise


async def _start(
    model: ServedModel,
    spec: Common,
    prompts: Sequence[Sequence[int]],
    num_truncated: int,
    ticket: Ticket,
    readers: Sequence[ChoiceReader],
) -> Generation:
    params = fit_max_tokens(model, spec, prompts)
    ticket.add_prompt_tokens(sum(map(len, prompts)))
    options = separated(spec.options, spec.tenant)
    streams: list[AnswerStream] = []

    async def submit() -> None:
        for token_ids in prompts:
            request = GenerationRequest(prompt_token_ids=token_ids, params=params, options=options)
            streams.append(await model.client.generate(request))

    try:
        await ticket.wait(submit)
    except BaseException:
        for stream in streams:
            await stream.aclose()
        raise
    return Generation(ticket, prompts, num_truncated, streams, readers)


def separated(options: RequestOptions, tenant: str) -> RequestOptions:
    """The options with a salt of bounded length that no other tenant has."""
    if not tenant and not options.cache_salt:
        return options
    salt = hashlib.sha256(f"{len(tenant)}:{tenant}{options.cache_salt}".encode()).hexdigest()
    return replace(options, cache_salt=salt)
