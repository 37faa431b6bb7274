"""Instructor: answers as Pydantic models, in each of its modes, with a second try after a wrong answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.support.client_turns import call_of
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer
from tests.support.server import RunningServer

instructor = pytest.importorskip("instructor", reason="instructor is not installed")

RIGHT, WRONG = '{"kind": "city", "name": "Oslo"}', '{"kind": "town", "name": "Oslo"}'
QUESTION: list[Any] = [{"role": "user", "content": "What is Oslo?"}]
TEXT_MODES = ("JSON", "JSON_SCHEMA", "MD_JSON")
TOOL_MODES = ("TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS")

pytestmark = pytest.mark.filterwarnings("ignore:Mode.TOOLS_STRICT is deprecated")


class Place(BaseModel):
    kind: Literal["city", "river"]
    name: str


class Kind(BaseModel):
    is_city: bool


def connect(url: str, mode: str) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    return instructor.from_openai(client, mode=getattr(instructor.Mode, mode))


def say(mode: str, answer: str) -> str:
    if mode == "MD_JSON":
        return f"```json\n{answer}\n```"
    return call_of("Place", answer) if "TOOLS" in mode else answer


@pytest.mark.parametrize("mode", [*TEXT_MODES, *TOOL_MODES])
def test_every_mode_with_a_second_try(fake: ScriptedServer, mode: str) -> None:
    asked: list[int] = []

    def script(_request: Any) -> Script:
        asked.append(1)
        return Script([say(mode, WRONG if len(asked) == 1 else RIGHT)])

    fake.script = script
    client = connect(fake.url, mode)
    place = client.chat.completions.create(model="fake", response_model=Place, messages=QUESTION, max_retries=2)
    assert isinstance(place, Place)  # a class of instructor's own below it, which no other instance equals
    assert (place.kind, place.name) == ("city", "Oslo")
    assert len(asked) == 2


def test_parts_and_several_answers(fake: ScriptedServer) -> None:
    text = call_of("Place", RIGHT)
    fake.script = Script([text[:40], text[40:60], text[60:]])
    completions = connect(fake.url, "TOOLS").chat.completions
    parts = list(completions.create_partial(model="fake", response_model=Place, messages=QUESTION))
    assert parts[-1].model_dump() == {"kind": "city", "name": "Oslo"}
    fake.script = Script([text, text])
    client = connect(fake.url, "PARALLEL_TOOLS")
    many = client.chat.completions.create(model="fake", response_model=Iterable[Place], messages=QUESTION)
    assert [place.name for place in many] == ["Oslo", "Oslo"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_real_model_is_held_to_the_schema(server: RunningServer, mode: str) -> None:
    client = connect(server.url, mode)
    answer = client.chat.completions.create(
        model="smollm2", response_model=Kind, messages=QUESTION, max_retries=1, max_tokens=60, temperature=0
    )
    assert isinstance(answer, Kind)
