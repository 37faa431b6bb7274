"""Turns a request's prompt into token ids that fit the context.

Tokenizing a very long text takes a while. To let other requests go on, this happens in a thread, one long text at a
time. A prompt that cannot fit is refused as soon as its length or its first pieces show this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from octavo.engine.texts.placing import prompt_of
from octavo.errors import ModelLoadError, UsageError
from octavo.generation_request import Pin
from octavo.prompt import Prompt
from octavo.sampling_params import BeamSearchParams, SamplingParams, changed
from octavo.server.errors import ApiError
from octavo.server.generation.chat_plan import plan_chat
from octavo.server.generation.content import ImagePlan, Media, MessageContent, text_of
from octavo.server.generation.documents import with_texts
from octavo.server.generation.infill import Infill, encode_infill
from octavo.server.generation.placed_images import PlacedImages
from octavo.server.generation.spec import Breakpoint, ChatSpec, TextOrIds, TextSpec
from octavo.server.generation.tool_messages import with_objects
from octavo.server.models.image_reader import ImageSource, image_processor
from octavo.server.models.served_model import ServedModel
from octavo.tokenizer.chat_template import Message
from octavo.tokenizer.text_pieces import PIECE_CHARS
from octavo.tokenizer.tokenizer import TooManyTokensError
from octavo.tokenizer.turns import fit_turns

T = TypeVar("T")

MAX_PROMPTS = 128  # per request
_MOST_COUNTED = 1 << 17

# Several at once would take CPU cores and memory from the engine.
_LONG_TEXTS = CapacityLimiter(1)

Prepared: TypeAlias = tuple[list[Prompt], int]
"""Prompts or texts to embed, each of which fits the context, and the number of tokens that were truncated."""


async def prepare_prompts(model: ServedModel, spec: ChatSpec | TextSpec, *, is_answered: bool = True) -> Prepared:
    """Prepare the prompts of a request. A conversation, already adapted by `plan_chat`, is a single prompt.

    is_answered: leave one token of the context for the answer

    Raises UsageError naming `messages` or `prompt` if a prompt is invalid or does not fit the context.
    """
    limit, room = model.info.max_model_len, spec.truncate_prompt_tokens
    longest = model.info.max_prompt_len if is_answered else limit
    if room == -1 and not is_answered:
        room = limit
    elif room == -1:  # the context without an answer of max_tokens, or three quarters of it
        wanted = spec.params.max_tokens
        room = longest + 1 - (limit // 4 if wanted is None or wanted >= limit else wanted)
    dropped, most = 0, longest if room is None else None
    try:
        if isinstance(spec, ChatSpec):
            trims = spec.truncation_side == "turns" and room is not None
            conversation, dropped = await _encode_chat(model, spec, room if trims else None, most)
            prompts = [conversation]
        else:
            prompts = await (
                _encode_with_images(model, spec) if spec.media else _encode_texts(model, spec.prompts, most)
            )
    except TooManyTokensError as error:
        raise _too_long(spec, error.found, limit, longest) from None
    prompts, num_truncated = _truncated(prompts, room, spec.truncation_side)
    if (found := max(map(len, prompts))) > longest:
        raise _too_long(spec, str(found), limit, longest)
    return prompts, num_truncated + dropped


async def find_pins(model: ServedModel, spec: ChatSpec | TextSpec, prompts: Sequence[Prompt]) -> tuple[Pin, ...]:
    """Return pins for the request's breakpoints, in order, each at a number of tokens rounded down to whole blocks.

    A request with several prompts has no pins.
    """
    if not spec.breakpoints or len(prompts) != 1:
        return ()
    prompt, size = prompts[0], model.info.block_size
    whole = [Pin(len(prompt) // size * size, each.seconds) for each in spec.breakpoints if each.texts is None]
    others = [each for each in spec.breakpoints if each.texts is not None]
    if not others or not isinstance(spec, ChatSpec) or spec.earlier_token_ids or prompt.spans:
        return tuple(whole)
    render = partial(model.prompts.render_chat, **spec.template_arguments)

    def find() -> list[Pin]:
        text = _with_readable_arguments(render, spec.messages)
        ends = [(_end_of(text, each), each.seconds) for each in others]
        encode = partial(model.prompts.encode, max_tokens=None)
        return [Pin(min(len(encode(text[:end])), len(prompt)) // size * size, seconds) for end, seconds in ends if end]

    return tuple(sorted([*await in_thread(len(prompt), find), *whole]))


def _end_of(text: str, breakpoint_: Breakpoint) -> int:
    """Return the position where a breakpoint's last text ends in `text`, or 0 if the template has left that text out.
    For a tool, return the end of the line.
    """
    end = 0
    for part in breakpoint_.texts or ():
        found = text.find(part.strip(), end)
        if found >= 0:
            end = found + len(part.strip())
        elif part is (breakpoint_.texts or ())[-1]:
            return 0
    if breakpoint_.is_tool and end:
        line_end = text.find("\n", end)
        return len(text) if line_end < 0 else line_end
    return end


def _too_long(spec: ChatSpec | TextSpec, num_tokens: str, limit: int, longest: int) -> UsageError:
    message = f"the prompt has {num_tokens} tokens, but the context of this model has {limit}"
    if longest < limit:
        message += f" for prompt and answer; at most {longest} leave room for one token"
    message += ": shorten it"
    if isinstance(spec, ChatSpec):  # a conversation that is cut at a token is no longer one
        return UsageError(message, param="messages", code="context_length_exceeded")
    message += ", or set truncate_prompt_tokens"
    return UsageError(message, param="prompt", code="context_length_exceeded")


async def prepare_inputs(
    model: ServedModel, texts: Sequence[str | Sequence[int | str]], truncate_to: int | None, side: str = "left"
) -> Prepared:
    """Tokenize texts to embed. They may fill the whole context, because no answer follows.

    truncate_to, side: see `Common.truncate_prompt_tokens`

    Raises the same errors as `prepare_prompts`.
    """
    limit = model.info.max_model_len
    room = limit if truncate_to == -1 else truncate_to
    if room is not None and (padding := model.tokenizer.padding) is not None:
        room = max(room, padding.length)  # a shorter prompt would be all padding
    try:
        whole = await _encode_texts(model, texts, limit if room is None else None)
        prompts, num_truncated = _truncated(whole, room, side)
        if (longest := max(map(len, prompts))) > limit:
            raise TooManyTokensError(longest, limit, is_exact=True)
    except TooManyTokensError as error:
        message = (
            f"the prompt has {error.found} tokens, but the context of this model has {limit}: shorten it, or set "
            "truncate_prompt_tokens"
        )
        raise UsageError(message, param="prompt", code="context_length_exceeded") from None
    return prompts, num_truncated


async def prepare_conversation(model: ServedModel, spec: ChatSpec) -> Prepared:
    """Prepare a conversation with its images for embedding, as a single prompt. Raises the same errors as
    `prepare_prompts`.
    """
    settings = model.info.images
    if settings is not None and image_processor(settings).gives_vectors:
        return await _prepare_alone(model, await with_texts(model, spec))
    return await prepare_prompts(model, await _planned(model, spec), is_answered=False)


async def _prepare_alone(model: ServedModel, spec: ChatSpec) -> Prepared:
    """Prepare a conversation of one message with text or an image, for a model that cannot embed both together."""
    content: MessageContent = spec.messages[0].get("content") or ()
    media, text = [part for part in content if isinstance(part, Media)], text_of(content)
    is_one = len(spec.messages) == 1 and not (media and text.strip())
    try:
        if is_one and not media:
            return await prepare_inputs(model, [text], spec.truncate_prompt_tokens)
        plan = ImagePlan(model)
        for part in media:
            plan.mark(part)
        files = await model.images.open(model.info, plan.sources) if is_one else []
        return [prompt_of([await model.images.item(file) for file in files])], 0
    except UsageError as error:
        raise UsageError(
            str(error), param="messages" if error.param == "prompt" else error.param, code=error.code
        ) from None


def max_counted_tokens(model: ServedModel) -> int:
    """Return the token limit for a text or a conversation that is only tokenized. It may exceed the context."""
    return max(_MOST_COUNTED, model.info.max_model_len)


async def encode_conversation(model: ServedModel, spec: ChatSpec) -> list[int]:
    """Return the token ids of a conversation of at most `max_counted_tokens`.

    Raises UsageError naming `messages` if it is longer, or if the template does not accept it.
    """
    adapted = await _planned(model, spec)
    most = max_counted_tokens(model)
    try:
        return list((await _encode_chat(model, adapted, None, most, counts_only=True))[0].token_ids)
    except TooManyTokensError as error:
        raise UsageError(str(error), param="messages", code=error.code) from None


async def encode_text(model: ServedModel, text: str, param: str, **options: bool) -> list[int]:
    """Return the token ids of a text of at most `max_counted_tokens`.

    options: options of `Tokenizer.encode`

    Raises UsageError naming `param` if the text is longer.
    """
    encode = partial(model.tokenizer.encode, text, max_tokens=max_counted_tokens(model), **options)
    try:
        return await in_thread(len(text), encode)
    except TooManyTokensError as error:
        raise UsageError(str(error), param=param, code=error.code) from None


async def in_thread(num_chars: int, work: Callable[[], T]) -> T:
    """Run `work`, which encodes `num_chars` characters, in a thread and return its result. Long texts are encoded one
    at a time.
    """
    return await run_sync(work, limiter=_LONG_TEXTS if num_chars > PIECE_CHARS else None)


def fit_max_tokens(
    model: ServedModel, params: SamplingParams | BeamSearchParams, prompts: Sequence[Prompt]
) -> SamplingParams | BeamSearchParams:
    """Return the parameters with max_tokens cut to the space left in the context."""
    left = model.info.max_prompt_len + 1 - max(map(len, prompts))
    is_cut = params.max_tokens is not None and params.max_tokens > left
    return changed(params, max_tokens=left) if is_cut else params


async def render_conversation(model: ServedModel, spec: ChatSpec) -> str:
    """Return the text of a conversation of any length. Raises the same errors as `encode_conversation`."""
    adapted = await _planned(model, spec)
    marks = None if adapted.images is None else adapted.images.marks
    render = partial(model.prompts.render_chat, image_marks=marks, **adapted.template_arguments)
    with _template_errors():
        return await run_sync(_with_readable_arguments, render, adapted.messages)


async def _planned(model: ServedModel, spec: ChatSpec) -> ChatSpec:
    """Adapt the conversation to the model's template, in a thread because it may be long."""
    return (await run_sync(plan_chat, model, await with_texts(model, spec)))[0]


