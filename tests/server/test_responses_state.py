"""Stored responses, through the official client: continued, fetched, listed, cancelled, deleted; and their store."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList
from pydantic import TypeAdapter

from octavo.errors import EngineDeadError, UsageError
from octavo.server.config import ServerConfig
from octavo.server.event_log import EventLog, EventLogs
from octavo.server.response_store import ResponseStore, StoredResponse
from octavo.tokenizer.tokenizer import Tokenizer
from tests.server.test_responses import CALLS, HELLO, WEATHER, prompt_of
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "responses", config=ServerConfig(api_key=("anna", "bert"))) as running:
        running.http.headers["Authorization"] = "Bearer anna"
        yield running


@pytest.fixture(autouse=True)
def _hello(fake: ScriptedServer) -> None:
    fake.script = HELLO


def client_of(fake: ScriptedServer, key: str = "anna") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fake.url}/v1", api_key=key, max_retries=0, timeout=60)


def slow(fake: ScriptedServer, seconds: float = 30.0) -> None:
    fake.script = Script(["Hello", " there", ("", [2])], delay_s=seconds)


def begin(client: openai.OpenAI, **body: Any) -> Response:
    return client.responses.create(model="fake", input="Hi", background=True, **body)


def wait_for(client: openai.OpenAI, response: Response) -> Response:
    def ended() -> Response | None:
        now = client.responses.retrieve(response.id)
        return None if now.status == "in_progress" else now

    return wait_until(ended)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_its_last_response(fake: ScriptedServer, stream: bool) -> None:
    client = client_of(fake)
    body: dict[str, Any] = {"model": "fake", "input": "What is your name?", "instructions": "Be kind."}
    if stream:
        first = list(client.responses.create(**body, stream=True))[-1].response
    else:
        first = client.responses.create(**body)
    assert "Be kind." in prompt_of(fake)
    second = client.responses.create(model="fake", input="And mine?", previous_response_id=first.id)
    third = client.responses.create(
        model="fake", input=[{"role": "user", "content": "Hm."}], previous_response_id=second.id
    )
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    prompt = prompt_of(fake)
    parts = ["What is your name?", "Hello wörld", "And mine?", "Hello wörld", "Hm."]
    places = [prompt.find(part, 0 if i < 3 else prompt.find("And mine?")) for i, part in enumerate(parts)]
    assert -1 not in places
    assert places == sorted(places)
    assert "Be kind." not in prompt  # as the protocol has it: instructions belong to one request


def test_calls_are_answered_by_their_id(fake: ScriptedServer) -> None:
    client, fake.script = client_of(fake), CALLS
    first = client.responses.create(model="fake", input="Weather?", tools=[WEATHER])  # type: ignore[list-item]
    calls = [item for item in first.output if item.type == "function_call"]
    fake.script = HELLO
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    client.responses.create(model="fake", input=outputs, previous_response_id=first.id, tools=[WEATHER])  # type: ignore[arg-type,list-item]
    assert prompt_of(fake).count("rain") == 2
    wrong = [{"type": "function_call_output", "call_id": "nobody", "output": "rain"}]
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.call_id"):
        client.responses.create(model="fake", input=wrong, previous_response_id=first.id)  # type: ignore[arg-type]


def test_a_response_is_fetched_listed_and_deleted(fake: ScriptedServer) -> None:
    client = client_of(fake)
    items = [{"role": "user", "content": f"Number {i}"} for i in range(5)]
    made = client.responses.create(model="fake", input=items, metadata={"a": "b"})  # type: ignore[arg-type]
    assert client.responses.retrieve(made.id).to_json() == made.to_json()
    listed = client.responses.input_items.list(made.id, order="asc", limit=2)
    assert [item.content[0].text for item in listed] == [f"Number {i}" for i in range(5)]  # type: ignore[union-attr]  # all pages
    newest = client.responses.input_items.list(made.id, limit=2).data
    assert [item.content[0].text for item in newest] == ["Number 4", "Number 3"]  # type: ignore[union-attr]
    page = fake.get(f"/v1/responses/{made.id}/input_items")
    TypeAdapter(ResponseItemList).validate_json(page.text, strict=True)
    assert fake.get(f"/v1/responses/{made.id}/input_items?after=nothing").json()["error"]["param"] == "after"
    assert fake.get(f"/v1/responses/{made.id}/input_items?limit=0").status_code == 400
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)  # type: ignore[operator]


def test_strict_models_of_the_library_accept_stored_responses(fake: ScriptedServer) -> None:
    made = fake.post("/v1/responses", {"input": "Hi", "presence_penalty": 0.5, "frequency_penalty": -0.5})
    TypeAdapter(Response).validate_json(made.text, strict=True)
    body = made.json()
    assert (body["presence_penalty"], body["frequency_penalty"], body["store"]) == (0.5, -0.5, True)
    params = fake.last_request.params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)  # type: ignore[union-attr]


def test_keys_do_not_see_each_others_responses(fake: ScriptedServer) -> None:
    anna, bert = client_of(fake), client_of(fake, "bert")
    made = anna.responses.create(model="fake", input="Hi")
    slow(fake)
    running = begin(anna)
    for response in (made, running):
        for call in (bert.responses.retrieve, bert.responses.delete, bert.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(response.id)  # type: ignore[operator]
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            bert.responses.create(model="fake", input="Hi", previous_response_id=response.id)
    assert anna.responses.retrieve(made.id).id == made.id
    assert anna.responses.cancel(running.id).status == "cancelled"


def test_what_is_not_to_be_stored_is_not(fake: ScriptedServer) -> None:
    client = client_of(fake)
    made = client.responses.create(model="fake", input="Hi", store=False)
    assert made.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_response_in_the_background(fake: ScriptedServer) -> None:
    client = client_of(fake)
    slow(fake, 0.1)
    response = begin(client)
    assert (response.status, response.background, response.output) == ("in_progress", True, [])
    done = wait_for(client, response)
    assert (done.status, done.output_text) == ("completed", "Hello there")
    assert client.responses.cancel(done.id).status == "completed"
    made = client.responses.create(model="fake", input="Hi")
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        client.responses.cancel(made.id)


def test_a_response_in_the_background_is_cancelled_or_deleted(fake: ScriptedServer) -> None:
    client = client_of(fake)
    slow(fake)
    first, second = begin(client), begin(client)
    with pytest.raises(openai.BadRequestError, match="names a response that is in_progress"):
        client.responses.create(model="fake", input="Hi", previous_response_id=first.id)
    assert client.responses.cancel(first.id).status == "cancelled"
    assert client.responses.retrieve(first.id).status == "cancelled"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_errors_of_the_background(fake: ScriptedServer) -> None:
    client = client_of(fake)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        begin(client, temperature=5)
    fake.script = Script(["Hello"], error=EngineDeadError("gone"))
    failed = wait_for(client, begin(client))
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"


def test_a_stream_from_the_background_goes_on_without_its_client(fake: ScriptedServer) -> None:
    client = client_of(fake)
    slow(fake, 0.3)
    stream = client.responses.create(model="fake", input="Hi", background=True, stream=True)
    seen = list(itertools.islice(stream, 3))
    stream.close()
    response_id = seen[0].response.id  # type: ignore[union-attr]
    assert client.responses.retrieve(response_id).status == "in_progress"
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=2))
    assert [event.sequence_number for event in [*seen, *rest]] == list(range(3 + len(rest)))  # type: ignore[union-attr]
    last = rest[-1].response  # type: ignore[union-attr]
    assert (rest[-1].type, last.status, last.output_text) == ("response.completed", "completed", "Hello there")
    assert client.responses.retrieve(response_id).to_json() == last.to_json()
    again = list(client.responses.retrieve(response_id, stream=True))
    assert [event.to_json() for event in again] == [event.to_json() for event in [*seen, *rest]]
    assert list(client.responses.retrieve(response_id, stream=True, starting_after=10_000)) == []
    with pytest.raises(openai.NotFoundError):
        client_of(fake, "bert").responses.retrieve(response_id, stream=True)
    client.responses.delete(response_id)
    assert fake.get(f"/v1/responses/{response_id}?stream=true").status_code == 404


def test_the_end_of_a_stream_from_the_background(fake: ScriptedServer) -> None:
    client = client_of(fake)
    slow(fake)
    stream = client.responses.create(model="fake", input="Hi", background=True, stream=True)
    response_id = next(stream).response.id  # type: ignore[union-attr]
    client.responses.cancel(response_id)
    assert {event.type for event in stream} <= {"response.in_progress", "response.output_item.added"}
    assert client.responses.retrieve(response_id).status == "cancelled"

    fake.script = Script(["Hello"], error=EngineDeadError("gone"))
    *_, failed, error = client.responses.create(model="fake", input="Hi", background=True, stream=True)
    assert (failed.type, error.type) == ("response.failed", "error")
    assert client.responses.retrieve(failed.response.id).status == "failed"  # type: ignore[union-attr]

    fake.script = HELLO
    made = client.responses.create(model="fake", input="Hi", background=True)
    assert fake.get(f"/v1/responses/{made.id}?stream=true").json()["error"]["param"] == "stream"
    assert fake.get(f"/v1/responses/{made.id}?starting_after=1").json()["error"]["param"] == "starting_after"
    for name, value in {"stream": "maybe", "starting_after": "1e3"}.items():
        error = fake.get(f"/v1/responses/{made.id}?{name}={value}").json()["error"]
        assert (error["param"], error["message"].split()[:2]) == (name, [name, "must"])
        assert value in error["message"]
    wrong = fake.post("/v1/responses", {"input": "Hi", "background": True, "stream": True, "temperature": 9})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


def test_ignored_fields_are_named_in_the_background_too(fake: ScriptedServer) -> None:
    body = {"input": "Hi", "background": True, "reasoning": {"effort": "low"}, "request_id": "r"}
    for stream in (False, True):
        answer = fake.post("/v1/responses", {**body, "stream": stream})
        assert answer.headers["x-octavo-ignored-fields"] == "request_id, reasoning.effort"


def test_the_events_of_ended_responses_are_bounded() -> None:
    async def test() -> None:
        logs = EventLogs(max_bytes=1000)
        running = EventLog()
        logs.put("running", running)
        for i in range(9):
            log = EventLog()
            logs.put(str(i), log)
            log.add(b": a comment\n\ndata: " + b"x" * 292 + b"\n\n")
            log.end()
        logs.put("last", EventLog())
        assert [name for name in map(str, range(9)) if logs.get(name)] == ["6", "7", "8"]
        assert (logs.get("running"), (kept := logs.get("8")) and kept.num_bytes) == (running, 300)

        running.add(b"data: 0\n\ndata: 1\n\n")
        reading = asyncio.create_task(anext(running.read(2)))
        await asyncio.sleep(0)
        running.add(b"data: 2\n\n")
        assert await reading == b"data: 2\n\n"
        assert await anext(running.read(1)) == b"data: 1\n\ndata: 2\n\n"

    asyncio.run(test())


def stored(name: str, size: int = 0) -> StoredResponse:
    return StoredResponse({"id": name, "text": "x" * size}, [{"id": "item"}])


def test_the_store_is_bounded_and_spares_small_owners() -> None:
    async def test() -> None:
        store = ResponseStore(max_bytes=10_000)
        store.put("small", stored("s", 100))
        for i in range(100):
            store.put("large", stored(f"l{i}", 1000))
        assert await store.get("small", "s") == stored("s", 100)
        kept = [i for i in range(100) if await store.get("large", f"l{i}")]
        assert kept == list(range(100 - len(kept), 100))
        assert 7 <= len(kept) <= 9
        few = ResponseStore(max_responses=3)
        for i in range(5):
            few.put("a", stored(f"r{i}"))
        assert [bool(await few.get("a", f"r{i}")) for i in range(5)] == [False, False, True, True, True]
        await store.close()
        await few.close()

    asyncio.run(test())


def test_a_file_outlives_the_server_and_its_keys_keep_their_responses(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def test() -> None:
        store = ResponseStore(str(path))
        salt = store.salt
        store.put("anna", stored("r"))
        await store.close()
        again = ResponseStore(str(path))
        assert again.salt == salt
        assert await again.get("anna", "r") == stored("r")
        assert await again.get("bert", "r") is None
        assert await again.delete("anna", "r")
        assert not await again.delete("anna", "r")
        await again.close()

    asyncio.run(test())
    assert path.stat().st_mode & 0o777 == 0o600
    assert ResponseStore().salt != ResponseStore().salt


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Dear diary, " * 100)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE diary (text)")
    other.close()
    for name in ("text", "other.db", "missing/x.db", "."):
        with pytest.raises(UsageError, match="--response-store"):
            ResponseStore(str(tmp_path / name))
    assert json.dumps((tmp_path / "text").read_text()).startswith('"Dear diary')
