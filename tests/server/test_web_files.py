"""The pages as files: what they are allowed, what they load, and that an installed Octavo has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import octavo.server
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient
from tests.support.scripted_app import scripted_app

WEB = Path(octavo.server.__file__).parent / "web"
FILES = sorted(path.name for path in WEB.iterdir())
PAGES = {"/": "chat.html", "/dashboard": "dashboard.html"}


@pytest.fixture(scope="module")
def client(smollm2_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    config = ServerConfig(api_key=("sesame",))
    with (
        scripted_app(FakeClient(smollm2_tokenizer), smollm2_tokenizer, config) as app,
        httpx.Client(base_url=app.url) as client,
    ):
        yield client


@pytest.mark.parametrize("path", PAGES)
def test_pages_need_no_key_and_allow_nothing_from_elsewhere(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert client.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


@pytest.mark.parametrize("path", ["/dashboard/data", "/metrics", "/v1/models"])
def test_what_the_pages_ask_for_needs_the_key(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_generating_at_the_pages_path_needs_the_key(client: httpx.Client) -> None:
    assert client.post("/", json={"inputs": "Hi"}).status_code == 401


@pytest.mark.parametrize("name", FILES)
def test_files_are_served_as_what_they_are(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/web/{name}")
    assert answer.content == (WEB / name).read_bytes()
    kind = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kind[Path(name).suffix])


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "..%2f..%2ferrors.py", "%2e%2e/errors.py", "chat.html/", "__init__.py", "%00", "x" * 300, "."],
)
def test_nothing_else_is_served(client: httpx.Client, name: str) -> None:
    assert client.get(f"/web/{name}", headers={"Authorization": "Bearer sesame"}).status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_files_are_small_and_refer_to_nothing_elsewhere(name: str) -> None:
    text = (WEB / name).read_text()
    assert len(text.splitlines()) < 500
    for address in re.findall(r"""(?:src=|href=|from |import )["']([^"'#]+)["']|url\(([^)]+)\)""", text):
        (found,) = filter(None, address)
        assert found in PAGES or found.removeprefix("/web/").removeprefix("./") in FILES, found
    if name.endswith(".html"):
        assert "style=" not in text
        assert not re.search(r"\son\w+=", text)
    if name.endswith(".js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
