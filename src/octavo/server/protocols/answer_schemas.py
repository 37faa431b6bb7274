"""The shapes of generated answers for the OpenAPI document; what they mean is in the protocols' own references."""

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = "dict[str, Any]"

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    """An object that has these members, may have those, and may have more."""
    return {"type": "object", "required": list(required), "properties": required | (optional or {})}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _by_type(**members: Schema) -> Schema:
    """Objects that are told apart by their `type`."""
    return {
        "anyOf": [
            {
                **schema,
                "required": ["type", *schema["required"]],
                "properties": {"type": {"const": name}, **schema["properties"]},
            }
            for name, schema in members.items()
        ]
    }


_CACHED = _object({"cached_tokens": COUNT})
_REASONING = _object({"reasoning_tokens": COUNT})
_TOKEN_IDS = _list(COUNT)
_USAGE = _object(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _CACHED,
        "completion_tokens_details": _REASONING,
    },
    {"truncated_tokens": COUNT},
)
_PROMPT_LOGPROB = _object({"logprob": NUMBER, "rank": COUNT, "decoded_token": TEXT})
_PROMPT_LOGPROBS = _list(_or_null({"type": "object", "additionalProperties": _PROMPT_LOGPROB}))
_ALIKE: Schema = {
    "id": TEXT,
    "created": COUNT,
    "model": TEXT,
    "system_fingerprint": TEXT,
    "usage": _USAGE,
}
_TIMINGS: Schema = {"timings": {"type": "object", "additionalProperties": NUMBER}}

_TOKEN: Schema = {"token": TEXT, "logprob": NUMBER, "bytes": _or_null(_list(COUNT))}
_CHAT_LOGPROBS = _object({"content": _or_null(_list(_object(_TOKEN | {"top_logprobs": _list(_object(_TOKEN))})))})
_CALL = _object({"id": TEXT, "type": {"const": "function"}, "function": _object({"name": TEXT, "arguments": TEXT})})
CHAT_COMPLETION = _object(
    {
        **_ALIKE,
        "object": {"const": "chat.completion"},
        "choices": _list(
            _object(
                {
                    "index": COUNT,
                    "message": _object(
                        {"role": {"const": "assistant"}, "content": _or_null(TEXT), "refusal": {"type": "null"}},
                        {"tool_calls": _list(_CALL), "reasoning_content": TEXT},
                    ),
                    "logprobs": _or_null(_CHAT_LOGPROBS),
                    "finish_reason": _one_of("stop", "length", "tool_calls"),
                },
                {"token_ids": _TOKEN_IDS},
            )
        ),
    },
    {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _TOKEN_IDS, **_TIMINGS},
)

_TEXT_LOGPROBS = _object(
    {
        "tokens": _list(TEXT),
        "token_logprobs": _list(_or_null(NUMBER)),
        "top_logprobs": _or_null(_list(_or_null({"type": "object", "additionalProperties": NUMBER}))),
        "text_offset": _list(COUNT),
    }
)
COMPLETION = _object(
    {
        **_ALIKE,
        "object": {"const": "text_completion"},
        "choices": _list(
            _object(
                {
                    "index": COUNT,
                    "text": TEXT,
                    "logprobs": _or_null(_TEXT_LOGPROBS),
                    "finish_reason": _one_of("stop", "length"),
                },
                {"prompt_logprobs": _PROMPT_LOGPROBS, "prompt_token_ids": _TOKEN_IDS, "token_ids": _TOKEN_IDS},
            )
        ),
    },
    _TIMINGS,
)

EMBEDDINGS = _object(
    {
        "object": {"const": "list"},
        "model": TEXT,
        "usage": _object({"prompt_tokens": COUNT, "total_tokens": COUNT}, {"truncated_tokens": COUNT}),
        "data": _list(
            _object(
                {
                    "object": {"const": "embedding"},
                    "index": COUNT,
                    "embedding": {"anyOf": [_list(NUMBER), {**TEXT, "contentEncoding": "base64"}]},
                }
            )
        ),
    }
)

MESSAGE = _object(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": _list(
            _by_type(
                text=_object({"text": TEXT}),
                thinking=_object({"thinking": TEXT, "signature": TEXT}),
                tool_use=_object({"id": TEXT, "name": TEXT, "input": {"type": "object"}}),
            )
        ),
        "stop_reason": _one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
        "stop_sequence": _or_null(TEXT),
        "usage": _object({"input_tokens": COUNT, "output_tokens": COUNT, "cache_read_input_tokens": COUNT}),
    }
)

_PART = _by_type(output_text=_object({"text": TEXT, "annotations": _list({}), "logprobs": _list({"type": "object"})}))
RESPONSE = _object(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": _one_of("completed", "incomplete", "failed", "in_progress"),
        "error": _or_null({"type": "object"}),
        "incomplete_details": _or_null(_object({"reason": TEXT})),
        "model": TEXT,
        "output": _list(
            _by_type(
                message=_object({"id": TEXT, "status": TEXT, "role": {"const": "assistant"}, "content": _list(_PART)}),
                reasoning=_object({"id": TEXT, "summary": _list({})}),
                function_call=_object({"id": TEXT, "call_id": TEXT, "name": TEXT, "arguments": TEXT, "status": TEXT}),
            )
        ),
        "tools": _list({"type": "object"}),
        "usage": _object(
            {
                "input_tokens": COUNT,
                "input_tokens_details": _CACHED,
                "output_tokens": COUNT,
                "output_tokens_details": _REASONING,
                "total_tokens": COUNT,
            }
        ),
    }
)

_TGI_TOKEN = _object({"id": COUNT, "text": TEXT, "logprob": _or_null(NUMBER)}, {"special": {"type": "boolean"}})
GENERATED_TEXT = _object(
    {"generated_text": TEXT},
    {
        "details": _object(
            {
                "finish_reason": _one_of("eos_token", "length", "stop_sequence"),
                "generated_tokens": COUNT,
                "seed": _or_null({"type": "integer"}),
                "prefill": _list(_TGI_TOKEN),
                "tokens": _list(_TGI_TOKEN),
            },
            {"top_tokens": _list(_list(_TGI_TOKEN)), "truncated_tokens": COUNT},
        )
    },
)
INFO = _object(
    {
        "model_id": TEXT,
        "max_concurrent_requests": COUNT,
        "max_best_of": COUNT,
        "max_stop_sequences": COUNT,
        "max_input_tokens": COUNT,
        "max_total_tokens": COUNT,
        "version": TEXT,
    }
)


def whole_answer(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI, of a route that answers with this object."""
    return {200: {"description": "The answer", "content": {"application/json": {"schema": schema}}}}


def streamed_answer(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI, of a route that answers with this object, or with server-sent events that come to the same."""
    content = {"application/json": {"schema": schema}, "text/event-stream": {}}
    return {200: {"description": "The answer, or its server-sent events", "content": content}}
