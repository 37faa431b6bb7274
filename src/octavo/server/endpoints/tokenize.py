"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM: convert a text or a conversation to token ids, and
back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import msgspec
from anyio.to_thread import run_sync
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import UsageError
from octavo.sampling_params import SamplingParams
from octavo.server.errors import refuse
from octavo.server.generation.prompt import encode_conversation, encode_text
from octavo.server.generation.spec import ChatSpec
from octavo.server.http.json_body import WHOLE_NUMBERS, Text, quote
from octavo.server.http.json_route import JsonRoute
from octavo.server.http.long_answer import run_unless_gone
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import read_spec
from octavo.server.protocols.conversation import chat_tools
from octavo.server.protocols.openai.chat_request import MAX_MESSAGES, Message, TemplateFields, Tools, chat_messages
from octavo.server.protocols.protocol_fields import NullIsAbsent
from octavo.server.server_state import state_of
from octavo.tokenizer.tokenizer import Tokenizer

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")
MAX_TOKENS = 1 << 17  # per request to /detokenize; no context is longer
_TOKENS_AT_ONCE = 1 << 12

router = APIRouter(route_class=JsonRoute, tags=["Tokens"])
IMAGE_PATHS = ("/tokenize",)


class TokenizeRequest(TemplateFields):
    """A prompt or messages, or `content` with the other fields of llama.cpp.

    add_special_tokens: by default true for a prompt, and false for messages because the chat template adds the tokens
    add_special: only with `content`; false by default
    parse_special: only with `content`; true by default
    """

    model: Text | None = None
    prompt: Text | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    content: Text | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenizeResponse(BaseModel):
    """The token ids of a text or a conversation.

    token_strs: the text of each token; bytes of an incomplete character become U+FFFD
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    """The tokenizer's properties, under the names used in transformers' `tokenizer_config.json`.

    added_tokens_decoder: control tokens by id
    """

    tokenizer_class: str = "PreTrainedTokenizerFast"
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    added_tokens_decoder: dict[str, dict[str, str | bool]]


class DetokenizeRequest(NullIsAbsent):
    model: Text | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS), WHOLE_NUMBERS]


class TokensResponse(BaseModel):
    """llama.cpp's answer: ids, or ids with their texts. If a token's bytes are not valid UTF-8, they are listed instead
    of a text.
    """

    tokens: list[int | dict[str, int | str | list[int]]]


class DetokenizeResponse(BaseModel):
    """The text of the tokens, under vLLM's and llama.cpp's names."""

    prompt: str
    content: str


@router.post("/tokenize", response_model=TokenizeResponse | TokensResponse)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Return the token ids of a prompt, exactly as `/v1/completions` encodes it, or of a conversation."""
    _check_kind(body)
    reading = None if body.messages is None else read_spec(request, lambda: _chat_spec(body))
    spec = None if reading is None else await run_unless_gone(request, reading)
    async with state_of(request).models.use(body.model) as model:
        return await run_unless_gone(request, _tokenize(model, body, spec))


async def _tokenize(model: ServedModel, body: TokenizeRequest, spec: ChatSpec | None) -> Response:
    if spec is not None:
        tokens = await encode_conversation(model, spec)
    elif body.content is not None:
        adds, parses = bool(body.add_special), body.parse_special is not False
        tokens = await encode_text(model, body.content, "content", add_special_tokens=adds, parse_special=parses)
    else:
        prompt, adds = body.prompt or "", body.add_special_tokens is not False
        tokens = await encode_text(model, prompt, "prompt", add_special_tokens=adds, parse_special=True)
    return Response(await run_sync(_answer, model, body, tokens), media_type="application/json")


