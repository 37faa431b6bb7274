"""The worker of batches over an application that answers as the test wants: age, the end of its time, a full disk."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from octavo.batches import store as store_module
from octavo.batches.journal import Journal
from octavo.batches.lines import LineResult
from octavo.batches.store import ENDED_S, MAX_ACTIVE_BATCHES, BatchStore, StoredBatch, StoreFullError, new_batch
from octavo.errors import UsageError
from octavo.server.batch_worker import BatchWorker
from octavo.server.http.in_memory import BATCH, BatchCaller
from octavo.server.observability.exposition import export
from octavo.server.observability.metrics import ServerMetrics
from tests.support.waiting import wait_until_async

Answering = Callable[[BatchCaller, Any], Awaitable[None]]


class NoModels:
    """Stands for a `ModelManager` whose model was never loaded."""

    def entry(self, name: str | None) -> None:
        raise KeyError(name)


def application(answering: Answering) -> Any:
    """Answers every line with 200 when `answering` has returned."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        await answering(scope[BATCH], body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"usage": {"prompt_tokens": 2}}).encode()})

    return app


async def run_batch(path: Path, answering: Answering, num_lines: int, *, seconds: float = 60.0) -> StoredBatch:
    worker = BatchWorker(str(path), NoModels(), b"salt", age_s=0.05)  # type: ignore[arg-type]
    worker.start(application(answering))
    try:
        batch = await worker.use(lambda store: prepared(store, num_lines, seconds))
        await worker.add(batch)

        async def has_ended() -> StoredBatch | None:
            found = await worker.find("owner", batch.id)
            return found if found is not None and found.has_ended else None

        return cast("StoredBatch", await wait_until_async(has_ended))
    finally:
        await worker.close()


def prepared(store: BatchStore, num_lines: int, seconds: float = 60.0) -> StoredBatch:
    upload = store.new_upload()
    lines = [
        {"custom_id": f"n{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": str(i)}}
        for i in range(num_lines)
    ]
    upload.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = store.add_file("owner", upload, "batch", "in")
    batch = new_batch(
        "owner",
        endpoint="/v1/completions",
        input_file_id=file.id,
        completion_window="24h",
        metadata=None,
        output_expires_s=None,
    )
    batch.times["expires_at"] = int(time.time() + seconds)
    return batch


def test_one_line_at_a_time_ages_where_live_requests_leave_no_room(tmp_path: Path) -> None:
    at_once, most = 0, 0

    async def busy(caller: BatchCaller, _: Any) -> None:
        nonlocal at_once, most
        if caller.priority > 0:
            await asyncio.Event().wait()  # no room, for ever
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)  # timed: a second one would begin meanwhile
        at_once -= 1

    batch = asyncio.run(run_batch(tmp_path, busy, 3))
    assert (batch.status, batch.completed) == ("completed", 3)
    assert most == 1


def test_a_batch_whose_time_is_over_keeps_what_it_has(tmp_path: Path) -> None:
    async def half(_: BatchCaller, body: Any) -> None:
        if int(body["prompt"]) % 2:
            await asyncio.Event().wait()

    batch = asyncio.run(run_batch(tmp_path, half, 4, seconds=1.0))
    assert (batch.status, batch.completed, batch.failed) == ("expired", 2, 2)
    assert batch.usage == {"input_tokens": 4}
    store = BatchStore(tmp_path, b"salt")
    errors = [json.loads(line) for line in store.content_of(batch.error_file_id).read_text().splitlines()]
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}
    assert store.file("owner", batch.error_file_id) is not None
    store.close()


def test_a_full_disk_fails_the_batch_and_keeps_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Journal.put

    def put(self: Journal, result: LineResult) -> None:
        if self.num_completed == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, result)

    monkeypatch.setattr(Journal, "put", put)

    async def at_once(_: BatchCaller, __: Any) -> None:
        return

    batch = asyncio.run(run_batch(tmp_path, at_once, 200))
    assert (batch.status, batch.errors[0]["code"]) == ("failed", "storage_error")
    assert "No space left" in batch.errors[0]["message"]
    store = BatchStore(tmp_path, b"salt")
    assert len(store.content_of(batch.output_file_id).read_text().splitlines()) == 2
    store.close()


