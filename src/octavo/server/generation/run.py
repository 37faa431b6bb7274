"""Starts a request: template and tokens, a place among the running, the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.core.client import AnswerStream, GenerateRequest
from octavo.server.admission import Ticket
from octavo.server.generation.chat_plan import plan_chat
from octavo.server.generation.choice import ChoiceReader
from octavo.server.generation.naming import constraint_named
from octavo.server.generation.prompt import Params, PreparedPrompts, fit_max_tokens, prepare_chat, prepare_texts
from octavo.server.generation.running import RunningGeneration
from octavo.server.generation.spec import ChatSpec, Common, Generation, TextSpec
from octavo.server.models.served_model import ServedModel

if TYPE_CHECKING:
    from octavo.server.state import ServerState


async def start_chat(state: ServerState, model: ServedModel, spec: ChatSpec, request_id: str) -> Generation:
    """Begins to answer a conversation; returns when the engine has taken it.

    Raises UsageError (with param and code) where the request is wrong, OverloadedError where there is no room.
    """
    with _admitted(state, model, spec, request_id, num_prompts=1) as ticket:
        plan = plan_chat(model, spec)
        prompts = await ticket.wait(lambda: prepare_chat(model, spec, plan))

        def create_reader(index: int) -> ChoiceReader:
            tools = None if plan.create_tool_parser is None else plan.create_tool_parser()
            reasoning = plan.create_reasoning_parser(model.tokenizer, prompts.token_ids[0])
            return ChoiceReader(index, tools, reasoning, parallel_tool_calls=spec.parallel_tool_calls)

        readers = [create_reader(index) for index in range(num_choices(spec))]
        # With tools the only constraint is the one that makes the model call them.
        with constraint_named("tools" if spec.tools and spec.tool_choice != "none" else "structured_outputs"):
            return await _start(model, spec, plan.params, prompts, ticket, readers)


async def start_text(state: ServerState, model: ServedModel, spec: TextSpec, request_id: str) -> Generation:
    """Begins to continue texts; otherwise as `start_chat`."""
    with _admitted(state, model, spec, request_id, num_prompts=len(spec.prompts)) as ticket:
        prompts = await ticket.wait(lambda: prepare_texts(model, spec))
        readers = [ChoiceReader(i) for i in range(num_choices(spec) * len(spec.prompts))]
        return await _start(model, spec, spec.params, prompts, ticket, readers)


def num_choices(spec: Common) -> int:
    """Of each prompt."""
    return spec.params.num_choices


@contextmanager
def _admitted(
    state: ServerState, model: ServedModel, spec: Common, request_id: str, *, num_prompts: int
) -> Iterator[Ticket]:
    """A place among the running, taken before any work is done; given back if the request does not start."""
    ticket = state.admission.admit(
        model,
        request_id,
        num_sequences=num_choices(spec) * num_prompts,
        num_prompts=num_prompts,
        tenant=spec.tenant,
        priority=spec.priority,
    )
    try:
        yield ticket
    except BaseException:
        ticket.release()
        raise


async def _start(
    model: ServedModel,
    spec: Common,
    params: Params,
    prompts: PreparedPrompts,
    ticket: Ticket,
    readers: Sequence[ChoiceReader],
) -> Generation:
    params = fit_max_tokens(model, spec, params, prompts)
    ticket.add_prompt_tokens(prompts.num_tokens)
    salt = cache_salt(spec.tenant, spec.cache_salt)
    streams: list[AnswerStream] = []

    async def submit() -> None:
        for token_ids in prompts.token_ids:
            request = GenerateRequest(
                prompt_token_ids=token_ids, params=params, priority=spec.priority, cache_salt=salt
            )
            streams.append(await model.client.generate(request))

    try:
        await ticket.wait(submit)
    except BaseException:
        for stream in streams:
            await stream.aclose()
        raise
    return RunningGeneration(ticket, prompts, streams, readers)


def cache_salt(tenant: str, own_salt: str) -> str:
    """Whose prefix cache a request may share; of bounded length, whatever the request says."""
    if not tenant and not own_salt:
        return ""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{own_salt}".encode()).hexdigest()
