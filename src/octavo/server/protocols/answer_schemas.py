"""Schemas of answers for the OpenAPI document. The protocols' own references explain the fields."""

from __future__ import annotations

from typing import Any, TypeAlias

from pydantic import TypeAdapter

from octavo.server.errors import STATUSES

Schema: TypeAlias = "dict[str, Any]"


def json_schema(shape: Any) -> Schema:
    """Return the JSON schema of values of this shape.

    shape: a string for exactly this text; a tuple of alternatives; a list with the shape of its items; a dict with the
    names and shapes of the members, where `?` marks optional ones, or with `str` for any name; otherwise a type
    """
    if isinstance(shape, str):
        return {"const": shape}
    if isinstance(shape, tuple):
        return {"anyOf": [json_schema(item) for item in shape]}
    if isinstance(shape, list):
        return {"type": "array", "items": json_schema(shape[0])}
    if not isinstance(shape, dict):
        return TypeAdapter(shape).json_schema()
    if str in shape:
        return {"type": "object", "additionalProperties": json_schema(shape[str])}
    members = {name.removesuffix("?"): json_schema(item) for name, item in shape.items()}
    return {"type": "object", "required": [name for name in shape if name in members], "properties": members}


def _texts(*names: str) -> dict[str, type]:
    return dict.fromkeys(names, str)


def _counts(*names: str) -> dict[str, type]:
    return dict.fromkeys(names, int)


_USAGE = {
    **_counts("prompt_tokens", "completion_tokens", "total_tokens", "truncated_tokens?"),
    "prompt_tokens_details": _counts("cached_tokens", "image_tokens?"),
    "completion_tokens_details": {"reasoning_tokens": int},
}
_HEAD = {
    **_texts("id", "model", "system_fingerprint"),
    "service_tier": str | None,
    "created": int,
    "usage": _USAGE,
    "timings?": dict[str, float],
}
_PROMPT = {
    "prompt_logprobs?": [({str: {"logprob": float, "rank": int, "decoded_token": str}}, None)],
    "prompt_token_ids?": [int],
}
_TOKEN = {"token": str, "logprob": float, "bytes": list[int] | None}
_CHAT_LOGPROBS = {"content": ([{**_TOKEN, "top_logprobs": [_TOKEN]}], None)}
_CALL = {"id": str, "type": "function", "function": _texts("name", "arguments")}
_CHAT_MESSAGE = {
    "role": "assistant",
    "content": str | None,
    **dict.fromkeys(("refusal", "audio", "function_call")),
    "annotations": [Any],
    "tool_calls?": [_CALL],
    "reasoning_content": str | None,
    "reasoning": str | None,
}
_CHAT_CHOICE = {
    "index": int,
    "message": _CHAT_MESSAGE,
    "logprobs": (_CHAT_LOGPROBS, None),
    "finish_reason": ("stop", "length", "tool_calls"),
    "stop_reason": int | str | None,
    "token_ids?": [int],
}
CHAT_COMPLETION = json_schema({**_HEAD, **_PROMPT, "object": "chat.completion", "choices": [_CHAT_CHOICE]})

_TEXT_LOGPROBS = {
    "tokens": [str],
    "token_logprobs": [float | None],
    "top_logprobs": ([dict[str, float] | None], None),
    "text_offset": [int],
}
_TEXT_CHOICE = {
    **_PROMPT,
    "index": int,
    "text": str,
    "logprobs": (_TEXT_LOGPROBS, None),
    "finish_reason": ("stop", "length"),
    "stop_reason": int | str | None,
    "token_ids?": [int],
}
COMPLETION = json_schema({**_HEAD, "object": "text_completion", "choices": [_TEXT_CHOICE]})

EMBEDDINGS = json_schema(
    {
        "object": "list",
        "model": str,
        "usage": {
            **_counts("prompt_tokens", "total_tokens", "truncated_tokens?"),
            "prompt_tokens_details?": _counts("image_tokens"),
        },
        "data": [{"object": "embedding", "index": int, "embedding": list[float] | str}],
    }
)

