"""Errors that no endpoint has seen, in the words of the protocol whose path was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from starlette.routing import Route

from octavo.server.app import route_modules
from octavo.server.http.route_table import DEFAULT_DIALECT, Dialect, RouteTable
from tests.support.shell_server import Reply, Shell, request, running_shell

KEY = {"Authorization": "Bearer sesame"}
MESSAGES = "/v1/messages"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
MAX_BODY_BYTES = 2000


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with running_shell(list(route_modules()), api_key=("sesame",), max_body_bytes=MAX_BODY_BYTES) as running:
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[Shell]:
    with running_shell(list(route_modules()), api_key=("sesame",), body_timeout=0.3) as running:
        yield running


@pytest.fixture(scope="module")
def client(shell: Shell) -> anthropic.Anthropic:
    host, port = shell.address
    return anthropic.Anthropic(base_url=f"http://{host}:{port}", api_key="sesame", max_retries=0, timeout=20)


def kind_of(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"].startswith("req-")
    assert error.request_id == body["request_id"]
    assert error.response.headers["x-request-id"] == body["request_id"]
    return str(body["error"]["type"])


def test_a_wrong_key(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client.with_options(api_key="other").messages.create(model="m", max_tokens=9, messages=HI)
    assert kind_of(refused.value) == "authentication_error"


def test_paths_that_do_not_exist(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.batches.list()
    assert kind_of(missing.value) == "not_found_error"


def test_a_body_that_is_too_large(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.RequestTooLargeError) as refused:
        client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "a" * MAX_BODY_BYTES}])
    assert kind_of(refused.value) == "request_too_large"


@pytest.mark.parametrize(("path", "method"), [(MESSAGES, "PUT"), ("/generate", "PUT"), ("/v1/responses", "PUT")])
def test_other_methods(shell: Shell, path: str, method: str) -> None:
    check(path, shell.exchange(request(path, None, KEY, method=method)), 405)


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens", "/generate", "/generate_stream", "/"])
def test_what_the_guard_refuses(shell: Shell, impatient: Shell, path: str) -> None:
    typed = {**KEY, "Content-Type": "text/html"}
    check(path, shell.exchange(request(path, b"{}")), 401)
    check(path, shell.exchange(request(path, b"{}", typed)), 415)
    check(path, shell.exchange(request(path, b"{", KEY)), 400)
    check(path, impatient.exchange(request(path, b"{}", KEY)[:-1]), 408)
    check(path, shell.exchange(request(path, b"{}", {**KEY, "Host": "a/?x="})), 400)


@pytest.mark.parametrize("path", [MESSAGES, "/generate", "/v1/responses"])
def test_what_is_refused_before_the_guard(shell: Shell, path: str) -> None:
    check(path, shell.exchange(request(path, b"{}", {f"X-{i}": "y" for i in range(101)})), 431)
    check(
        path,
        shell.exchange(b"POST %b?a=b HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n" % path.encode()),
        400,
    )


def test_connections_above_the_limit() -> None:
    with running_shell(list(route_modules()), max_connections=1) as shell, shell.connect():
        for path in (MESSAGES, "/generate", "/v1/chat/completions"):
            check(path, shell.exchange(request(path, b"{}")), 503)


@pytest.mark.parametrize("path", ["/api/chat", "/api/nothing", "/api/blobs/sha256:0/more", "/api/"])
def test_all_paths_of_ollama_speak_as_ollama(shell: Shell, path: str) -> None:
    for reply in (
        shell.exchange(request(path, b"{}")),  # no key
        shell.exchange(request(path, b"{}", {**KEY, "Host": "a/?x="})),
        shell.exchange(request(path, b"{}", {f"X-{i}": "y" for i in range(101)})),
        shell.exchange(request(path, b"[", KEY)),
    ):
        assert reply.status in (400, 401, 404, 431)
        body = json.loads(reply.body)
        assert body.keys() == {"error"}
        assert isinstance(body["error"], str)


def test_a_path_speaks_as_what_it_lies_below() -> None:
    mine, root = Dialect(id_header=b"id"), Dialect(id_header=b"root-id")
    routes = [Route("/a", check), Route("/", check), Route("/c", check)]
    routes[0].dialect, routes[1].dialect = mine, root  # type: ignore[attr-defined]
    table = RouteTable(routes)
    assert table.dialect("/a") is table.dialect("/a/b/c") is mine
    assert table.dialect("/") is root
    deep = Dialect(root="/d/")
    routes.append(Route("/d/e", check))
    routes[-1].dialect = deep  # type: ignore[attr-defined]
    rooted = RouteTable(routes)
    assert rooted.dialect("/d/") is rooted.dialect("/d/f/g") is deep
    assert rooted.dialect("/d") is DEFAULT_DIALECT
    assert table.dialect("/ab") is table.dialect("") is table.dialect("/b/a/") is table.dialect("/c") is DEFAULT_DIALECT


def check(path: str, reply: Reply, status: int) -> None:
    assert reply.status == status
    body = json.loads(reply.body)
    if path.startswith(MESSAGES):
        assert body.keys() == {"type", "error", "request_id"}
        assert body["error"]["message"]
        assert reply.headers["request-id"] == reply.headers["x-request-id"] == body["request_id"]
    elif path.startswith("/v1"):
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert "request-id" not in reply.headers
    else:
        assert body.keys() == {"error", "error_type"}
        assert body["error_type"] == ("overloaded" if status == 503 else "validation")
