"""docs/openai.md is up to date, and what it says is true: every field is sent, right and wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from fastapi.routing import APIRoute

from octavo.batches.store import BatchStore
from octavo.engine.texts.text_model import TextModel
from octavo.server.app import route_modules
from octavo.server.config import ServerConfig
from octavo.server.endpoints.adapters import LoadRequest, UnloadRequest
from octavo.server.protocols.llama_cpp.slot_routes import SlotBody
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server, with_infill
from tools.client_fields import CHAT, CLIENT_FIELDS, COMPLETIONS, COUNT, EMBEDDINGS, MESSAGES, RESPONSES
from tools.field_table import HONOURED, IGNORED, REFUSED, fate
from tools.openai_matrix import BATCHES, ROUTES, Route, main, render

PAGE = Path(__file__).parents[2] / "docs" / "openai.md"


def store_with_a_file(folder: Path) -> Path:
    """The file that the batches of the page name."""
    lines = folder / "in.jsonl"
    lines.write_text(json.dumps({"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hi"}]}}))
    store = BatchStore(folder, b"salt")
    store.add_file("", lines, "batch", "in.jsonl", file_id=BATCHES.body["input_file_id"])
    store.close()
    return folder


@pytest.fixture(scope="module")
def server(smollm2_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    modules = ("openai", "rerank", "responses", "anthropic", "batches", "tgi", "tokenize", "ollama", "llama_cpp")
    config = ServerConfig(batch_store=str(store_with_a_file(tmp_path_factory.mktemp("batches"))))
    with scripted_server(with_infill(smollm2_tokenizer), *modules, config=config) as running:
        running.script = Script(["Hel", "lo"])
        running.client.texts = TextModel(scoring="cosine")
        yield running


def assert_names(body: dict[str, Any], name: str) -> None:
    """The error says which field it is about: as its param, or in its words where the protocol has no param."""
    error = body["error"]
    param = error.get("param") if isinstance(error, dict) else None
    if param is not None:
        assert re.match(rf"{re.escape(name)}($|[.\[])", param), body
    else:
        message = error if isinstance(error, str) else error["message"]
        assert re.search(rf"\b{name}\b", message), body


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run: python -m tools.openai_matrix > docs/openai.md"
    assert main(["--check"]) == 0


def test_no_kind_of_request_is_missing() -> None:
    routes = [route for module in route_modules() for route in module.router.routes if isinstance(route, APIRoute)]
    bodies = {route.body_field.field_info.annotation for route in routes if route.body_field is not None}
    elsewhere = {LoadRequest, UnloadRequest, SlotBody}  # they need adapters or a folder: test_adapters, test_llama_cpp
    assert bodies - elsewhere == {route.model for route in ROUTES if not route.nest}


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


# The parameters of the installed libraries; those of streams are in classes of their own.
LIBRARIES: dict[str, tuple[str, Any]] = {
    CHAT: ("OpenAI", openai.types.chat.completion_create_params.CompletionCreateParamsBase),
    COMPLETIONS: ("OpenAI", openai.types.completion_create_params.CompletionCreateParamsBase),
    RESPONSES: ("OpenAI", openai.types.responses.response_create_params.ResponseCreateParamsBase),
    EMBEDDINGS: ("OpenAI", openai.types.EmbeddingCreateParams),
    MESSAGES: ("Anthropic", anthropic.types.message_create_params.MessageCreateParamsBase),
    COUNT: ("Anthropic", anthropic.types.MessageCountTokensParams),
}
RECORDED = {"openai": "2.54", "anthropic": "2.12"}
OLLAMA_MODELS = {
    "/api/generate": ollama._types.GenerateRequest,
    "/api/chat": ollama._types.ChatRequest,
    "/api/chat options": ollama._types.Options,
    "/api/embed": ollama._types.EmbedRequest,
    "/api/embeddings": ollama._types.EmbeddingsRequest,
    "/api/show": ollama._types.ShowRequest,
    "/api/pull": ollama._types.PullRequest,
}
PRODUCT_ROUTES = [(product, path) for product, lists in CLIENT_FIELDS.items() for path in lists]


@pytest.mark.parametrize("path", LIBRARIES)
def test_the_fields_of_the_libraries_are_all_there(path: str) -> None:
    product, params = LIBRARIES[path]
    library = openai if product == "OpenAI" else anthropic
    if not library.__version__.startswith(f"{RECORDED[product.lower()]}."):
        pytest.skip(f"the list is that of {product} {RECORDED[product.lower()]}")
    known = set(CLIENT_FIELDS[product][path].split())
    assert set(params.__annotations__) <= known
    assert known - set(params.__annotations__) <= {"stream", "temperature", "top_k", "top_p"}


@pytest.mark.parametrize("path", OLLAMA_MODELS)
def test_the_fields_of_ollamas_library_are_all_there(path: str) -> None:
    """Its server has more; a newer library may."""
    assert OLLAMA_MODELS[path].model_fields.keys() <= set(CLIENT_FIELDS["Ollama"][path].split())
    assert CLIENT_FIELDS["Ollama"].keys() == OLLAMA_MODELS.keys()


@pytest.mark.parametrize(("product", "path"), PRODUCT_ROUTES, ids=" ".join)
def test_the_table_of_other_products_is_true(server: ScriptedServer, product: str, path: str) -> None:
    """Refused fields are refused by name, and named ones are in the header of the answer."""
    [route] = [route for route in ROUTES if f"{route.path} {route.nest}".strip() == path]
    for name in CLIENT_FIELDS[product][path].split():
        entry = route.described().get(name)
        if fate(route, name) == HONOURED:
            continue
        value, needs = ("x", {}) if entry is None else (entry.right, entry.needs)
        if fate(route, name) == REFUSED:
            answer = server.post(route.path, route.request({name: "x" if value is None else value}))
            assert answer.status_code == 400, (name, answer.text)
            assert_names(answer.json(), name)
            continue
        assert fate(route, name) == IGNORED
        answer = server.post(route.path, route.request({**needs, name: value}))
        assert name in re.split(r", |\.", answer.headers["x-octavo-ignored-fields"]), name
