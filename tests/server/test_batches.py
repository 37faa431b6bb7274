"""`/v1/files` and `/v1/batches` with the official client: results, cancellation, owners, a server that is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
from starlette.requests import Request

from octavo.batches.store import MAX_FILE_BYTES
from octavo.generation_request import BATCH_PRIORITY, RequestOptions
from octavo.server.errors import ApiError
from octavo.server.generation.spec import read_options
from octavo.server.protocols.batches.request import Upload
from tests.support.server import RunningServer, running_server
from tests.support.waiting import wait_until

NO_OPTIONS: dict[str, Any] = {option.name: None for option in fields(RequestOptions)}
ENDED = ("completed", "failed", "expired", "cancelled")


def line(name: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    if not body:
        body = {"messages": [{"role": "user", "content": f"Say {name}"}], "max_tokens": 4}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def as_file(lines: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


def client_of(server: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def begin(client: openai.OpenAI, content: bytes, **options: Any) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    endpoint = options.pop("endpoint", "/v1/chat/completions")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def wait_for(client: openai.OpenAI, batch_id: str, *states: str) -> openai.types.Batch:
    found: list[openai.types.Batch] = []

    def has_come() -> openai.types.Batch | None:
        found[:] = [client.batches.retrieve(batch_id)]
        return found[0] if found[0].status in states else None

    return cast("openai.types.Batch", wait_until(has_come, lambda: found, seconds=120.0))


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    if file_id is None:
        return {}
    found = [json.loads(each) for each in client.files.content(file_id).content.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def metric(server: RunningServer, name: str) -> float:
    """The sum of the samples whose names and labels begin so."""
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(name))


def test_a_batch_from_its_file_to_its_results(server: RunningServer) -> None:
    client = client_of(server)
    first_tokens = metric(server, "vllm:time_to_first_token_seconds_count")
    wrong = line("wrong", messages="text")
    batch = begin(
        client,
        as_file([line("a"), wrong, line("b"), line("c")]),
        metadata={"job": "7"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert batch.status in ("validating", "in_progress")
    done = wait_for(client, batch.id, *ENDED)
    assert done.status == "completed"
    assert metric(server, "vllm:time_to_first_token_seconds_count") == first_tokens  # those are of live requests
    assert metric(server, 'vllm:batch_lines_total{result="completed"}') >= 3
    assert done.metadata == {"job": "7"}
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (4, 3, 1)
    answers, errors = results(client, done.output_file_id), results(client, done.error_file_id)
    assert (answers.keys(), errors.keys()) == ({"a", "b", "c"}, {"wrong"})
    bodies = [each["response"]["body"] for each in answers.values()]
    assert all(body["object"] == "chat.completion" for body in bodies)
    assert errors["wrong"]["response"]["status_code"] == 400
    assert done.usage is not None
    assert done.usage.output_tokens == sum(body["usage"]["completion_tokens"] for body in bodies)
    assert done.usage.input_tokens == sum(body["usage"]["prompt_tokens"] for body in bodies)
    assert done.completed_at is not None
    assert done.in_progress_at is not None
    output = client.files.retrieve(done.output_file_id or "")
    assert (output.purpose, (output.expires_at or 0) - output.created_at) == ("batch_output", 7200)
    with pytest.raises(openai.ConflictError, match="it cannot be cancelled"):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "The sky", "max_tokens": 3}),
        ("/v1/embeddings", {"input": "The sky"}),
        ("/v1/responses", {"input": "Say yes", "max_output_tokens": 3}),
    ],
)
def test_other_endpoints(server: RunningServer, endpoint: str, body: dict[str, Any]) -> None:
    client = client_of(server)
    batch = begin(client, as_file([line("a", endpoint, **body)]), endpoint=endpoint)
    done = wait_for(client, batch.id, *ENDED)
    (answer,) = results(client, done.output_file_id).values()
    assert answer["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"not json\n", "invalid_json_line"),
        (as_file([line("a"), line("b"), line("a")]), "duplicate_custom_id"),
        (as_file([line("a", "/v1/embeddings", input="x")]), "invalid_request"),
        (as_file([line("a", messages=[], stream=True)]), "invalid_request"),
        (b'{"prompt": "x"}\n', "missing_required_parameter"),
    ],
)
def test_a_wrong_file_fails_as_a_whole(server: RunningServer, content: bytes, code: str) -> None:
    client = client_of(server)
    done = wait_for(client, begin(client, content).id, *ENDED)
    assert done.status == "failed"
    assert done.errors is not None
    assert [error.code for error in done.errors.data or []] == [code]
    assert done.output_file_id is None


def test_a_cancelled_batch_keeps_what_it_has(server: RunningServer) -> None:
    client = client_of(server)
    lines = [line(f"n{number}", messages=[{"role": "user", "content": "Go"}], max_tokens=200) for number in range(400)]
    batch = begin(client, as_file(lines))
    wait_for(client, batch.id, "in_progress")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = wait_for(client, batch.id, *ENDED)
    assert done.status == "cancelled"
    answers, errors = results(client, done.output_file_id), results(client, done.error_file_id)
    assert not answers.keys() & errors.keys()
    assert answers.keys() | errors.keys() == {f"n{number}" for number in range(400)}
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_files_are_listed_in_pages_and_removed(server: RunningServer) -> None:
    client = client_of(server)
    names = [client.files.create(file=(f"{i}.txt", b"x" * i), purpose="user_data").id for i in range(3)]
    found = client.files.list(purpose="user_data", limit=2)
    assert [file.id for file in found.data] == [names[2], names[1]]
    assert [file.id for file in client.files.list(purpose="user_data", order="asc")] == names  # all pages
    file = client.files.retrieve(names[2])
    assert (file.filename, file.bytes, file.purpose) == ("2.txt", 2, "user_data")
    assert client.files.content(names[2]).content == b"xx"
    for name in names:
        assert client.files.delete(name).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(name)
    kept = client.files.create(
        file=("kept", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert kept.expires_at == kept.created_at + 3600


def test_wrong_uploads_and_batches_are_refused_by_name(server: RunningServer) -> None:
    def upload(data: dict[str, str], files: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/files", data=data, files=files, **options)

    file = {"file": ("in", b"x")}
    cases = [
        (upload({"purpose": "nothing"}, file), "purpose"),
        (upload({}, file), "purpose"),
        (upload({"purpose": "batch"}, {"other": ("in", b"x")}), "file"),
        (upload({"purpose": "batch"}, [("file", ("a", b"x")), ("file", ("b", b"x"))]), "several files"),
        (upload({"purpose": "batch", "x": "y" * 5000}, file), "too long"),
        (upload({"purpose": "batch", "expires_after[seconds]": "5"}, file), "expires_after"),
        (httpx.post(f"{server.url}/v1/files", json={}), "multipart/form-data"),
        (httpx.post(f"{server.url}/v1/files", content=b"x", headers={"content-type": "multipart/form-data"}), "multi"),
        (
            httpx.post(
                f"{server.url}/v1/files",
                content=b"--b\r\nbroken",
                headers={"content-type": "multipart/form-data; boundary=b"},
            ),
            "form",
        ),
    ]
    for response, part in cases:
        assert response.status_code in (400, 415), response.text
        assert part in response.text
    client = client_of(server)
    good = client.files.create(file=("in", as_file([line("a")])), purpose="batch").id
    other = client.files.create(file=("in", b"x"), purpose="user_data").id
    for changed, part in (
        ({"endpoint": "/v1/nothing"}, "endpoint"),
        ({"input_file_id": "file-absent"}, "file-absent"),
        ({"input_file_id": "../../etc/passwd"}, "there is no file"),
        ({"input_file_id": other}, "purpose"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "99d"}, "completion_window"),
        ({"completion_window": "²d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"x" * 65: "y"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ({"window": "24h"}, "window"),
    ):
        body = {"input_file_id": good, "endpoint": "/v1/completions", "completion_window": "24h", **changed}
        response = httpx.post(f"{server.url}/v1/batches", json=body)
        assert response.status_code in (400, 404), response.text
        assert part in response.text


def test_a_file_that_is_announced_as_too_large_is_refused_at_once(server: RunningServer) -> None:
    url = httpx.URL(server.url)
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_FILE_BYTES + (2 << 20)}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("in_file", [True, False])
def test_a_file_that_becomes_too_large_is_refused(tmp_path: Path, in_file: bool) -> None:
    beginning = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' if in_file else b"\r\n"
    chunks = [beginning, *([b"x" * 100_000] * 30)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
    with pytest.raises(ApiError) as caught:
        asyncio.run(Upload(tmp_path / "upload", max_bytes=150_000).receive(request))
    assert caught.value.status in (400, 413)
    assert len(chunks) > 15


def test_a_killed_server_goes_on_and_other_keys_see_nothing(smollm2_path: Path, tmp_path: Path) -> None:
    arguments = (f"smollm2={smollm2_path}", "--batch-store", str(tmp_path / "store"), "--api-key", "one", "--api-key")
    lines = [line(f"n{number}", "/v1/completions", prompt=f"{number}", max_tokens=16) for number in range(60)]
    with running_server(*arguments, "two", "--max-num-seqs", "4", exit_code=-signal.SIGKILL) as first:
        client, other = client_of(first, "one"), client_of(first, "two")
        batch = begin(client, as_file(lines), endpoint="/v1/completions")
        for read in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                read(batch.id)
        with pytest.raises(openai.NotFoundError):
            other.files.content(batch.input_file_id)
        assert other.batches.list().data == []
        assert other.files.list().data == []

        def num_completed() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return 0 if counts is None else counts.completed

        assert wait_until(lambda: (count := num_completed()) > 5 and count) < len(lines)
        for process in (first.process, *first.children()):
            process.send_signal(signal.SIGKILL)
        first.process.wait()
    with running_server(*arguments, "two") as second:
        client = client_of(second, "one")
        done = wait_for(client, batch.id, *ENDED)
        assert done.status == "completed"
        answers = results(client, done.output_file_id)
        assert answers.keys() == {f"n{number}" for number in range(60)}
        assert done.usage is not None
        assert done.usage.output_tokens == sum(
            each["response"]["body"]["usage"]["completion_tokens"] for each in answers.values()
        )
        with pytest.raises(openai.NotFoundError):
            client_of(second, "two").batches.retrieve(batch.id)


def test_a_batch_goes_on_after_its_engine_was_killed(smollm2_path: Path, tmp_path: Path) -> None:
    """The server starts the engine again, and each line has one answer."""
    lines = [line(f"n{number}", "/v1/completions", prompt=f"{number}", max_tokens=16) for number in range(40)]
    arguments = (f"smollm2={smollm2_path}", "--batch-store", str(tmp_path / "store"), "--max-num-seqs", "4")
    with running_server(*arguments) as server:
        client = client_of(server)
        batch = begin(client, as_file(lines), endpoint="/v1/completions")

        def num_completed() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return 0 if counts is None else counts.completed

        assert wait_until(lambda: (count := num_completed()) > 3 and count) < len(lines)
        [engine] = [child for child in server.children() if "octavo.core.main" in " ".join(child.cmdline())]
        engine.kill()
        done = wait_for(client, batch.id, *ENDED)
        assert (done.status, done.request_counts and done.request_counts.failed) == ("completed", 0)
        assert results(client, done.output_file_id).keys() == {f"n{number}" for number in range(40)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ],
)
def test_the_tier_flex_has_the_priority_of_batches(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}{path}", json={**body, "service_tier": "flex"}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] == "flex"
    assert "x-octavo-ignored-fields" not in answer.headers
    assert read_options(SimpleNamespace(service_tier="flex", **NO_OPTIONS)).priority == BATCH_PRIORITY
    assert read_options(SimpleNamespace(service_tier="flex", **{**NO_OPTIONS, "priority": 3})).priority == 3
    assert read_options(SimpleNamespace(service_tier="auto", **NO_OPTIONS)).priority == 0