@contextmanager
def _template_errors() -> Iterator[None]:
    try:
        yield
    except TooManyTokensError:
        raise
    except UsageError as error:
        raise UsageError(str(error), param="messages", code=error.code or "invalid_value") from None
    except ModelLoadError as error:
        # The template is wrong, not the request.
        raise ApiError(500, f"the conversation cannot be rendered: {error}", code="internal_error") from error


def _with_readable_arguments(render: Callable[[Sequence[Message]], T], messages: Sequence[Message]) -> T:
    """Return the result of `render`. If the template needs objects, convert calls' arguments that are text to objects.

    For example, arguments are text if they were cut off. Raises the same errors as `render`.
    """
    try:
        return render(messages)
    except TooManyTokensError:
        raise
    except UsageError as error:
        if (objects := with_objects(messages)) is None:
            raise
        try:
            return render(objects)
        except UsageError:
            raise error from None


async def _encode_chat(
    model: ServedModel, adapted: ChatSpec, room: int | None, max_tokens: int | None, *, counts_only: bool = False
) -> tuple[Prompt, int]:
    """Return the prompt, and the number of tokens in the turns that were left out to fit it into `room` tokens.

    counts_only: return a prompt of the right length, but without decoding images or marking them as spans

    Raises TooManyTokensError if the prompt has more than `max_tokens` tokens.
    """
    sizes: list[int] = []
    marks = None if adapted.images is None else adapted.images.marks
    images = await _placed_images(model, () if adapted.images is None else adapted.images.sources, counts_only)

    def encode_exactly(messages: Sequence[Message]) -> list[int]:
        arguments = adapted.template_arguments
        return model.prompts.encode_chat(messages, None, max_tokens=max_tokens, image_marks=marks, **arguments)

    def encode(messages: Sequence[Message]) -> Prompt:
        token_ids = _with_readable_arguments(encode_exactly, messages)
        prompt = Prompt(token_ids) if marks is None else images.place(token_ids, marks.numbers(messages))
        sizes.append(len(prompt))
        return prompt

    def encode_all() -> Prompt:
        if max_tokens is not None:
            _check_lengths(model, adapted.messages, max_tokens)
        return encode(adapted.messages) if room is None else fit_turns(adapted.messages, encode, room)[0]

    contents = (message.get("content") for message in adapted.messages)
    num_chars = sum(len(content) for content in contents if isinstance(content, str))
    with _template_errors():
        prompt = await in_thread(num_chars, encode_all)
    if not prompt:
        raise UsageError("the conversation renders to an empty prompt", param="messages", code="invalid_value")
    if adapted.earlier_token_ids:
        _check_ids(model, adapted.earlier_token_ids, "context")
        bos = model.tokenizer.prefix_ids
        own = prompt.without(0, len(bos)) if prompt.token_ids[: len(bos)] == bos else prompt
        return own.after(adapted.earlier_token_ids), 0
    return prompt, sizes[0] - len(prompt)