POOLING = json_schema(
    {
        "object": "list",
        "model": str,
        "usage": _counts("prompt_tokens", "total_tokens"),
        "data": [{"object": "pooling", "index": int, "data": list[list[float]] | list[float]}],
    }
)

_SCORE_HEAD = _texts("id", "model")
RERANK = json_schema(
    {
        **_SCORE_HEAD,
        "usage": _counts("prompt_tokens", "total_tokens", "truncated_tokens?"),
        "results": [{"index": int, "relevance_score": float, "document?": {"text": str}}],
    }
)
SCORE = json_schema(
    {
        **_SCORE_HEAD,
        "object": "list",
        "created": int,
        "usage": _counts("prompt_tokens", "total_tokens", "truncated_tokens?"),
        "data": [{"object": "score", "index": int, "score": float}],
    }
)

MESSAGE = json_schema(
    {
        **_texts("id", "model"),
        "type": "message",
        "role": "assistant",
        "content": [
            (
                {"type": "text", "text": str},
                {"type": "thinking", **_texts("thinking", "signature")},
                {"type": "tool_use", **_texts("id", "name"), "input": dict},
            )
        ],
        "stop_reason": ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
        "stop_sequence": str | None,
        "usage": _counts("input_tokens", "output_tokens", "cache_read_input_tokens"),
    }
)

_PART = {"type": "output_text", "text": str, "annotations": [Any], "logprobs": [dict]}
_ITEM = (
    {"type": "message", **_texts("id", "status"), "role": "assistant", "content": [_PART]},
    {"type": "reasoning", "id": str, "summary": [Any]},
    {"type": "function_call", **_texts("id", "call_id", "name", "arguments", "status")},
    {"type": "custom_tool_call", **_texts("id", "call_id", "name", "input", "status")},
)
_RESPONSE_USAGE = {
    **_counts("input_tokens", "output_tokens", "total_tokens"),
    "input_tokens_details": _counts("cached_tokens", "image_tokens?"),
    "output_tokens_details": {"reasoning_tokens": int},
}
RESPONSE = json_schema(
    {
        **_texts("id", "model"),
        "object": "response",
        "created_at": int,
        "status": ("completed", "incomplete", "failed", "in_progress"),
        "error": dict | None,
        "incomplete_details": ({"reason": str}, None),
        "output": [_ITEM],
        "tools": [dict],
        "usage": _RESPONSE_USAGE,
    }
)
COMPACTION = json_schema(
    {
        "id": str,
        "object": "response.compaction",
        "created_at": int,
        "output": [({"type": "message", "role": "user"}, {"type": "compaction", **_texts("id", "encrypted_content")})],
        "usage": _RESPONSE_USAGE,
    }
)

_TGI_TOKEN = {"id": int, "text": str, "logprob": float | None, "special?": bool}
_TGI_DETAILS = {
    "finish_reason": ("eos_token", "length", "stop_sequence"),
    "generated_tokens": int,
    "seed": int | None,
    "prefill": [_TGI_TOKEN],
    "tokens": [_TGI_TOKEN],
    "top_tokens?": [[_TGI_TOKEN]],
    "truncated_tokens?": int,
}
GENERATED_TEXT = json_schema({"generated_text": str, "details?": _TGI_DETAILS})
INFO = json_schema(
    _texts("model_id", "version")
    | _counts("max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_input_tokens", "max_total_tokens")
)