def _answer(model: ServedModel, body: TokenizeRequest, tokens: list[int]) -> bytes:
    """Return the answer as JSON, built piece by piece because the texts of many tokens take much more memory than their
    JSON.
    """
    texts, pieces = partial(_text, model.tokenizer), partial(_piece, model.tokenizer)
    if body.content is not None:
        if not body.with_pieces:
            return b'{"tokens":%b}' % _list(tokens, int)
        return b'{"tokens":%b}' % _list(tokens, lambda token_id: {"id": token_id, "piece": pieces(token_id)})
    strs = _list(tokens, texts) if body.return_token_strs else b"null"
    head = b'"count":%d,"max_model_len":%d' % (len(tokens), model.info.max_model_len)
    return b'{%b,"tokens":%b,"token_strs":%b}' % (head, _list(tokens, int), strs)


def _list(tokens: list[int], shown: Callable[[int], object]) -> bytes:
    parts = (tokens[i : i + _TOKENS_AT_ONCE] for i in range(0, len(tokens), _TOKENS_AT_ONCE))
    return b"[%b]" % b",".join(msgspec.json.encode([*map(shown, part)])[1:-1] for part in parts)


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
    """Return the text of token ids, including control tokens."""
    async with state_of(request).models.use(body.model) as model:
        vocab_size = model.tokenizer.vocab_size
        wrong = next((i for i, token_id in enumerate(body.tokens) if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            message = f"tokens[{wrong}] is {quote(body.tokens[wrong])}; this model has ids 0 to {vocab_size - 1}"
            raise UsageError(message, param="tokens", code="token_out_of_range")
        tokens = body.tokens
        text = run_sync(lambda: model.tokenizer.decode(tokens, skip_special_tokens=False))
        found = await run_unless_gone(request, text)
        return DetokenizeResponse(prompt=found, content=found)


@router.get("/tokenizer_info")
async def get_tokenizer_info(request: Request) -> TokenizerInfo:
    """Describe the first model's tokenizer, under the names used in `tokenizer_config.json`."""
    models = state_of(request).models
    async with models.use(models.default_name) as model:
        tokenizer = model.tokenizer
        texts = {token_id: _text(tokenizer, token_id) for token_id in sorted(tokenizer.special_token_ids)}
        return TokenizerInfo(
            vocab_size=tokenizer.vocab_size,
            model_max_length=model.info.max_model_len,
            bos_token=None if tokenizer.bos_token_id is None else _text(tokenizer, tokenizer.bos_token_id),
            eos_token=None if model.info.eos_token_id is None else _text(tokenizer, model.info.eos_token_id),
            chat_template=tokenizer.template_source() or None,
            added_tokens_decoder={str(i): {"content": text, "special": True} for i, text in texts.items()},
        )


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


def _check_kind(body: TokenizeRequest) -> None:
    if body.content is not None:
        for name in (*_OF_MESSAGES, "prompt", "messages", "add_special_tokens", "return_token_strs"):
            if getattr(body, name) is not None:
                raise refuse(name, "cannot be combined with content; use prompt instead")
        return
    for name in ("add_special", "parse_special", "with_pieces"):
        if getattr(body, name) is not None:
            raise refuse(name, "needs content instead of prompt")
    if (body.prompt is None) == (body.messages is None):
        given = "neither" if body.prompt is None else "both"
        message = f"give prompt or messages, not {given}"
        raise UsageError(message, param="prompt", code="missing_required_parameter" if given == "neither" else None)
    if body.messages is not None:
        if body.add_special_tokens:
            raise refuse("add_special_tokens", "works only with a prompt; the chat template adds them to messages")
        return
    for name in _OF_MESSAGES:
        if getattr(body, name) is not None:
            raise refuse(name, "works only with messages; leave it out with a prompt")


def _chat_spec(body: TokenizeRequest) -> ChatSpec:
    messages = body.messages or ()
    return ChatSpec(
        params=SamplingParams(),
        messages=chat_messages(messages),
        tools=chat_tools([tool.function.model_dump() for tool in body.tools or ()], "auto"),
        template_arguments=body.template_arguments(messages),
    )


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
