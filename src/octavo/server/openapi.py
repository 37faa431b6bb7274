"""The server's OpenAPI document: FastAPI's document with our errors, protocols and example requests."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from octavo.server.protocols.answer_schemas import OPENAI_ERROR, errors

# Tags in the order of the page. A protocol without an entry comes after them, without a description.
_TAGS = {
    "OpenAI": "Chat completions, completions, responses and embeddings",
    "Anthropic": "Messages and token counts",
    "Ollama": "Chat, generate, embed and models",
    "llama.cpp": "Completion, infill, embedding, slots and LoRA adapters",
    "Text Generation Inference": "Generate and embed, as Hugging Face's servers do",
    "Rerank": "Rerank and score texts, as vLLM and Jina do",
    "Batches": "OpenAI's files and batches",
    "Models": "List, load and unload models and adapters",
    "Tokens": "Tokenize and detokenize, as vLLM does",
    "Requests": "Cancel running requests",
    "SageMaker": "Amazon SageMaker's invocations and ping",
    "Server": "Version, load, metrics and sleep",
    "Health": "Liveness and readiness",
}

_QUESTION = "Name three colors."
_CHAT = {"messages": [{"role": "user", "content": _QUESTION}]}
_TEXT = "The sky is blue."
_DOCUMENTS = ["The sky is blue.", "Grass is green."]
# A small example body by path. Without one, Swagger UI fills in every field of the schema.
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**_CHAT, "max_tokens": 64},
    "/v1/chat/completions/input_tokens": _CHAT,
    "/v1/completions": {"prompt": "The first three primes are", "max_tokens": 16},
    "/v1/responses": {"input": _QUESTION, "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"input": _QUESTION},
    "/v1/responses/compact": {"input": [{"role": "user", "content": _QUESTION}]},
    "/v1/embeddings": {"input": _TEXT},
    "/v1/messages": {**_CHAT, "max_tokens": 64},
    "/v1/messages/count_tokens": _CHAT,
    "/v1/batches": {"input_file_id": "file-...", "endpoint": "/v1/chat/completions"},
    "/v1/rerank": {"query": "What color is grass?", "documents": _DOCUMENTS},
    "/v2/rerank": {"query": "What color is grass?", "documents": _DOCUMENTS},
    "/pooling": {"input": "Grass is green.", "task": "token_embed"},
    "/v1/score": {"text_1": "What color is grass?", "text_2": _DOCUMENTS},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "/path/to/adapter"},
    "/v1/unload_lora_adapter": {"lora_name": "sql"},
    "/api/chat": {**_CHAT, "stream": False},
    "/api/generate": {"prompt": _QUESTION, "stream": False},
    "/api/embed": {"input": _TEXT},
    "/api/embeddings": {"prompt": _TEXT},
    "/api/show": {"model": "default"},
    "/api/pull": {"model": "default", "stream": False},
    "/completion": {"prompt": "The first three primes are", "n_predict": 16},
    "/infill": {"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 16},
    "/embedding": {"content": _TEXT},
    "/apply-template": _CHAT,
    "/slots/{id_slot}": {"filename": "chat.bin"},
    "/": {"inputs": _QUESTION, "parameters": {"max_new_tokens": 16}},
    "/generate": {"inputs": _QUESTION, "parameters": {"max_new_tokens": 16}},
    "/generate_stream": {"inputs": _QUESTION, "parameters": {"max_new_tokens": 16}},
    "/embed": {"inputs": _TEXT},
    "/tokenize": {"prompt": _TEXT},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. Every operation can answer with every error, in its protocol's schema."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description="Runs and serves large language models. Start with a protocol that your client speaks.",
        routes=app.routes,
    )
    schemas = document["components"]["schemas"]
    schemas["Error"] = OPENAI_ERROR
    del schemas["HTTPValidationError"], schemas["ValidationError"]
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]
    all_errors = errors({"$ref": "#/components/schemas/Error"})
    found: dict[str, None] = {}  # tags, in order
    for path, operations in document["paths"].items():
        for operation in operations.values():
            found |= dict.fromkeys(operation.get("tags", ()))
            operation["responses"].pop("422", None)
            for status, response in all_errors.items():
                operation["responses"].setdefault(str(status), response)
            if path in _EXAMPLES and "requestBody" in operation:
                operation["requestBody"]["content"]["application/json"]["example"] = _EXAMPLES[path]
    names = [*(name for name in _TAGS if name in found), *(name for name in found if name not in _TAGS)]
    document["tags"] = [{"name": name, "description": _TAGS.get(name, "")} for name in names]
    return document
