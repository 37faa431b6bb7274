"""Fields that other products give other names or values: lengths, penalties, grammars, schemas, the side of a cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.loader.generation_config import SamplingDefaults
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.server import RunningServer

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
GBNF = 'root ::= answer "!"\nanswer ::= "yes" | "no"'


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai", "responses") as running:
        running.script = Script(["Hello", "!"])
        running.client.sampling_defaults = SamplingDefaults({"repetition_penalty": 1.5, "top_k": 7}, "test")
        yield running


def params_of(fake: ScriptedServer, path: str, fields: dict[str, Any]) -> Any:
    answer = fake.post(path, {**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    return fake.last_request.params


@pytest.mark.parametrize(
    ("path", "fields", "max_tokens"),
    [
        (CHAT, {"max_tokens": -1}, None),
        (CHAT, {"max_tokens": None}, None),
        (CHAT, {"max_completion_tokens": -1}, None),
        (CHAT, {"max_completion_tokens": 7}, 7),
        (CHAT, {"n_predict": 7, "max_tokens": 7}, 7),
        (CHAT, {"n_predict": -1}, None),
        (TEXT, {}, 16),
        (TEXT, {"max_tokens": -1}, None),
        (TEXT, {"max_tokens": None}, None),
        (TEXT, {"n_predict": 7}, 7),
        (RESPONSES, {"max_output_tokens": -1}, None),
        (RESPONSES, {"max_output_tokens": None}, None),
    ],
)
def test_lengths(fake: ScriptedServer, path: str, fields: dict[str, Any], max_tokens: int | None) -> None:
    assert params_of(fake, path, fields).max_tokens == max_tokens


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_length_beyond_the_context_is_cut(fake: ScriptedServer, path: str) -> None:
    max_tokens = params_of(fake, path, {"max_tokens": 10**6}).max_tokens
    assert max_tokens == 1024 - len(fake.last_request.prompt.token_ids)


def test_names_that_contradict_each_other(fake: ScriptedServer) -> None:
    for fields in ({"n_predict": 5, "max_tokens": 6}, {"repeat_penalty": 1.1, "repetition_penalty": 1.2}):
        error = fake.post(TEXT, {**BODIES[TEXT], **fields}).json()["error"]
        assert error["param"] in fields
        assert all(name in error["message"] for name in fields)
    error = fake.post(TEXT, {**BODIES[TEXT], "repeat_penalty": 11}).json()["error"]
    assert error["param"] == "repeat_penalty"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_penalties_of_the_request_replace_the_defaults_of_the_model(fake: ScriptedServer, path: str) -> None:
    assert params_of(fake, path, {}).repetition_penalty == 1.5
    assert params_of(fake, path, {"repeat_penalty": 1.25}).repetition_penalty == 1.25


def test_top_k_of_responses(fake: ScriptedServer) -> None:
    assert params_of(fake, RESPONSES, {}).top_k == 7
    assert params_of(fake, RESPONSES, {"top_k": 3}).top_k == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_schemas(fake: ScriptedServer, path: str, fields: dict[str, Any]) -> None:
    assert json.loads(params_of(fake, path, fields).structured_outputs.json) == SCHEMA


def test_two_schemas_and_a_schema_of_text_are_refused(fake: ScriptedServer) -> None:
    for format_ in (
        {"type": "json_object", "schema": SCHEMA, "value": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "json_schema": {"name": "a", "schema": SCHEMA}},
        {"type": "text", "schema": SCHEMA},
    ):
        answer = fake.post(CHAT, {**BODIES[CHAT], "response_format": format_})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("response_format")


def test_the_right_side_is_cut(fake: ScriptedServer) -> None:
    for side, kept in (("right", [0, 1, 2]), ("left", [7, 8, 9])):
        fields = {"prompt": list(range(10)), "truncate_prompt_tokens": 3, "truncation_side": side}
        fake.post(TEXT, fields)
        assert fake.last_request.prompt.token_ids == tuple(kept)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": GBNF},
        {"guided_grammar": GBNF},
        {"structured_outputs": {"grammar": GBNF}},
        {"grammar": 'start: ("yes" | "no") "!"'},
    ],
)
def test_grammars_of_llama_cpp(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    body = {**BODIES[path], **fields, "max_tokens": 8}
    answer = server.client.post(path, json=body).json()["choices"][0]
    text = answer["message"]["content"] if path == CHAT else answer["text"]
    assert text in ("yes!", "no!")


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        'root ::= "a',
        "root ::= nowhere",
        "root ::= " + "(" * 8000,
        'root ::= "' + "a" * 70_000 + '"',
        "start: nowhere",
    ],
)
def test_wrong_grammars_are_refused(server: RunningServer, grammar: str) -> None:
    answer = server.client.post(TEXT, json={**BODIES[TEXT], "grammar": grammar})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "grammar"


OPEN = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "boolean"}}}}}


def test_objects_may_be_closed_by_the_request_or_the_server(smollm2_tokenizer: Tokenizer) -> None:
    for default in (False, True):
        config = ServerConfig(closed_objects=default)
        with scripted_server(smollm2_tokenizer, "openai", "responses", config=config) as running:
            running.script = Script(["{}"])
            for path in (CHAT, TEXT, RESPONSES):
                for given in (None, False, True):
                    params_of(running, path, {"closed_objects": given})
                    expected = default if given is None else given
                    assert running.last_request.options.closed_objects is expected


def test_closed_objects_hold_for_calls_and_for_answers_beside_them(fake: ScriptedServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": OPEN}}
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": OPEN}}
    for fields in ({"tool_choice": "required"}, {"response_format": answer}):
        for closed, count in ((False, 0), (True, 2 if "tool_choice" in fields else 4)):
            body = {"tools": [tool], **fields, "closed_objects": closed}
            grammar = params_of(fake, CHAT, body).structured_outputs.grammar
            assert grammar.count('"additionalProperties": false') == count


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_model_that_wants_keys_of_its_own_gets_none(server: RunningServer, path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    body = {**BODIES[path], "guided_json": schema, "max_tokens": 30, "temperature": 0, "logit_bias": {}}
    comma = server.client.post("/tokenize", json={"prompt": ","}).json()["tokens"][0]
    body["logit_bias"] = {str(comma): 60}
    texts = []
    for closed in (False, True):
        answer = server.client.post(path, json={**body, "closed_objects": closed}).json()["choices"][0]
        texts.append(answer["message"]["content"] if path == CHAT else answer["text"])
    assert "," in texts[0]
    assert set(json.loads(texts[1])) == {"a"}