async def _placed_images(model: ServedModel, sources: Sequence[ImageSource], counts_only: bool = False) -> PlacedImages:
    """Load the images at these sources, for prompts to the model.

    counts_only: read the images' headers only
    """
    if not sources:
        return PlacedImages(model, [])
    files = await model.images.open(model.info, sources)
    if counts_only:
        return PlacedImages(model, [file.layout for file in files])
    return PlacedImages(model, [await model.images.item(file) for file in files])


async def _encode_with_images(model: ServedModel, spec: TextSpec) -> list[Prompt]:
    """Return the prompts of texts in which each marker represents the next image."""
    plan = ImagePlan(model)
    for part in spec.media:
        plan.mark(part)
    counts = [text.count(spec.media_marker) if isinstance(text, str) else 0 for text in spec.prompts]
    if sum(counts) != len(spec.media):
        raise UsageError(
            f"the prompt has {sum(counts)} image markers but {len(spec.media)} images; write the media_marker of "
            "/props once for each image, in prompts that are a single text",
            param="prompt",
            code="invalid_value",
        )
    images = await _placed_images(model, plan.sources)
    prompts, begun = [], 0
    for text, count in zip(spec.prompts, counts, strict=True):
        if isinstance(text, str):
            prompts.append(images.place_in_text(text, spec.media_marker, range(begun, begun + count)))
        else:
            prompts.append(Prompt(_encode_text(model, text, None)))
        begun += count
    return prompts


