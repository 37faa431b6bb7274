"""Fields that only control another product's internals. They are accepted, and named in `x-octavo-ignored-fields`.

None of them changes an answer. A field that would change it is either supported by the request, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, create_model

from octavo.server.http.json_body import Int, Number, RequestModel, Text

Table: TypeAlias = "Mapping[str, Any]"
"""The names of the fields and their types."""

_OPENAI: Table = {"prompt_cache_retention": Text}
_SESSION: Table = {"request_id": Text, "session_id": Text}
# How vLLM reads media. In Octavo, these limits are options of the server.
_MEDIA: Table = {"media_io_kwargs": dict[str, Any], "mm_processor_kwargs": dict[str, Any]}
_VLLM: Table = {
    **_SESSION,
    "guided_decoding_backend": Text,
    "stream_interval": Int,
    # About routes that show a request without answering it, and about the experts that a server may record.
    "return_mm_kwargs": bool,
    "return_token_offsets": bool,
    "routed_experts_prompt_start": Int,
}
LLAMA_CPP: Table = {
    **dict.fromkeys(("cache_prompt", "backend_sampling"), bool),
    **dict.fromkeys(("n_keep", "n_discard", "n_cache_reuse"), Int),
    "sse_ping_interval": Number,
}
COMPLETIONS: Table = {**_VLLM, **LLAMA_CPP}
VECTORS: Table = {"request_id": Text, "mm_processor_kwargs": dict[str, Any]}
CHAT: Table = {
    **COMPLETIONS,
    **_MEDIA,
    "verbosity": Literal["low", "medium", "high"],
    "functions": Annotated[list[Any], Field(max_length=0)],
}
_RESPONSES: Table = {**_SESSION, "client_metadata": dict[str, Any]}
RESPONSES: Table = {**_RESPONSES, **_MEDIA}
# About answers. Codex also sends these fields with a conversation to compact.
COMPACTION: Table = {
    **_RESPONSES,
    **_OPENAI,
    "prompt_cache_options": dict[str, Any],
    "tools": list[Any],
    "parallel_tool_calls": bool,
    "reasoning": dict[str, Any],
    "text": dict[str, Any],
}
# How other servers route, bill and cache requests.
ANTHROPIC: Table = {
    **dict.fromkeys(("anthropic_version", "inference_geo", "speed", "fallback_credit_token", "user_profile_id"), Text),
    **dict.fromkeys(("diagnostics", "billing_policy"), dict[str, Any]),
    "anthropic_beta": list[Text],
    "fallbacks": Text | list[Any],
    "mcp_servers": Annotated[list[Any], Field(max_length=0)],
}
# Ollama's `options` about how a model is loaded and which part of a truncated prompt is kept.
OLLAMA: Table = {
    **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep"), Int),
    **dict.fromkeys(("numa", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"), bool),
    "embedding_only": bool,
}
TGI: Table = {"options": dict[str, Any]}


def with_ignored(base: type[RequestModel], table: Table) -> Any:
    """Return a model that also has the fields of this table. Its `ignored_fields` contains their names."""
    added: dict[str, Any] = {name: (kind | None, None) for name, kind in table.items()}
    model = create_model(base.__name__, __base__=base, **added)
    model.ignored_fields = frozenset(table)  # type: ignore[attr-defined]
    return model