_DURATIONS = {
    **_counts("total_duration?", "load_duration?", "prompt_eval_count?", "prompt_eval_duration?"),
    **_counts("eval_count?", "eval_duration?"),
}
_OLLAMA_LINE = {
    **_texts("model", "created_at"),
    "done": bool,
    "done_reason?": ("stop", "length", "load", "unload"),
    "logprobs?": [{**_TOKEN, "top_logprobs": [_TOKEN]}],
    **_DURATIONS,
}
_OLLAMA_CALL = {"id": str, "function": {"index": int, "name": str, "arguments": dict}}
_OLLAMA_MESSAGE = {"role": "assistant", "content": str, "thinking?": str, "tool_calls?": [_OLLAMA_CALL]}
OLLAMA_TEXT = json_schema({**_OLLAMA_LINE, "response": str, "thinking?": str, "context?": [int]})
OLLAMA_CHAT = json_schema({**_OLLAMA_LINE, "message": _OLLAMA_MESSAGE})
OLLAMA_EMBEDDINGS = json_schema({"model": str, "embeddings": [[float]], **_DURATIONS})
OLLAMA_EMBEDDING = json_schema({"embedding": [float]})
_OLLAMA_DETAILS = {
    **_texts("parent_model", "format", "family", "parameter_size", "quantization_level"),
    "families": list[str] | None,
}
_OLLAMA_LISTED = {**_texts("name", "model", "modified_at", "digest"), "size": int, "details": _OLLAMA_DETAILS}
OLLAMA_MODELS = json_schema(
    {"models": [{**_OLLAMA_LISTED, "expires_at?": str, **_counts("size_vram?", "context_length?")}]}
)
OLLAMA_MODEL = json_schema(
    {
        **_texts("modelfile", "parameters", "template", "modified_at"),
        "license": str | None,
        "details": _OLLAMA_DETAILS,
        "model_info": dict,
        "capabilities": [str],
    }
)
OLLAMA_STATUS = json_schema({"status": "success"})

_LLAMA_TOKEN = {"id": int, "token": str, "bytes": [int], "logprob": float}
_LLAMA_RESULT = {
    **_texts("content?", "model?", "prompt?", "stopping_word?"),
    **_counts("index?", "tokens_predicted?", "tokens_evaluated?", "tokens_cached?"),
    **dict.fromkeys(("stop?", "truncated?", "has_new_line?"), bool),
    "tokens?": [int],
    "stop_type?": ("limit", "word", "eos"),
    "generation_settings?": dict,
    "timings?": dict[str, float],
    "completion_probabilities?": [{**_LLAMA_TOKEN, "top_logprobs": [_LLAMA_TOKEN]}],
}
LLAMA_COMPLETION = json_schema((_LLAMA_RESULT, [_LLAMA_RESULT]))
LLAMA_EMBEDDINGS = json_schema([{"index": int, "embedding": [[float]]}])
TEI_EMBEDDINGS = json_schema([[float]])
LLAMA_PROPS = json_schema(
    {
        **_texts("model_alias", "model_path", "chat_template", "bos_token", "eos_token", "build_info"),
        "total_slots": int,
        "default_generation_settings": {"n_ctx": int, "params": dict},
        "modalities": {"vision": bool, "audio": bool},
        "media_marker": str,
        "is_sleeping": bool,
        "speculation": {"sources": [str], "max_drafts": int, "reason": str},
    }
)
LLAMA_SLOTS = json_schema([{**_counts("id", "n_ctx"), "speculative": bool, "is_processing": bool}])
LLAMA_SLOT_ACTION = json_schema({"id_slot": int})

LLAMA_ADAPTERS = json_schema([{"id": int, **_texts("path", "name", "task_name", "prompt_prefix"), "scale": float}])

_CLOSED = {"additionalProperties": False}
_ERROR = json_schema({**_texts("message", "type"), "param": str | None, "code": str | None}) | _CLOSED
OPENAI_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _ERROR}} | _CLOSED


def whole_answer(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a route that answers with this object."""
    return {200: {"description": "The answer", "content": {"application/json": {"schema": schema}}}}


def streamed_answer(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a route that answers with this object, or with server-sent events of it."""
    content = {"application/json": {"schema": schema}, "text/event-stream": {}}
    return {200: {"description": "The answer, or its server-sent events", "content": content}}


def lines_answer(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a route that answers with this object, or with one part of it per line."""
    content = {"application/json": {"schema": schema}, "application/x-ndjson": {}}
    return {200: {"description": "The answer, or its lines of JSON", "content": content}}


def errors(schema: Schema) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of a route whose errors all have this schema, by status."""
    content = {"application/json": {"schema": schema}}
    return {status: {"description": text, "content": content} for status, text in STATUSES.items()}
