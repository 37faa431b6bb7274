"""The sampling that fills the fields a request leaves open, on every route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.loader.generation_config import SamplingDefaults
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.asgi_server import asgi_client
from tests.support.fake_client import FakeClient, fake_model

DEFAULTS = SamplingDefaults({"temperature": 0.2, "top_p": 0.9, "top_k": 20}, "recommended by the authors of fake")
MESSAGES = [{"role": "user", "content": "Hi"}]


def post(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], defaults: SamplingDefaults = DEFAULTS
) -> tuple[SamplingParams, Any]:
    """The parameters that reach the engine, and the answer."""
    client = FakeClient(tokenizer, sampling_defaults=defaults)

    async def main() -> Any:
        async with asgi_client(ServerConfig(), [fake_model(tokenizer, client)]) as (http, _):
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

    answer = asyncio.run(main())
    return client.requests[-1].params.sampling, answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/generate", {"inputs": "Hi", "parameters": {"do_sample": True}}),
    ],
)
def test_open_fields_are_filled_and_explicit_ones_win(
    smollm2_tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    params, answer = post(smollm2_tokenizer, path, body)
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.9, 20)
    assert params.is_plain
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.2, 0.9)
    explicit: dict[str, Any] = {"temperature": 1.0, "top_p": 0.5}
    explicit = {"parameters": {"do_sample": True, **explicit}} if path == "/generate" else explicit
    params, _ = post(smollm2_tokenizer, path, {**body, **explicit})
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 0.5, 20)


SEED = SamplingDefaults({"seed": 5}, "a flag")


@pytest.mark.parametrize(
    ("path", "body", "nest"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, None),
        ("/v1/completions", {"prompt": "Hi"}, None),
        ("/v1/responses", {"input": "Hi"}, None),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, None),
        ("/generate", {"inputs": "Hi"}, "parameters"),
        ("/completion", {"prompt": "Hi"}, None),
        ("/api/chat", {"messages": MESSAGES, "stream": False}, "options"),
    ],
)
def test_the_seed_of_a_server(smollm2_tokenizer: Tokenizer, path: str, body: dict[str, Any], nest: str | None) -> None:
    """For requests without one. A request for a random seed gets a random one."""

    def seed_for(**fields: Any) -> int | None:
        given = {nest: fields} if nest else fields
        return post(smollm2_tokenizer, path, {**body, **given}, SEED)[0].seed

    open_field = {"do_sample": True} if path == "/generate" else {}
    assert seed_for(**open_field) == 5
    if path not in ("/v1/responses", "/v1/messages"):
        assert seed_for(**open_field, seed=9) == 9
    if path in ("/completion", "/api/chat"):
        assert seed_for(seed=-1) is None


def test_tgi_is_greedy_and_beams_are_beams(smollm2_tokenizer: Tokenizer) -> None:
    params, _ = post(smollm2_tokenizer, "/generate", {"inputs": "Hi"})
    assert (params.temperature, params.top_p) == (0.0, 1.0)
    beams = {"messages": MESSAGES, "use_beam_search": True, "n": 2, "max_tokens": 4}
    params, _ = post(smollm2_tokenizer, "/v1/chat/completions", beams)
    assert (params.temperature, params.top_p) == (0.0, 1.0)


def test_the_card_tells_them(smollm2_tokenizer: Tokenizer) -> None:
    async def cards() -> list[Any]:
        found = []
        for loaded in (True, False):
            model = fake_model(smollm2_tokenizer, FakeClient(smollm2_tokenizer, sampling_defaults=DEFAULTS))
            async with asgi_client(ServerConfig(), [model], loaded=loaded) as (http, _):
                found += (await http.get("/v1/models")).json()["data"]
        return found

    loaded, unloaded = asyncio.run(cards())
    assert loaded["default_sampling_source"] == "recommended by the authors of fake"
    assert loaded["default_sampling_params"]["temperature"] == 0.2
    assert loaded["default_sampling_params"]["min_p"] == 0.0
    assert unloaded["default_sampling_params"] is None


def test_a_long_conversation_is_not_advised_to_be_cut(smollm2_tokenizer: Tokenizer) -> None:
    client = FakeClient(smollm2_tokenizer)

    async def main() -> list[str]:
        async with asgi_client(ServerConfig(), [fake_model(smollm2_tokenizer, client)]) as (http, _):
            long = "word " * 300
            chat = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": long}]})
            text = await http.post("/v1/completions", json={"prompt": long})
            return [answer.json()["error"]["message"] for answer in (chat, text)]

    chat, text = asyncio.run(main())
    assert "truncate_prompt_tokens" not in chat
    assert "truncate_prompt_tokens" in text


def test_a_poll_for_readiness_or_a_refusal_is_no_error_of_the_server(smollm2_tokenizer: Tokenizer) -> None:
    async def main() -> tuple[int, dict[str, int]]:
        model = fake_model(smollm2_tokenizer, FakeClient(smollm2_tokenizer))
        async with asgi_client(ServerConfig(), [model], loaded=False) as (http, _):
            assert (await http.get("/health/ready")).status_code == 503
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 503
            data = (await http.get("/dashboard/data")).json()
            return data["num_http_errors"], data["rejected"]

    assert asyncio.run(main()) == (0, {"model_loading": 1})
