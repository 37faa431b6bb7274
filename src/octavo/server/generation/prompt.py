"""Turns the prompt of a request into token ids that fit the context.

Tokenizing a book takes a while and other requests must go on, so it runs in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from anyio.to_thread import run_sync

from octavo.errors import ModelLoadError, UsageError
from octavo.prompt import Prompt
from octavo.sampling_params import BeamSearchParams, SamplingParams, changed
from octavo.server.errors import ApiError
from octavo.server.generation.chat_plan import plan_chat
from octavo.server.generation.content import check_readable
from octavo.server.generation.infill import Infill, encode_infill
from octavo.server.generation.spec import ChatSpec, TextOrIds, TextSpec
from octavo.server.generation.tool_messages import with_objects
from octavo.server.models.served_model import ServedModel
from octavo.tokenizer.chat_template import Message
from octavo.tokenizer.turns import fit_turns

T = TypeVar("T")

MAX_PROMPTS = 128  # of one request

Prepared: TypeAlias = tuple[list[Prompt], int]
"""Prompts, or texts to embed, each of which fits the context, and how many tokens were cut off them."""


async def prepare_prompts(model: ServedModel, spec: ChatSpec | TextSpec) -> Prepared:
    """The prompts of a request; a conversation, which `plan_chat` has adapted, is one.

    Raises UsageError naming `messages` or `prompt` if one is invalid or does not fit the context.
    """
    limit, room = model.info.max_model_len, spec.truncate_prompt_tokens
    if room == -1:  # the context without an answer of max_tokens, or three quarters of it
        wanted = spec.params.max_tokens
        room = limit - (limit // 4 if wanted is None or wanted >= limit else wanted)
    dropped = 0
    if isinstance(spec, ChatSpec):
        trims = spec.truncation_side == "turns" and room is not None
        conversation, dropped = await _encode_chat(model, spec, room if trims else None)
        prompts, param = [conversation], "messages"
    else:
        check_readable(spec.media, model.name)
        prompts, param = await _encode_texts(model, spec.prompts), "prompt"
    prompts, num_truncated = _truncated(prompts, room, spec.truncation_side)
    num_truncated += dropped
    if (longest := max(map(len, prompts))) >= limit:
        message = (
            f"the prompt has {longest} tokens, and the context of this model has {limit} for prompt and answer; "
            f"at most {limit - 1} leave room for one token: shorten it"
        )
        # A conversation that is cut at a token is none.
        remedy = "" if isinstance(spec, ChatSpec) else ", or ask for truncate_prompt_tokens"
        raise UsageError(message + remedy, param=param, code="context_length_exceeded")
    return prompts, num_truncated


async def prepare_inputs(
    model: ServedModel, texts: Sequence[str | Sequence[int | str]], truncate_to: int | None, side: str = "left"
) -> Prepared:
    """Tokenizes texts to embed, which may fill the context because no answer follows.

    truncate_to, side: see `Common.truncate_prompt_tokens`. Raises the errors of `prepare_prompts`.
    """
    limit = model.info.max_model_len
    room = limit if truncate_to == -1 else truncate_to
    prompts, num_truncated = _truncated(await _encode_texts(model, texts), room, side)
    if (longest := max(map(len, prompts))) > limit:
        message = (
            f"the prompt has {longest} tokens, and the context of this model has {limit}: "
            "shorten it, or ask for truncate_prompt_tokens"
        )
        raise UsageError(message, param="prompt", code="context_length_exceeded")
    return prompts, num_truncated


async def encode_conversation(model: ServedModel, spec: ChatSpec) -> Prompt:
    """Renders and tokenizes a conversation of any length. Raises UsageError naming `messages` if the template does
    not accept it."""
    return (await _encode_chat(model, plan_chat(model, spec)[0], None))[0]


def fit_max_tokens(
    model: ServedModel, params: SamplingParams | BeamSearchParams, prompts: Sequence[Prompt]
) -> SamplingParams | BeamSearchParams:
    """The parameters with max_tokens cut to what the context has left."""
    left = model.info.max_model_len - max(map(len, prompts))
    is_cut = params.max_tokens is not None and params.max_tokens > left
    return changed(params, max_tokens=left) if is_cut else params


async def render_conversation(model: ServedModel, spec: ChatSpec) -> str:
    """The text of a conversation of any length, with the errors of `encode_conversation`."""
    adapted = plan_chat(model, spec)[0]
    with _template_errors():

        def render(messages: Sequence[Message]) -> str:
            return model.prompts.render_chat(messages, **adapted.template_arguments)

        return await run_sync(_with_readable_arguments, render, adapted.messages)


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error), param="messages", code=error.code or "invalid_value") from None
    except ModelLoadError as error:
        # The model's template is at fault, not the request.
        raise ApiError(500, f"the conversation cannot be rendered: {error}", code="internal_error") from error


def _with_readable_arguments(render: Callable[[Sequence[Message]], T], messages: Sequence[Message]) -> T:
    """The result of `render`. If their template takes no text as the arguments of a call, such as those
    that were cut off, they become objects. Raises the errors of `render`."""
    try:
        return render(messages)
    except UsageError as error:
        if (objects := with_objects(messages)) is None:
            raise
        try:
            return render(objects)
        except UsageError:
            raise error from None


async def _encode_chat(model: ServedModel, adapted: ChatSpec, room: int | None) -> tuple[Prompt, int]:
    """The prompt, and the tokens of the turns that were left out so that it has at most `room` tokens."""
    sizes: list[int] = []

    def encode_exactly(messages: Sequence[Message]) -> list[int]:
        return model.prompts.encode_chat(messages, None, **adapted.template_arguments)

    def encode(messages: Sequence[Message]) -> Prompt:
        prompt = Prompt(_with_readable_arguments(encode_exactly, messages))
        sizes.append(len(prompt))
        return prompt

    with _template_errors():
        if room is None:
            prompt = await run_sync(lambda: encode(adapted.messages))
        else:
            prompt, _ = await run_sync(lambda: fit_turns(adapted.messages, encode, room))
    if not prompt:
        raise UsageError("the conversation renders to nothing", param="messages", code="invalid_value")
    if adapted.earlier_token_ids:
        _check_ids(model, adapted.earlier_token_ids, "context")
        bos = model.tokenizer.prefix_ids
        own = prompt.without(0, len(bos)) if prompt.token_ids[: len(bos)] == bos else prompt
        return own.after(adapted.earlier_token_ids), 0
    return prompt, sizes[0] - len(prompt)


async def _encode_texts(model: ServedModel, texts: Sequence[TextOrIds]) -> list[Prompt]:
    return await run_sync(lambda: [Prompt(_encode_text(model, text)) for text in texts])


def _encode_text(model: ServedModel, prompt: TextOrIds) -> list[int]:
    if isinstance(prompt, Infill):
        return encode_infill(model.tokenizer, prompt)
    if isinstance(prompt, str):
        bos = model.tokenizer.bos_token_id
        token_ids = model.prompts.encode(prompt) or ([] if bos is None else [bos])
        if not token_ids:
            message = "prompt is empty, and this model has no token that begins a text; give at least one character"
            raise UsageError(message, param="prompt", code="invalid_value")
        return token_ids
    if not prompt:
        raise UsageError("prompt holds an empty list of token ids", param="prompt", code="empty_array")
    if any(isinstance(item, str) for item in prompt):
        return _encode_pieces(model, prompt)
    ids: Sequence[Any] = prompt
    _check_ids(model, ids, "prompt")
    return list(ids)


def _encode_pieces(model: ServedModel, pieces: Sequence[int | str]) -> list[int]:
    """Texts and token ids in a row, as one prompt. BOS comes before a text at the start, if the model wants it."""
    token_ids: list[int] = [] if isinstance(pieces[0], int) else [*model.tokenizer.prefix_ids]
    for piece in pieces:
        if isinstance(piece, str):
            token_ids += model.tokenizer.encode(piece, add_special_tokens=False, parse_special=True)
        else:
            token_ids.append(piece)
    _check_ids(model, token_ids, "prompt")
    return token_ids


def _check_ids(model: ServedModel, token_ids: Sequence[Any], param: str) -> None:
    vocab_size = model.tokenizer.vocab_size
    wrong = next((item for item in token_ids if not 0 <= item < vocab_size), None)
    if wrong is not None:
        message = f"{param} holds token id {wrong:.20g}; this model has ids 0 to {vocab_size - 1}"
        raise UsageError(message, param=param, code="token_out_of_range")


def _truncated(prompts: list[Prompt], room: int | None, side: str) -> Prepared:
    """The prompts cut to `room` tokens each, if that is given, and how many tokens were cut off."""
    kept = prompts if room is None else [_truncate(prompt, room, side) for prompt in prompts]
    return kept, sum(map(len, prompts)) - sum(map(len, kept))


def _truncate(prompt: Prompt, room: int, side: str) -> Prompt:
    if len(prompt) <= room:
        return prompt
    head = {"left": 0, "right": room}.get(side, (room + 1) // 2)
    return prompt.without(head, len(prompt) - (room - head))
