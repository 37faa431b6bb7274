"""Adds a line to the class `RequestOptions` and checks that the new option reaches the engine from every caller.

python -m tests.support.new_option MODEL
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
    ("/v1/responses/compact", {"input": "Hi", "max_output_tokens": 1}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/pooling", {"input": "Hi"}),
    ("/v1/rerank", {"query": "Hi", "documents": ["Ho"]}),
    ("/v1/score", {"text_1": "Hi", "text_2": "Ho"}),
    ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}),
    ("/generate_stream", {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}),
    ("/", {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}),
    ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 1}}),
    ("/api/generate", {"prompt": "Hi", "options": {"num_predict": 1}}),
    ("/api/embed", {"input": "Hi"}),
    ("/api/embeddings", {"prompt": "Hi"}),
    ("/embed", {"inputs": "Hi"}),
    ("/completion", {"prompt": "Hi", "n_predict": 1}),
    ("/embedding", {"content": "Hi"}),
]
# Their bodies are those of /generate.
SAME_SCHEMA = {"/", "/generate_stream"}
# The model has no tokens for it. Its options are read as those of /completion.
NOT_ASKED = {"/infill"}
LIMITS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "16MiB"}


def add_option() -> None:
    """Replace the real module with one that has the extra line, before anything imports it."""
    spec = importlib.util.find_spec("octavo.generation_request")
    assert spec is not None
    assert spec.origin is not None
    text, line = Path(spec.origin).read_text(), "    priority: int = field("
    assert text.count(line) == 1
    module = types.ModuleType(spec.name)
    sys.modules[spec.name] = module
    exec(compile(text.replace(line, f'    new_option: str = ""\n{line}'), spec.origin, "exec"), module.__dict__)


def watch_engine() -> list[str]:
    """Record the option of every request that an engine makes from now on."""
    from octavo.engine.engine import Engine
    from octavo.engine.request import Request

    seen: list[str] = []
    create_request = Engine.create_request

    def note(self: Engine, request_id: str, request: Any) -> Request:
        seen.append(request.options.new_option)
        return create_request(self, request_id, request)

    Engine.create_request = note  # type: ignore[method-assign]
    return seen


async def ask_endpoints(model: str, seen: list[str]) -> None:
    from octavo.config import EngineConfig
    from tests.support.wired import wired_app

    async with wired_app(EngineConfig(model=model, **LIMITS)) as (http, client):
        for path, body in BODIES:
            for given, new_option in (({}, ""), ({"new_option": f"mine {path}"}, f"mine {path}")):
                seen.clear()
                client.requests.clear()
                answer = await http.post(path, json={**body, **given})
                assert answer.status_code == 200, (path, answer.text)
                assert seen == [new_option], (path, seen)
                assert [request.options for request in client.requests] == [client.requests[0].options]
        schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
        with_options = {name: schema for name, schema in schemas.items() if "priority" in schema.get("properties", ())}
        asked = {path for path, _ in BODIES} - SAME_SCHEMA | NOT_ASKED
        assert len(with_options) == len(asked), (sorted(with_options), sorted(asked))
        assert all("new_option" in schema["properties"] for schema in with_options.values())


async def ask_from_a_loop(model: str) -> None:
    from octavo.async_llm import AsyncLLM
    from octavo.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=1)
    async with AsyncLLM(model, **LIMITS) as llm:
        async for _ in llm.generate("Hi", params, new_option="generate"):
            pass
        async for _ in llm.chat(MESSAGES, params, new_option="chat"):
            pass


def ask_from_a_script(model: str) -> None:
    from octavo.llm import LLM
    from octavo.sampling_params import BeamSearchParams, SamplingParams

    params = SamplingParams(max_tokens=1)
    with LLM(model, **LIMITS) as llm:
        llm.generate(["a", "b"], params, new_option=["one", "other"])
        llm.chat(MESSAGES, params, new_option="chat")
        llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=1), new_option="beams")
        list(llm.stream("a", params, new_option="stream"))


def main(model: str) -> None:
    add_option()
    seen = watch_engine()
    asyncio.run(ask_endpoints(model, seen))
    seen.clear()
    asyncio.run(ask_from_a_loop(model))
    ask_from_a_script(model)
    assert seen == ["generate", "chat", "one", "other", "chat", "beams", "stream"], seen
    sys.stdout.write(json.dumps({"endpoints": len(BODIES), "calls": len(seen)}))


if __name__ == "__main__":
    main(sys.argv[1])
