"""docs/add_protocol.md is true: the protocol that it writes down is found by its folder alone, and works."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.errors import UsageError
from octavo.server import protocols
from octavo.server.app import build_app, route_modules
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server

PAGE = Path(__file__).parents[2] / "docs" / "add_protocol.md"
SAY = "/parley/say"
HI = {"turns": [{"by": "guest", "says": "Hi", "mood": "fine"}]}
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the page, in a folder beside those of the package. Nothing else is told of them."""
    beside = tmp_path_factory.mktemp("protocols")
    parley = beside / "parley"
    parley.mkdir()
    (parley / "__init__.py").write_text('"""A made-up protocol."""\n')
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (parley / name).write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocols, "__path__", [*protocols.__path__, str(beside)])
        yield parley
    for name in [name for name in sys.modules if name.startswith("octavo.server.protocols.parley")]:
        del sys.modules[name]
    vars(protocols).pop("parley", None)


@pytest.fixture(scope="module")
def server(smollm2_tokenizer: Tokenizer, folder: Path) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, folder.name, config=ServerConfig(api_key=("secret",))) as running:
        running.http.headers.update(KEY)
        yield running


@pytest.fixture(autouse=True)
def script(server: ScriptedServer) -> None:
    server.script = Script(["Hel", "lo"])


def test_the_page_has_every_file(folder: Path) -> None:
    named = set(re.findall(r"^\| `(\w+\.py)` \|", PAGE.read_text(), re.MULTILINE))
    assert {path.name for path in folder.iterdir() if path.suffix == ".py"} == named


def test_it_answers_a_chat(server: ScriptedServer) -> None:
    body = {**HI, "at_most": 9, "seed": 3, "priority": 2}
    answer = server.post(SAY, body)
    assert answer.json() == {"by": "host", "says": "Hello", "ended": "stop", "words": 2}
    request = server.last_request
    assert (request.params.max_tokens, request.params.sampling.seed, request.options.priority) == (9, 3, 2)
    assert "Hi" in server.client.tokenizer.decode(request.prompt.token_ids)


def test_it_streams(server: ScriptedServer) -> None:
    text = server.post(SAY, {**HI, "stream": True}).text
    events = [tuple(line.partition(": ")[2] for line in block.splitlines()) for block in text.strip().split("\n\n")]
    assert [(kind, json.loads(data)) for kind, data in events] == [
        ("says", {"says": "Hel"}),
        ("says", {"says": "lo"}),
        ("ended", {"ended": "stop", "words": 2}),
    ]


@pytest.mark.parametrize(
    ("body", "about", "complaint"),
    [
        ({"turns": []}, "turns", "turns"),
        ({**HI, "colour": "red"}, "colour", "colour"),
        ({**HI, "temperature": -1}, "temperature", "temperature"),
        ({**HI, "at_most": -2}, "at_most", "at_most"),
        ({"turns": [{"by": "guest", "says": "a " * 2000}]}, "turns", "tokens"),
        ({"turns": [{"by": "guest", "shows": "aGk="}]}, "turns[0].shows", "turns[0].shows is an image, but fake reads"),
    ],
)
def test_errors_have_its_form_and_its_fields(
    server: ScriptedServer, body: dict[str, Any], about: str, complaint: str
) -> None:
    answer = server.post(SAY, body)
    assert answer.status_code == 400
    assert answer.json() == {
        "complaint": answer.json()["complaint"],
        "about": about,
        "request": answer.headers["x-request-id"],
    }
    assert complaint in answer.json()["complaint"]


@pytest.mark.parametrize(("path", "key", "status"), [(SAY, {}, 401), (f"{SAY}/louder", KEY, 404)])
def test_errors_before_its_routes_have_its_form(
    server: ScriptedServer, path: str, key: dict[str, str], status: int
) -> None:
    answer = httpx.post(server.url + path, json=HI, headers=key)
    assert (answer.status_code, set(answer.json())) == (status, {"complaint", "about", "request"})


def test_an_error_in_a_stream_has_its_form(server: ScriptedServer) -> None:
    server.script = Script(["Hel"], error=UsageError("no more", param="max_tokens"))
    last = server.post(SAY, {**HI, "stream": True}).text.strip().split("\n\n")[-1].splitlines()
    assert last[0] == "event: complaint"
    assert set(json.loads(last[1].removeprefix("data: "))) == {"complaint", "about", "request"}


def test_the_document_has_its_schemas() -> None:
    described = build_app(ServerConfig(), route_modules(), lambda *_: None).openapi()["paths"][SAY]["post"]
    assert described["tags"] == ["parley"]

    def members(status: str) -> set[str]:
        return set(described["responses"][status]["content"]["application/json"]["schema"]["properties"])

    assert members("200") == {"by", "says", "ended", "words"}
    assert members("400") == members("503") == {"complaint", "about", "request"}


def test_its_paths_are_not_those_of_another_server(smollm2_tokenizer: Tokenizer) -> None:
    """The other families are unchanged by the new one."""
    with scripted_server(smollm2_tokenizer, "openai") as plain:
        answer = plain.post(SAY, HI)
        assert (answer.status_code, set(answer.json())) == (404, {"error"})
