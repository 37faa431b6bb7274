"""From what a request says to token ids that fit the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio.to_thread

from octavo.errors import ModelLoadError, UsageError
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.errors import ApiError
from octavo.server.generation.chat_plan import ChatPlan, plan_chat
from octavo.server.generation.spec import ChatSpec, Common, TextSpec
from octavo.server.models.served_model import ServedModel

MAX_PROMPTS = 128  # of one request

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """What the engine gets. params: those of the request, with max_tokens where the context bounds them."""

    token_ids: list[list[int]]
    params: SamplingParams | BeamSearchParams
    num_truncated_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """Texts to embed."""

    token_ids: list[list[int]]
    num_truncated_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)


async def prepare_chat(model: ServedModel, spec: ChatSpec, plan: ChatPlan) -> PreparedPrompts:
    """The prompt of a conversation. Raises as `encode_conversation`, and where it does not fit the context."""
    return _fit(model, spec, plan.params, [await _encode(model, plan)], "messages")


async def encode_conversation(model: ServedModel, spec: ChatSpec) -> list[int]:
    """Renders and tokenizes a conversation of any length. Raises UsageError naming `messages` where it does not suit
    the template."""
    return await _encode(model, plan_chat(model, spec))


async def prepare_texts(model: ServedModel, spec: TextSpec) -> PreparedPrompts:
    """Tokenizes the prompts. Raises UsageError naming `prompt` where one is empty or holds no token ids."""
    token_ids = await in_thread(lambda: [_encode_text(model, prompt) for prompt in spec.prompts])
    return _fit(model, spec, spec.params, token_ids, "prompt")


async def prepare_inputs(
    model: ServedModel, texts: Sequence[str | Sequence[int]], truncate_to: int | None
) -> PreparedInputs:
    """Tokenizes texts to embed, which may fill the context, as no answer needs room.

    truncate_to: see `Common.truncate_prompt_tokens`. Raises as `prepare_texts`.
    """
    token_ids = await in_thread(lambda: [_encode_text(model, text) for text in texts])
    limit = model.info.max_model_len
    num_before = sum(map(len, token_ids))
    if truncate_to is not None:
        room = limit if truncate_to < 0 else truncate_to
        token_ids = [_truncate(ids, room, "left") for ids in token_ids]
    longest = max(map(len, token_ids))
    if longest > limit:
        message = (
            f"the prompt has {longest} tokens, and the context of this model has {limit}: shorten it, or ask for "
            "truncate_prompt_tokens"
        )
        raise UsageError(message, param="prompt", code="context_length_exceeded")
    return PreparedInputs(token_ids, num_before - sum(map(len, token_ids)))


async def in_thread(work: Callable[[], T]) -> T:
    """Tokenizing a book takes a while; other requests go on meanwhile."""
    return await anyio.to_thread.run_sync(work)


async def _encode(model: ServedModel, plan: ChatPlan) -> list[int]:
    token_ids = await in_thread(lambda: _render(model, plan))
    if not token_ids:
        raise UsageError("the conversation renders to nothing", param="messages", code="invalid_value")
    return token_ids


def _render(model: ServedModel, plan: ChatPlan) -> list[int]:
    try:
        return model.prompts.encode_chat(plan.messages, None, **plan.template_arguments)
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


def _fit(
    model: ServedModel, spec: Common, params: SamplingParams | BeamSearchParams, prompts: list[list[int]], param: str
) -> PreparedPrompts:
    """The prompts as they fit the context, cut only where the request asks for it."""
    limit = model.info.max_model_len
    wanted = params.max_tokens
    num_before = sum(map(len, prompts))
    if spec.truncate_prompt_tokens is not None:
        room = _room(spec.truncate_prompt_tokens, None if spec.max_tokens_may_shrink else wanted, limit)
        prompts = [_truncate(ids, room, spec.truncation_side) for ids in prompts]
    longest = max(map(len, prompts))
    if longest >= limit:
        remedy = "shorten it, or ask for truncate_prompt_tokens" if spec.offers_truncation else "shorten it"
        message = (
            f"the prompt has {longest} tokens, and the context of this model has {limit} for prompt and answer; "
            f"at most {limit - 1} leave room for one token: {remedy}"
        )
        raise UsageError(message, param=param, code="context_length_exceeded")
    if wanted is not None and longest + wanted > limit:
        if not spec.max_tokens_may_shrink:
            message = (
                f"the prompt has {longest} tokens and max_tokens is {wanted}, together {longest + wanted}; the "
                f"context of this model has {limit}: lower max_tokens to {limit - longest} or shorten the prompt"
            )
            raise UsageError(message, param="max_tokens", code="context_length_exceeded")
        params = dataclasses.replace(params, max_tokens=limit - longest)
    return PreparedPrompts(prompts, params, num_before - sum(map(len, prompts)))


def _room(truncate_to: int, max_tokens: int | None, limit: int) -> int:
    """Most tokens of a truncated prompt. -1: as many as fit, beside max_tokens or a quarter of the context."""
    if truncate_to >= 0:
        return truncate_to
    return max(limit - (limit // 4 if max_tokens is None else max_tokens), 1)


def _truncate(token_ids: list[int], room: int, side: str) -> list[int]:
    if len(token_ids) <= room:
        return token_ids
    if side == "left":
        return token_ids[len(token_ids) - room :]
    head = (room + 1) // 2
    return token_ids[:head] + token_ids[len(token_ids) - (room - head) :]
