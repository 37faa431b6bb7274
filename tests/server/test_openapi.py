"""The OpenAPI document against the server, by Schemathesis: what fits the document and what does not, on every route.

All of Schemathesis's checks are made but one. `positive_data_acceptance` is left out: whether a request is right shows
in more than its schema (a tool's result needs its call, a value its model's limits), and those that are refused have
a check of their own here: 400 in the error envelope, with the field named.
"""

from __future__ import annotations

from collections.abc import Iterator

import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from octavo.server.app import build_app, route_modules
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_app import scripted_app

DOCUMENT = build_app(ServerConfig(), route_modules(), lambda *_: None).openapi()
OPERATIONS = {
    operation.label: operation
    for operation in (found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations())
}
# Without a body nothing can be sent that does not fit: parameters are parts of paths, where every text is right.
WITH_BODY = [label for label, operation in OPERATIONS.items() if operation.body]
HTTP = requests.Session()


class LastingClient(FakeClient):
    """Stands also for the new engines of a model that is loaded again, as after `/sleep`."""

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def url(smollm2_tokenizer: Tokenizer) -> Iterator[str]:
    with scripted_app(LastingClient(smollm2_tokenizer, Script(["Hel", "lo"])), smollm2_tokenizer) as app:
        yield app.url


def check(operation: APIOperation, mode: GenerationMode, url: str, max_examples: int) -> None:
    """Sends that many requests; Schemathesis raises for every answer that the document does not foresee."""

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        answer = case.call(base_url=url, session=HTTP, timeout=30)
        excluded = [positive_data_acceptance]
        if answer.status_code == 501:  # what the server was not started for, such as saved slots
            excluded.append(not_a_server_error)
        else:
            assert answer.status_code < 500, answer.text
        # It takes a large body's refusal for none, and what violates one branch of an `anyOf` may fit another.
        if answer.status_code == 413 or fits(case.operation.path, case.method, case.body):
            excluded.append(negative_data_rejection)
        case.validate_response(answer, excluded_checks=excluded)
        if answer.status_code == 400:
            assert_says_what_is_wrong(answer.json())

    ask()


def fits(path: str, method: str, body: object) -> bool:
    """True if the document allows this body for the route."""
    described = DOCUMENT["paths"][path][method.lower()].get("requestBody")
    if described is None or not isinstance(body, dict):  # it may also be bytes, or nothing at all
        return False
    schema = described["content"]["application/json"]["schema"]
    return jsonschema_rs.is_valid({**schema, "components": DOCUMENT["components"]}, body)


def assert_says_what_is_wrong(body: dict[str, object]) -> None:
    """In the envelope of whichever protocol it is."""
    error = body["error"]
    message = error if isinstance(error, str) else error["message"]  # type: ignore[index]
    assert message
    assert "\n" not in message
    assert "Traceback" not in message


def test_the_document_has_every_route() -> None:
    app = build_app(ServerConfig(), route_modules(), lambda *_: None)
    hidden = {"/", "/dashboard", "/dashboard/data", "/docs", "/openapi.json", "/web/{name}", "/web/vendor/{name}"}
    routes = {(route.path.replace(":path", ""), method) for route in app.routes for method in route.methods or ()}  # type: ignore[attr-defined]
    shown = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    # OpenAI's paths without their version are the same routes.
    same = {(path.removeprefix("/v1"), method) for path, method in shown if path.startswith("/v1/")} | {
        ("/ping", "POST"),
        ("/input_tokens", "POST"),
        ("/reranking", "POST"),
        ("/v1/reranking", "POST"),
    }
    unknown = {(path, method) for path, method in routes - shown - same if method != "HEAD"}
    refused = {("/api/create", "POST"), ("/api/copy", "POST"), ("/api/push", "POST"), ("/api/delete", "DELETE")}
    refused |= {("/api/blobs/{digest}", "GET"), ("/api/blobs/{digest}", "POST")}
    assert unknown == {(path, "GET") for path in hidden} | refused
    assert shown <= routes


def keys_of(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(item)


def test_limits_are_told_in_the_words_of_json_schema() -> None:
    assert {"minimum", "maximum", "exclusiveMinimum"} <= set(keys_of(DOCUMENT))
    assert set(keys_of(DOCUMENT)).isdisjoint({"ge", "gt", "le", "lt", "min_length", "max_length"})


TEXT = {"type": "text", "text": "Hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{**TEXT, "citations": {}}]}]}),
        ("/v1/messages/count_tokens", {"system": [TEXT], "messages": [{"role": "user", "content": [TEXT]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]}),
    ],
)
def test_the_document_has_lists_of_parts(path: str, body: dict[str, object]) -> None:
    assert fits(path, "post", body)


def test_every_tag_is_described() -> None:
    """A new protocol gets its line in `octavo.server.openapi`."""
    used = {tag for operations in DOCUMENT["paths"].values() for found in operations.values() for tag in found["tags"]}
    described = {tag["name"]: tag["description"] for tag in DOCUMENT["tags"]}
    assert described.keys() == used
    assert all(described.values())


EXAMPLES = {
    path: operations["post"]["requestBody"]["content"]["application/json"].get("example")
    for path, operations in DOCUMENT["paths"].items()
    if "requestBody" in operations.get("post", {})
    and "application/json" in operations["post"]["requestBody"]["content"]
}
# They need a model that scores, fills in or is pulled, a file, a slot or an adapter.
UNANSWERED = ("rerank", "score", "infill", "pull", "batches", "slots", "lora_adapter")


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_are_right(url: str, path: str) -> None:
    """The bodies that `/docs` offers to send."""
    assert EXAMPLES[path] is not None
    assert fits(path, "post", EXAMPLES[path])
    if not any(part in path for part in UNANSWERED):
        answer = HTTP.post(url + path, json=EXAMPLES[path], timeout=30)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("label", OPERATIONS)
def test_what_fits_the_document(url: str, label: str) -> None:
    check(OPERATIONS[label], GenerationMode.POSITIVE, url, 3)


@pytest.mark.parametrize("label", WITH_BODY)
def test_what_does_not_fit_the_document(url: str, label: str) -> None:
    check(OPERATIONS[label], GenerationMode.NEGATIVE, url, 3)


@pytest.mark.slow
@pytest.mark.parametrize("label", OPERATIONS)
def test_much_that_fits_the_document(url: str, label: str) -> None:
    check(OPERATIONS[label], GenerationMode.POSITIVE, url, 300)


@pytest.mark.slow
@pytest.mark.parametrize("label", WITH_BODY)
def test_much_that_does_not_fit_the_document(url: str, label: str) -> None:
    check(OPERATIONS[label], GenerationMode.NEGATIVE, url, 300)