@pytest.mark.parametrize("num_refused", [1, 2])
def test_a_database_without_room_fails_the_batch(
    tmp_path: Path, num_refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = BatchStore.add_file, []

    def add_file(self: BatchStore, *args: Any) -> Any:
        if args[2] == "batch_output" and len(refused) < num_refused:
            refused.append(args)
            raise sqlite3.OperationalError("database or disk is full")
        return real(self, *args)

    monkeypatch.setattr(BatchStore, "add_file", add_file)

    async def at_once(_: BatchCaller, __: Any) -> None:
        return

    batch = asyncio.run(run_batch(tmp_path, at_once, 2))
    assert (batch.status, batch.errors[0]["message"]) == ("failed", "the store: database or disk is full")
    assert len(refused) == num_refused


def test_a_store_has_one_server_and_limits_a_key(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, b"first")
    with pytest.raises(UsageError, match="in use by another server"):
        BatchStore(tmp_path, b"second")
    for _ in range(MAX_ACTIVE_BATCHES):
        store.add_batch(prepared(store, 1))
    with pytest.raises(StoreFullError, match="64 batches are running or waiting"):
        store.add_batch(prepared(store, 1))
    store.close()
    again = BatchStore(tmp_path, b"second")
    assert again.salt == b"first"  # the names of its owners
    assert len(list(again.active())) == MAX_ACTIVE_BATCHES
    again.close()
    (tmp_path / "batches.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(UsageError, match="--batch-store"):
        BatchStore(tmp_path, b"salt")
    (tmp_path / "batches.sqlite").unlink()
    (tmp_path / "batches.sqlite").mkdir()
    with pytest.raises(UsageError, match=r"--batch-store .*: Is a directory"):
        BatchStore(tmp_path, b"salt")


def ended(store: BatchStore, owner: str = "owner") -> StoredBatch:
    """A batch of the store that has ended, with a file of results."""
    batch = prepared(store, 1)
    batch.owner = owner
    store.add_batch(batch)
    store.content_of(batch.output_file_id).write_text("{}\n")
    store.add_file(owner, store.content_of(batch.output_file_id), "batch_output", "out", None, batch.output_file_id)
    batch.enter("completed")
    store.save(batch)
    return batch


def test_ended_batches_go_with_their_results_when_their_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path, b"salt")
    old, now = ended(store), time.time()
    running = prepared(store, 1)
    store.add_batch(running)
    monkeypatch.setattr(store_module.time, "time", lambda: now + ENDED_S - 60)
    late = ended(store)
    monkeypatch.setattr(store_module.time, "time", lambda: now + ENDED_S + 60)
    assert store.batch("owner", old.id) is None
    assert store.file("owner", old.output_file_id) is None
    assert not store.content_of(old.output_file_id).exists()
    assert [batch.id for batch in store.batches("owner", None, 10)] == [late.id, running.id]
    assert store.content_of(late.output_file_id).exists()
    store.close()
    monkeypatch.setattr(store_module.time, "time", lambda: now + 2 * ENDED_S)
    again = BatchStore(tmp_path, b"salt")  # a server that was off meanwhile
    assert not again.content_of(late.output_file_id).exists()
    assert [batch.id for batch in again.active()] == [running.id]
    again.close()


def test_a_bounded_number_of_ended_batches_of_a_key_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_ENDED_BATCHES", 3)
    store = BatchStore(tmp_path, b"salt")
    other = ended(store, "other")
    batches = [ended(store) for _ in range(5)]
    assert [batch.id for batch in store.batches("owner", None, 10)] == [batch.id for batch in batches[:1:-1]]
    assert [store.content_of(batch.output_file_id).exists() for batch in batches] == [False] * 2 + [True] * 3
    assert store.batch("other", other.id) is not None
    store.close()


def test_figures_of_batches(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    async def run() -> ServerMetrics:
        worker = BatchWorker(str(tmp_path), NoModels(), b"salt")  # type: ignore[arg-type]
        figures = worker.figures

        async def answering(_: BatchCaller, __: Any) -> None:
            seen.append((figures.num_batches, figures.num_running, figures.num_running_lines))

        worker.start(application(answering))
        try:
            batch = await worker.use(lambda store: prepared(store, 3))
            await worker.add(batch)

            async def has_ended() -> bool:
                return figures.ended["completed"] > 0

            await wait_until_async(has_ended)
        finally:
            await worker.close()
        metrics = ServerMetrics()
        metrics.batches = figures
        return metrics

    text = export(asyncio.run(run()), "")[0].decode()
    assert seen[-1][:2] == (1, 1)
    assert seen[-1][2] >= 1
    for line in (
        'vllm:batches_ended_total{status="completed"} 1.0',
        'vllm:batch_lines_total{result="completed"} 3.0',
        'vllm:batch_lines_total{result="failed"} 0.0',
        'vllm:batch_tokens_total{kind="input_tokens"} 6.0',
        'vllm:batches{state="running"} 0.0',
        'vllm:batches{state="waiting"} 0.0',
        "vllm:batch_lines_running 0.0",
    ):
        assert line in text
