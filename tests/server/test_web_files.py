"""The pages as files: what they are allowed, what they load, and that an installed Octavo has them."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import octavo.server
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient
from tests.support.scripted_app import scripted_app

WEB = Path(octavo.server.__file__).parent / "web"
VENDORED = sorted(f"vendor/{path.name}" for path in (WEB / "vendor").iterdir())
OWN = sorted(path.name for path in WEB.iterdir() if path.is_file())
FILES = OWN + VENDORED
DEPENDENCIES = Path(__file__).parents[2] / "docs/dependencies.md"
PAGES = {"/": "chat.html", "/dashboard": "dashboard.html", "/docs": "docs.html"}


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


@pytest.mark.parametrize("path", ["/dashboard/data", "/metrics", "/openapi.json", "/v1/models"])
def test_what_the_pages_ask_for_needs_the_key(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_generating_at_the_pages_path_needs_the_key(client: httpx.Client) -> None:
    assert client.post("/", json={"inputs": "Hi"}).status_code == 401


@pytest.mark.parametrize("name", FILES)
def test_files_are_served_as_what_they_are(client: httpx.Client, name: str) -> None:
    answer = client.get(f"/web/{name}")
    assert answer.content == (WEB / name).read_bytes()
    kind = {
        "js": "text/javascript",
        "css": "text/css",
        "html": "text/html",
        "svg": "image/svg+xml",
        "txt": "text/plain",
    }
    kind["mjs"] = kind["js"]
    assert answer.headers["content-type"].startswith(kind[name.rsplit(".")[-1]])


def test_vendored_files_are_what_the_documentation_says() -> None:
    """Nobody changed them here, and each has its version and its licence."""
    rows = re.findall(
        r"^\| `(vendor/\S+)` \| \S+ (\d+\.\d+\.\d+), .* \| `([0-9a-f]{64})` \|$", DEPENDENCIES.read_text(), re.M
    )
    scripts = [name for name in VENDORED if not name.endswith(".txt")]
    assert sorted(name for name, _, _ in rows) == scripts
    for name, version, digest in rows:
        content = (WEB / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, name
        assert version.encode() in content or name.endswith(".css"), name
        licence = (WEB / f"{name.partition('.')[0]}.LICENSE.txt").read_text()
        assert "Copyright" in licence or "Apache License" in licence


def test_licences_of_vendored_files_are_installed() -> None:
    root = DEPENDENCIES.parents[1]
    web = root / "src/octavo/server/web"  # not the installed one
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["project"]["license-files"]
    paths = [path for pattern in patterns for path in root.glob(pattern)]
    found = {path.relative_to(web).as_posix() for path in paths if web in path.parents}
    assert found == {name for name in VENDORED if name.endswith(".txt")}


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "vendor",
        "vendor/..%2fchat.js",
        "..%2f..%2ferrors.py",
        "%2e%2e/errors.py",
        "chat.html/",
        "__init__.py",
        "%00",
        "x" * 300,
        ".",
    ],
)
def test_nothing_else_is_served(client: httpx.Client, name: str) -> None:
    assert client.get(f"/web/{name}", headers={"Authorization": "Bearer sesame"}).status_code == 404


@pytest.mark.parametrize("name", OWN)
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
