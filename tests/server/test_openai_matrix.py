"""docs/openai.md is up to date, and what it says is true: every field is sent, right and wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from octavo.engine.text_model import TextModel
from octavo.server.app import endpoint_modules
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server, with_infill
from tools.openai_matrix import ROUTES, Route, render

OTHERS = ("ollama", "ollama_embed", "ollama_models", "llama_cpp", "llama_embedding")
PAGE = Path(__file__).parents[2] / "docs" / "openai.md"


@pytest.fixture(scope="module")
def server(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    modules = ("openai", "embeddings", "rerank", "responses", "messages", "tgi", "tokenize", *OTHERS)
    with scripted_server(with_infill(smollm2_tokenizer), *modules) as running:
        running.script = Script(["Hel", "lo"])
        running.client.texts = TextModel(scoring="cosine")
        yield running


def assert_names(body: dict[str, Any], name: str) -> None:
    """The error says which field it is about: as its param, or in its words where the protocol has no param."""
    error = body["error"]
    param = error.get("param") if isinstance(error, dict) else None
    if param is not None:
        assert re.split(r"[.\[]", param)[0] == name, body
    else:
        message = error if isinstance(error, str) else error["message"]
        assert re.search(rf"\b{name}\b", message), body


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run: python tools/openai_matrix.py > docs/openai.md"


def test_no_kind_of_request_is_missing() -> None:
    routes = [route for module in endpoint_modules() for route in module.router.routes if isinstance(route, APIRoute)]
    bodies = {route.body_field.field_info.annotation for route in routes if route.body_field is not None}
    assert bodies == {route.model for route in ROUTES if not route.nest}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path + route.nest)
def test_what_is_right_is_answered(server: ScriptedServer, route: Route) -> None:
    wrong = {}
    for name, entry in route.described().items():
        answer = server.post(route.path, route.request({**entry.needs, name: entry.right}))
        if answer.status_code != 200:
            wrong[name] = answer.text
    if "reasoning_effort" in wrong:  # what an effort is, only a template that speaks of it knows
        assert_names(json.loads(wrong.pop("reasoning_effort")), "reasoning_effort")
    assert wrong == {}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path + route.nest)
def test_what_is_wrong_is_refused_by_name(server: ScriptedServer, route: Route) -> None:
    fields = {name: ({**entry.needs, name: entry.wrong}, entry) for name, entry in route.described().items()}
    for name, (body, entry) in fields.items():
        if name == "continue_final_message":
            body = {name: True}
        answer = server.post(route.path, route.request(body))
        is_model = name == "model"
        assert answer.status_code == (404 if is_model else 400), (name, entry.wrong, answer.text)
        assert_names(answer.json(), name)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path + route.nest)
def test_what_is_not_there_is_refused_by_name(server: ScriptedServer, route: Route) -> None:
    for name, value in route.refused.items():
        answer = server.post(route.path, route.request({name: value}))
        assert answer.status_code == 400, (name, answer.text)
        assert_names(answer.json(), name)
