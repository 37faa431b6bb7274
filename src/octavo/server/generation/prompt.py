"""Turns the prompt of a request into token ids that fit the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import anyio.to_thread

from octavo.errors import ModelLoadError, UsageError
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.errors import ApiError
from octavo.server.generation.chat_plan import plan_chat
from octavo.server.generation.spec import ChatSpec, Common, TextSpec
from octavo.server.models.served_model import ServedModel

MAX_PROMPTS = 128  # of one request

T = TypeVar("T")
Prepared: TypeAlias = tuple[list[list[int]], int]
"""Prompts, or texts to embed, each of which fits the context, and how many tokens were cut off them."""


async def prepare_chat(model: ServedModel, spec: ChatSpec) -> Prepared:
    """The prompt of a conversation that `plan_chat` has adapted.

    Raises the errors of `encode_conversation`, and UsageError if it does not fit the context.
    """
    return _fit_answered(model, spec, [await _encode(model, spec)], "messages")


async def encode_conversation(model: ServedModel, spec: ChatSpec) -> list[int]:
    """Renders and tokenizes a conversation of any length. Raises UsageError naming `messages` if the template does
    not accept it."""
    return await _encode(model, plan_chat(model, spec)[0])


async def prepare_texts(model: ServedModel, spec: TextSpec) -> Prepared:
    """Tokenizes the prompts. Raises UsageError naming `prompt` if one is empty or has invalid token ids."""
    token_ids = await in_thread(lambda: [_encode_text(model, prompt) for prompt in spec.prompts])
    return _fit_answered(model, spec, token_ids, "prompt")


async def prepare_inputs(model: ServedModel, texts: Sequence[str | Sequence[int]], truncate_to: int | None) -> Prepared:
    """Tokenizes texts to embed, which may fill the context because no answer follows.

    truncate_to: see `Common.truncate_prompt_tokens`. Raises the errors of `prepare_texts`.
    """
    token_ids = await in_thread(lambda: [_encode_text(model, text) for text in texts])
    limit = model.info.max_model_len
    return _fit(token_ids, limit, room=limit if truncate_to == -1 else truncate_to, num_answer_tokens=0)


def fit_max_tokens(
    model: ServedModel, spec: Common, prompts: Sequence[Sequence[int]]
) -> SamplingParams | BeamSearchParams:
    """The parameters with max_tokens limited by the context. Raises UsageError naming `max_tokens` if the request
    asks for more than the context has left."""
    limit, wanted = model.info.max_model_len, spec.params.max_tokens
    longest = max(map(len, prompts))
    if wanted is None or longest + wanted <= limit:
        return spec.params
    if not spec.max_tokens_may_shrink:
        message = (
            f"the prompt has {longest} tokens and max_tokens is {wanted}, together {longest + wanted}; the "
            f"context of this model has {limit}: lower max_tokens to {limit - longest} or shorten the prompt"
        )
        raise UsageError(message, param="max_tokens", code="context_length_exceeded")
    return dataclasses.replace(spec.params, max_tokens=limit - longest)


async def in_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a thread, because tokenizing a book takes a while and other requests must go on."""
    return await anyio.to_thread.run_sync(work)


async def _encode(model: ServedModel, adapted: ChatSpec) -> list[int]:
    token_ids = await in_thread(lambda: _render(model, adapted))
    if not token_ids:
        raise UsageError("the conversation renders to nothing", param="messages", code="invalid_value")
    return token_ids


def _render(model: ServedModel, adapted: ChatSpec) -> list[int]:
    try:
        return model.prompts.encode_chat(adapted.messages, None, **adapted.template_arguments)
    except UsageError as error:
        raise UsageError(str(error), param="messages", code=error.code or "invalid_value") from None
    except ModelLoadError as error:
        # The model's template is at fault, not the request.
        raise ApiError(500, f"the conversation cannot be rendered: {error}", code="internal_error") from error


def _encode_text(model: ServedModel, prompt: str | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        bos = model.tokenizer.bos_token_id
        token_ids = model.prompts.encode(prompt) or ([] if bos is None else [bos])
        if not token_ids:
            message = "prompt is empty, and this model has no token that begins a text; give at least one character"
            raise UsageError(message, param="prompt", code="invalid_value")
        return token_ids
    if not prompt:
        raise UsageError("prompt holds an empty list of token ids", param="prompt", code="empty_array")
    vocab_size = model.tokenizer.vocab_size
    wrong = next((item for item in prompt if not 0 <= item < vocab_size), None)
    if wrong is not None:
        message = f"prompt holds token id {wrong:.20g}; this model has ids 0 to {vocab_size - 1}"
        raise UsageError(message, param="prompt", code="token_out_of_range")
    return list(prompt)


def _fit_answered(model: ServedModel, spec: Common, prompts: list[list[int]], param: str) -> Prepared:
    limit = model.info.max_model_len
    room = spec.truncate_prompt_tokens
    if room == -1:  # the context without an answer of max_tokens, or three quarters of it
        wanted = None if spec.max_tokens_may_shrink else spec.params.max_tokens
        room = max(limit - (limit // 4 if wanted is None else wanted), 1)
    remedy = "shorten it, or ask for truncate_prompt_tokens" if spec.offers_truncation else "shorten it"
    return _fit(prompts, limit, room=room, side=spec.truncation_side, num_answer_tokens=1, param=param, remedy=remedy)


def _fit(
    prompts: list[list[int]],
    limit: int,
    *,
    room: int | None,
    num_answer_tokens: int,
    side: str = "left",
    param: str = "prompt",
    remedy: str = "shorten it, or ask for truncate_prompt_tokens",
) -> Prepared:
    """The prompts fitted to a context of `limit` tokens, and truncated to `room` tokens if that is given.

    num_answer_tokens: tokens that must fit after each prompt: 1, or 0 for texts to embed.
    """
    num_before = sum(map(len, prompts))
    if room is not None:
        prompts = [_truncate(ids, room, side) for ids in prompts]
    longest = max(map(len, prompts))
    if longest + num_answer_tokens > limit:
        of_answer = f" for prompt and answer; at most {limit - 1} leave room for one token" if num_answer_tokens else ""
        message = f"the prompt has {longest} tokens, and the context of this model has {limit}{of_answer}: {remedy}"
        raise UsageError(message, param=param, code="context_length_exceeded")
    return prompts, num_before - sum(map(len, prompts))


def _truncate(token_ids: list[int], room: int, side: str) -> list[int]:
    if len(token_ids) <= room:
        return token_ids
    if side == "left":
        return token_ids[len(token_ids) - room :]
    head = (room + 1) // 2
    return token_ids[:head] + token_ids[len(token_ids) - (room - head) :]
