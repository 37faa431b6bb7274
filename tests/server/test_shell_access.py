"""Access control: API keys, hosts and origins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from octavo.errors import UsageError
from octavo.server.app import build_app, route_modules
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.http.access import ApiKeys, configured_keys, is_loopback
from octavo.server.http.route_table import RouteTable
from tests.support.shell_server import Shell, running_shell

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}]}
INVALID = "invalid_request_error"


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with running_shell(api_key=("sesame", "second")) as running:
        yield running


@pytest.fixture(scope="module")
def open_shell() -> Iterator[Shell]:
    with running_shell() as running:
        yield running


@pytest.fixture(scope="module")
def cors_shell() -> Iterator[Shell]:
    with running_shell(cors_origin=("https://app.example",)) as running:
        yield running


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, None),
        ({"Authorization": "Basic c2VzYW1lOg=="}, None),
        ({"Authorization": "sesame"}, None),
        ({"Authorization": "Bearer"}, "invalid_api_key"),
        ({"Authorization": "Bearer sesam"}, "invalid_api_key"),
        ({"Authorization": "Bearer sesame2"}, "invalid_api_key"),
        ({"Authorization": "Bearer SESAME"}, "invalid_api_key"),
        ({"Authorization": "Bearer sesame second"}, "invalid_api_key"),
        ({"Authorization": "Bearer \xe9"}, "invalid_api_key"),
        ({"X-Api-Key": "wrong"}, "invalid_api_key"),
        ({"X-Api-Key": "wrong", "Authorization": "Bearer sesame"}, "invalid_api_key"),
    ],
)
def test_wrong_keys(shell: Shell, headers: dict[str, str], code: str | None) -> None:
    reply = shell.post(CHAT, GOOD, headers)
    assert reply.error == (401, INVALID, None, code)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "sesame" not in reply.message


@pytest.mark.parametrize(
    "path", [f"{CHAT}?api_key=sesame", f"{CHAT}?key=sesame", f"{CHAT}?Authorization=Bearer+sesame"]
)
def test_keys_in_the_query_do_not_count(shell: Shell, path: str) -> None:
    assert shell.post(path, GOOD).error == (401, INVALID, None, None)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sesame"},
        {"Authorization": "bearer second"},
        {"X-Api-Key": "second"},
        {"X-Api-Key": "sesame", "Authorization": "Bearer sesame"},
    ],
)
def test_right_keys(shell: Shell, headers: dict[str, str]) -> None:
    assert shell.post(CHAT, GOOD, headers).status == 200


def test_tenants_follow_the_keys(shell: Shell, open_shell: Shell) -> None:
    shell.probe.tenants.clear()
    for key in ("sesame", "second", "sesame"):
        shell.post(CHAT, GOOD, {"Authorization": f"Bearer {key}"})
    first, second, third = shell.probe.tenants
    assert first == third != second
    assert "sesame" not in first
    open_shell.post(CHAT, GOOD)
    assert open_shell.probe.tenants[-1] == ""


@pytest.mark.parametrize("path", ["/openapi.json", "/metrics", "/tokenize", "/dashboard", "/v1/models", "/v1/x"])
def test_paths_that_exist_or_not_need_a_key(shell: Shell, path: str) -> None:
    assert shell.get(path).error == (401, INVALID, None, None)


def test_public_paths(shell: Shell) -> None:
    assert shell.get("/health/live").status == 200
    assert shell.get("/").status == 200
    with running_shell(api_key=("sesame",), protect_health=True) as protected:
        assert protected.get("/health/live").error == (401, INVALID, None, None)


def test_every_route_of_the_server_needs_a_key_unless_it_says_otherwise() -> None:
    """The list comes from the endpoints themselves, so that a new one cannot be forgotten."""
    modules = list(route_modules())
    public = {"/health", "/health/live", "/health/ready"}.union(*(getattr(m, "PUBLIC_PATHS", ()) for m in modules))
    routes = [route for module in modules for route in module.router.routes]
    assert all(isinstance(route, APIRoute) for route in routes)
    # Whoever adds to this list has thought about it: none of these pages shows anything of anybody.
    for path in public:
        assert path in {
            "/",
            "/dashboard",
            "/docs",
            "/health",
            "/health/live",
            "/health/ready",
            "/favicon.ico",
        } or path.startswith(("/web/", "/static/", "/assets/"))
    with running_shell(modules, api_key=("sesame",)) as shell:
        for route in routes:
            below = any(p != "/" and p.endswith("/") and route.path.startswith(p) for p in public)
            is_public = route.path in public or below
            path = route.path.replace("{", "").replace("}", "").replace(":path", "")
            for method in route.methods - {"HEAD"} - ({"GET"} if is_public else set()):
                reply = shell.post(path, b"{}") if method == "POST" else shell.get(path)
                assert reply.status == 401, path


def test_the_time_says_nothing_about_the_key() -> None:
    right = "k" * 64
    keys = ApiKeys([right], b"salt")

    def seconds(shared: int) -> float:
        header = [(b"x-api-key", ("k" * shared).ljust(64, "x").encode())]
        begin = time.thread_time()
        for _ in range(20):
            with pytest.raises(ApiError):
                keys.tenant(header)
        return time.thread_time() - begin

    samples: dict[int, list[float]] = {0: [], 32: [], 63: []}
    for _ in range(150):
        for shared, times in samples.items():
            times.append(seconds(shared))
    none, half, nearly = map(min, samples.values())
    assert abs(half - none) < 0.15 * none
    assert abs(nearly - none) < 0.15 * none


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert configured_keys(ServerConfig(api_key=("zero",), api_key_file=str(file))) == ["zero", "one", "two"]


@pytest.mark.parametrize("content", [None, "", "\n \n", "k\u00e9y\n", "a\x07\n"])
def test_files_without_usable_keys(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content, "utf-8")
    with pytest.raises(UsageError):
        configured_keys(ServerConfig(api_key_file=str(file)))


# Pages in the user's browser


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "192.168.0.1"},
        {"Host": "localhost.evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "null"},
        {"Origin": "file://"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "127.0.0.1.evil.example", "Origin": "http://127.0.0.1"},
    ],
)
def test_foreign_pages_on_loopback(open_shell: Shell, headers: dict[str, str]) -> None:
    for reply in (open_shell.post(CHAT, GOOD, headers), open_shell.get("/health/live", headers)):
        assert reply.error == (403, INVALID, None, "forbidden_host")
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8000"},
        {"Host": "127.0.0.1"},
        {"Host": "[::1]:80"},
        {"Host": "LOCALHOST"},
        {"Host": "octavo.localhost"},
        {"Origin": "http://localhost:3000"},
        {"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"},
    ],
)
def test_own_pages_on_loopback(open_shell: Shell, headers: dict[str, str]) -> None:
    reply = open_shell.post(CHAT, GOOD, headers)
    assert reply.status == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]


def test_a_proxy_may_use_its_own_name_if_a_key_is_asked_for(shell: Shell) -> None:
    headers = {"Authorization": "Bearer sesame", "Host": "llm.example"}
    assert shell.post(CHAT, GOOD, headers).status == 200
    assert shell.post(CHAT, GOOD, {**headers, "Origin": "https://llm.example"}).status == 200
    assert shell.post(CHAT, GOOD, {**headers, "Origin": "https://evil.example"}).status == 403
    assert shell.post(CHAT, GOOD, {"Host": "llm.example"}).status == 401


def test_cors_when_configured(cors_shell: Shell) -> None:
    reply = cors_shell.post(CHAT, GOOD, {"Origin": "https://app.example"})
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert reply.headers["vary"] == "Origin"
    reply = cors_shell.post(CHAT, b"{", {"Origin": "https://app.example"})
    assert reply.error == (400, INVALID, None, "invalid_json")
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert cors_shell.post(CHAT, GOOD, {"Origin": "https://evil.example"}).status == 403


def test_preflight(cors_shell: Shell, open_shell: Shell) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Origin": "https://app.example",
    }
    data = _options(asked)
    reply = cors_shell.exchange(data)
    assert reply.status == 204
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert reply.headers["x-request-id"]
    assert cors_shell.exchange(_options({**asked, "Origin": "https://evil.example"})).status == 403
    assert open_shell.exchange(data).status == 403
    assert open_shell.exchange(_options({**asked, "Origin": "http://localhost:1"})).error[0] == 405


def _options(headers: dict[str, str]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"OPTIONS {CHAT} HTTP/1.1\r\nHost: localhost\r\n{lines}Connection: close\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost.", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("localhost.x", False),
        ("", False),
        ("2130706433", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_route_that_the_guard_cannot_know_is_refused() -> None:
    app = build_app(ServerConfig(), [], lambda *_: None)
    app.mount("/static", lambda *_: None)
    with pytest.raises(TypeError, match="not a plain route"):
        RouteTable(app.routes)


def test_the_document_names_no_error_of_the_framework(open_shell: Shell) -> None:
    document = open_shell.get("/openapi.json").body.decode()
    assert CHAT in document
    assert "HTTPValidationError" not in document
    assert '"422"' not in document


def test_localhost_stands_for_the_pages_of_this_machine() -> None:
    """llama.cpp's word. A page of any port may read the answers, other pages may not."""
    with running_shell(cors_origin=("localhost,https://app.example",)) as shell:
        for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:1", "https://app.example"):
            reply = shell.post(CHAT, GOOD, {"Origin": origin})
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, origin)
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            assert shell.exchange(_options(asked)).headers["access-control-allow-origin"] == origin
        for origin in ("https://localhost.evil.example", "null", "file://localhost", "https://evil.example"):
            reply = shell.post(CHAT, GOOD, {"Origin": origin})
            assert "access-control-allow-origin" not in reply.headers, origin
    with running_shell(host="0.0.0.0", api_key=("sesame",), cors_origin=("localhost",)) as shell:
        headers = {"Authorization": "Bearer sesame", "Origin": "http://localhost:5173"}
        assert shell.post(CHAT, GOOD, headers).headers["access-control-allow-origin"] == "http://localhost:5173"
        evil = {**headers, "Origin": "https://evil.example"}
        assert "access-control-allow-origin" not in shell.post(CHAT, GOOD, evil).headers


@pytest.mark.parametrize("second", ["http://localhost", "https://evil.example"])
def test_two_origins_are_refused(open_shell: Shell, second: str) -> None:
    """Checks may read the first one and browsers' proxies the last one."""
    reply = open_shell.post(CHAT, GOOD, {"Origin": f"http://localhost\r\nOrigin: {second}"})
    assert reply.error == (400, "invalid_request_error", None, "invalid_value")