def _check_lengths(model: ServedModel, messages: Sequence[Message], max_tokens: int) -> None:
    """Raise TooManyTokensError for a message that is too long on its own, before a template makes copies of it.

    Only messages of users and tools are checked, without the white space around them. Templates may leave out this
    white space and the assistant's reasoning, but nothing else.
    """
    sizes = model.tokenizer.sizes
    for message in messages:
        content = message.get("content")
        if sizes is None or message["role"] not in ("user", "tool") or not isinstance(content, str):
            continue
        if len(content) > PIECE_CHARS and (least := sizes.least_tokens(content.strip())) > max_tokens:
            raise TooManyTokensError(least, max_tokens)


async def _encode_texts(model: ServedModel, texts: Sequence[TextOrIds], max_tokens: int | None) -> list[Prompt]:
    """Return the prompts of texts. Raises TooManyTokensError if one has more than `max_tokens` tokens."""
    known: dict[int, int] = {}

    def encode(text: TextOrIds) -> Prompt:
        ids = _encode_text(model, text, max_tokens)
        # Texts share the objects of equal ids, because an int takes four times as much memory as its list entry.
        return Prompt(ids if len(texts) == 1 else tuple(map(known.setdefault, ids, ids)))

    num_chars = sum(len(text) for text in texts if isinstance(text, str))
    return await in_thread(num_chars, lambda: [encode(text) for text in texts])


def _encode_text(model: ServedModel, prompt: TextOrIds, max_tokens: int | None) -> list[int]:
    if isinstance(prompt, Infill):
        return encode_infill(model.tokenizer, prompt, max_tokens)
    if isinstance(prompt, str):
        bos = model.tokenizer.bos_token_id
        token_ids = model.prompts.encode(prompt, max_tokens=max_tokens) or ([] if bos is None else [bos])
        if not token_ids:
            message = (
                "prompt is empty, and this model has no token for the beginning of a text; give at least one character"
            )
            raise UsageError(message, param="prompt", code="invalid_value")
        return token_ids
    if not prompt:
        raise UsageError("prompt contains an empty list of token ids", param="prompt", code="empty_array")
    if any(isinstance(item, str) for item in prompt):
        return _encode_pieces(model, prompt, max_tokens)
    ids: Sequence[Any] = prompt
    _check_ids(model, ids, "prompt")
    return list(ids)


def _encode_pieces(model: ServedModel, pieces: Sequence[int | str], max_tokens: int | None) -> list[int]:
    """Return the token ids of a prompt that consists of texts and token ids. It starts with BOS if its first piece is a
    text and the model needs BOS.
    """
    token_ids: list[int] = [] if isinstance(pieces[0], int) else [*model.tokenizer.prefix_ids]
    for piece in pieces:
        if isinstance(piece, str):
            encode = model.tokenizer.encode
            token_ids += encode(piece, add_special_tokens=False, parse_special=True, max_tokens=max_tokens)
        else:
            token_ids.append(piece)
    _check_ids(model, token_ids, "prompt")
    return token_ids


def _check_ids(model: ServedModel, token_ids: Sequence[Any], param: str) -> None:
    vocab_size = model.tokenizer.vocab_size
    wrong = next((item for item in token_ids if not 0 <= item < vocab_size), None)
    if wrong is not None:
        message = f"{param} contains token id {wrong:.20g}; this model has ids 0 to {vocab_size - 1}"
        raise UsageError(message, param=param, code="token_out_of_range")


def _truncated(prompts: list[Prompt], room: int | None, side: str) -> Prepared:
    """Return the prompts, each cut to `room` tokens if that is given, and the number of tokens that were cut off."""
    kept = prompts if room is None else [_truncate(prompt, room, side) for prompt in prompts]
    return kept, sum(map(len, prompts)) - sum(map(len, kept))


def _truncate(prompt: Prompt, room: int, side: str) -> Prompt:
    if len(prompt) <= room:
        return prompt
    head = {"left": 0, "right": room}.get(side, (room + 1) // 2)
    return prompt.without(head, len(prompt) - (room - head))
