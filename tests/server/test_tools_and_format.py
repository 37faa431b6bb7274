"""Tools together with a JSON format of the answer: a call or the schema, in every protocol and every tool format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from octavo.engine.texts.constrained import GrammarCompiler
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.tool_parsers.grammar import or_json
from octavo.server.tool_parsers.tool_format import tool_formats
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.server import RunningServer

SCHEMA = {
    "type": "object",
    "properties": {"degrees": {"type": "integer"}},
    "required": ["degrees"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
REST: dict[str, Any] = {"temperature": 0, "parallel_tool_calls": False}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
HI: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "tools": [TOOL], "response_format": FORMAT},
    "/v1/responses": {
        "input": HI,
        "tools": [{"type": "function", "name": "get_weather", "parameters": CITY}],
        "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": HI,
        "max_tokens": 50,
        "tools": [{"name": "get_weather", "input_schema": CITY}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


class Judge:
    """Says which texts are whole answers by a grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)

    def accepts(self, grammar: str, text: str) -> bool:
        matcher = self._compiler.compile(StructuredOutputsParams(grammar=grammar)).copy().matcher
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@pytest.fixture(scope="module")
def judge(smollm2_tokenizer: Tokenizer) -> Judge:
    return Judge(smollm2_tokenizer)


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai", "responses", "anthropic") as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_the_grammar_allows_a_call_or_the_schema(fake: ScriptedServer, judge: Judge, path: str) -> None:
    for text, word in ((CALL, "get_weather"), ('{"degrees": 7}', "degrees")):
        fake.script = Script([text])
        answer = fake.post(path, BODIES[path])
        assert answer.status_code == 200, answer.text
        assert word in answer.text
        grammar = fake.last_request.params.structured_outputs.grammar
        assert judge.accepts(grammar, CALL)
        assert judge.accepts(grammar, '{"degrees": 7}')
        assert not judge.accepts(grammar, "It is warm.")
        assert not judge.accepts(grammar, '{"degrees": "warm"}')


def test_a_forced_call_and_no_tools_at_all(fake: ScriptedServer, judge: Judge) -> None:
    fake.script = Script([CALL])
    body = BODIES["/v1/chat/completions"]
    fake.post("/v1/chat/completions", {**body, "tool_choice": "required"})
    assert not judge.accepts(fake.last_request.params.structured_outputs.grammar, '{"degrees": 7}')
    fake.post("/v1/chat/completions", {**body, "tool_choice": "none"})
    assert json.loads(fake.last_request.params.structured_outputs.json) == SCHEMA


@pytest.mark.parametrize("name", tool_formats())
def test_every_tool_format(judge: Judge, name: str) -> None:
    if tool_formats()[name].is_bare:
        pytest.skip("refused: calls look like an answer in JSON")
    calls = tool_formats()[name].grammar([TOOL], True, {})
    grammar = or_json(calls, SCHEMA)
    assert judge.accepts(grammar, '{"degrees": 7}')
    assert not judge.accepts(grammar, "warm")


def test_a_real_model_of_the_official_clients(server: RunningServer) -> None:
    """Two turns: the model must call or fill the schema, and the second turn has the call in its history."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for choice in ("auto", "required"):
        messages = list(HI)
        answer = client.chat.completions.create(
            model="smollm2", messages=messages, tools=[TOOL], tool_choice=choice, response_format=FORMAT, **REST
        )
        message = answer.choices[0].message
        assert message.tool_calls or json.loads(message.content or "").keys() == {"degrees"}
        messages.append(message.model_dump())
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "12"} for c in message.tool_calls or ()]
        messages.append({"role": "user", "content": "Now as JSON."})
        second = client.chat.completions.create(
            model="smollm2", messages=messages, tools=[TOOL], tool_choice="none", response_format=FORMAT, **REST
        )
        assert json.loads(second.choices[0].message.content or "").keys() == {"degrees"}
    other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    body = {**BODIES["/v1/messages"], "model": "smollm2"}
    one = {"type": "auto", "disable_parallel_tool_use": True}
    (block,) = other.messages.create(**body, tool_choice=one, extra_body={"temperature": 0}).content
    assert block.type == "tool_use" or json.loads(block.text).keys() == {"degrees"}  # type: ignore[union-attr]
