"""The schemas of answers for the OpenAPI document. The protocols' own references say what the fields mean."""

from __future__ import annotations

from typing import Any, TypeAlias

from octavo.server.http.openapi import ERRORS

Schema: TypeAlias = "dict[str, Any]"

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    """An object with these members. It may have the optional ones, and others too."""
    return {"type": "object", "required": list(required), "properties": required | (optional or {})}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _texts(*names: str) -> Schema:
    return dict.fromkeys(names, TEXT)


def _counts(*names: str) -> Schema:
    return dict.fromkeys(names, COUNT)


def _by_type(**members: Schema) -> Schema:
    """Objects that are told apart by their `type`."""
    return {"anyOf": [_object({"type": {"const": name}, **schema}) for name, schema in members.items()]}


_CACHED = _object(_counts("cached_tokens"))
_REASONING = _object(_counts("reasoning_tokens"))
_TOKEN_IDS = _list(COUNT)
_USAGE = _object(
    _counts("prompt_tokens", "completion_tokens", "total_tokens")
    | {"prompt_tokens_details": _CACHED, "completion_tokens_details": _REASONING},
    _counts("truncated_tokens"),
)
_PROMPT_LOGPROB = _object({"logprob": NUMBER, "rank": COUNT, "decoded_token": TEXT})
_PROMPT_LOGPROBS = _list(_or_null(_map(_PROMPT_LOGPROB)))
_ALIKE: Schema = {**_texts("id", "model", "system_fingerprint"), "created": COUNT, "usage": _USAGE}
_TIMINGS: Schema = {"timings": _map(NUMBER)}

_TOKEN: Schema = {"token": TEXT, "logprob": NUMBER, "bytes": _or_null(_list(COUNT))}
_CHAT_LOGPROBS = _object({"content": _or_null(_list(_object(_TOKEN | {"top_logprobs": _list(_object(_TOKEN))})))})
_CALL = _object({"id": TEXT, "type": {"const": "function"}, "function": _object(_texts("name", "arguments"))})
_CHAT_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _or_null(TEXT), "refusal": {"type": "null"}},
    {"tool_calls": _list(_CALL), "reasoning_content": TEXT},
)
_CHAT_CHOICE = _object(
    {
        "index": COUNT,
        "message": _CHAT_MESSAGE,
        "logprobs": _or_null(_CHAT_LOGPROBS),
        "finish_reason": _one_of("stop", "length", "tool_calls"),
    },
    {"token_ids": _TOKEN_IDS},
)
CHAT_COMPLETION = _object(
    {**_ALIKE, "object": {"const": "chat.completion"}, "choices": _list(_CHAT_CHOICE)},
    {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _TOKEN_IDS, **_TIMINGS},
)

_TEXT_LOGPROBS = _object(
    {
        "tokens": _list(TEXT),
        "token_logprobs": _list(_or_null(NUMBER)),
        "top_logprobs": _or_null(_list(_or_null(_map(NUMBER)))),
        "text_offset": _list(COUNT),
    }
)
_TEXT_CHOICE = _object(
    {"index": COUNT, "text": TEXT, "logprobs": _or_null(_TEXT_LOGPROBS), "finish_reason": _one_of("stop", "length")},
    {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _TOKEN_IDS, "token_ids": _TOKEN_IDS},
)
COMPLETION = _object({**_ALIKE, "object": {"const": "text_completion"}, "choices": _list(_TEXT_CHOICE)}, _TIMINGS)

_VECTOR: Schema = {"anyOf": [_list(NUMBER), {**TEXT, "contentEncoding": "base64"}]}
EMBEDDINGS = _object(
    {
        "object": {"const": "list"},
        "model": TEXT,
        "usage": _object(_counts("prompt_tokens", "total_tokens"), _counts("truncated_tokens")),
        "data": _list(_object({"object": {"const": "embedding"}, "index": COUNT, "embedding": _VECTOR})),
    }
)

_BLOCK = _by_type(
    text=_texts("text"),
    thinking=_texts("thinking", "signature"),
    tool_use={**_texts("id", "name"), "input": {"type": "object"}},
)
MESSAGE = _object(
    {
        **_texts("id", "model"),
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": _list(_BLOCK),
        "stop_reason": _one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
        "stop_sequence": _or_null(TEXT),
        "usage": _object(_counts("input_tokens", "output_tokens", "cache_read_input_tokens")),
    }
)

_PART = _by_type(output_text={"text": TEXT, "annotations": _list({}), "logprobs": _list({"type": "object"})})
_ITEM = _by_type(
    message={**_texts("id", "status"), "role": {"const": "assistant"}, "content": _list(_PART)},
    reasoning={"id": TEXT, "summary": _list({})},
    function_call=_texts("id", "call_id", "name", "arguments", "status"),
)
RESPONSE = _object(
    {
        **_texts("id", "model"),
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": _one_of("completed", "incomplete", "failed", "in_progress"),
        "error": _or_null({"type": "object"}),
        "incomplete_details": _or_null(_object(_texts("reason"))),
        "output": _list(_ITEM),
        "tools": _list({"type": "object"}),
        "usage": _object(
            _counts("input_tokens", "output_tokens", "total_tokens")
            | {"input_tokens_details": _CACHED, "output_tokens_details": _REASONING}
        ),
    }
)

_TGI_TOKEN = _object({"id": COUNT, "text": TEXT, "logprob": _or_null(NUMBER)}, {"special": {"type": "boolean"}})
_TGI_DETAILS = _object(
    {
        "finish_reason": _one_of("eos_token", "length", "stop_sequence"),
        "generated_tokens": COUNT,
        "seed": _or_null({"type": "integer"}),
        "prefill": _list(_TGI_TOKEN),
        "tokens": _list(_TGI_TOKEN),
    },
    {"top_tokens": _list(_list(_TGI_TOKEN)), "truncated_tokens": COUNT},
)
GENERATED_TEXT = _object({"generated_text": TEXT}, {"details": _TGI_DETAILS})
INFO = _object(
    _texts("model_id", "version")
    | _counts(*("max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_input_tokens", "max_total_tokens"))
)


ANTHROPIC_ERROR = _object(
    {"type": {"const": "error"}, "error": _object(_texts("type", "message"))}, _texts("request_id")
)
TGI_ERROR = _object({"error": TEXT, "error_type": _one_of("validation", "overloaded", "generation")})


def whole_answer(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of a route that answers with this object."""
    return {200: {"description": "The answer", "content": {"application/json": {"schema": schema}}}}


def streamed_answer(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of a route that answers with this object, or with its server-sent events."""
    content = {"application/json": {"schema": schema}, "text/event-stream": {}}
    return {200: {"description": "The answer, or its server-sent events", "content": content}}


def errors(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI responses of a route whose errors all have this schema."""
    content = {"application/json": {"schema": schema}}
    return {int(status): {"description": text, "content": content} for status, text in ERRORS.items()}
