"""Runs the server's batches: one at a time per API key, through the server's own routes, with the lowest priority."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import ASGIApp

from octavo.batches.journal import Journal
from octavo.batches.lines import BatchLine, LineError, LineResult, failed, read_lines, with_seed
from octavo.batches.runner import SPARE_LINES, BatchRunner, LineAnswer
from octavo.batches.store import MAX_LINES, BatchStore, StoredBatch, temporary_folder
from octavo.errors import OctavoError
from octavo.generation_request import BATCH_PRIORITY
from octavo.private_database import reason_of
from octavo.server.http.in_memory import BatchCaller, post
from octavo.server.models.model_manager import ModelManager
from octavo.server.observability.batch_figures import BatchFigures

T = TypeVar("T")

logger = logging.getLogger(__name__)

_WIDTH = 32  # lines at once for a model that is not loaded
_SAVE_S = 0.5  # seconds between updates of a running batch's counts
_AGE_S = 120.0  # after this long without a result, one line runs like a live request
_MAX_ERRORS = 100  # errors reported about a refused file


class BatchWorker:
    """Runs the batches in a store, on the event loop and one thread for the store.

    path: folder of the store, or None for a temporary one that is deleted with the server
    age_s: see `_AGE_S`
    salt: salt for the owners' names in a new store

    Raises UsageError if the folder cannot be used.
    """

    def __init__(self, path: str | None, models: ModelManager, salt: bytes, *, age_s: float = _AGE_S) -> None:
        self._models = models
        self.salt = salt  # for owners' names; a store that outlives the server has its own salt
        self._age_s = age_s
        self._thread = ThreadPoolExecutor(1, "octavo-batches")  # all reads and writes of the store, in order
        self._temporary: Path | None = None
        self._store: BatchStore | None = None
        if path is not None:
            self._store = BatchStore(Path(path), salt)
            self.salt = self._store.salt
        self._app: ASGIApp | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by owner
        self._running: dict[str, _RunningBatch] = {}  # by id
        self.figures = BatchFigures()

    def start(self, app: ASGIApp) -> None:
        """Resume the batches in the store. Call this from the event loop.

        app: application that answers the lines
        """
        self._app = app
        if self._store is not None:
            active = list(self._store.active())
            self.figures.num_batches = len(active)
            for owner in {batch.owner for batch in active}:
                self._wake(owner)

    async def stop(self) -> None:
        """Stop all batches. They resume when a server starts with the same store."""
        self._app = None
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Stop all batches and close the store."""
        await self.stop()
        self._thread.shutdown(wait=True)
        if self._store is not None:
            self._store.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    async def use(self, work: Callable[[BatchStore], T]) -> T:
        """Run `work` on the store, in the store's thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._opened()))

    def submit(self, work: Callable[[BatchStore], object]) -> None:
        """Run `work` on the store's thread after its earlier tasks, without waiting for it. Errors are logged."""

        def run() -> None:
            try:
                work(self._opened())
            except Exception:
                logger.exception("a result of a batch was not written")

        self._thread.submit(run)

    async def add(self, batch: StoredBatch) -> None:
        """Queue a batch. Raises StoreFullError."""
        await self.use(lambda store: store.add_batch(batch))
        self.figures.num_batches += 1
        self._wake(batch.owner)

    async def find(self, owner: str, batch_id: str) -> StoredBatch | None:
        """Return a batch with its current progress, or None if this owner has no batch with that id."""
        running = self._running.get(batch_id)
        if running is not None and running.batch.owner == owner:
            return running.batch
        return await self.use(lambda store: store.batch(owner, batch_id))

    async def batches(self, owner: str, after: str | None, limit: int) -> list[StoredBatch]:
        """Return the batches created before the batch with id `after`, newest first, with their current progress."""
        stored = await self.use(lambda store: store.batches(owner, after, limit))
        return [self._running[batch.id].batch if batch.id in self._running else batch for batch in stored]

    async def cancel(self, batch: StoredBatch) -> StoredBatch:
        """Start cancelling a batch that has not ended."""
        running = self._running.get(batch.id)
        if running is not None:
            batch = running.batch
        if batch.has_ended or batch.status == "cancelling":
            return batch
        batch.enter("cancelling")
        await self.use(lambda store: store.save(batch))
        if running is not None:
            running.stop()
        else:
            self._wake(batch.owner)
        return batch

    def _opened(self) -> BatchStore:
        if self._store is None:
            self._temporary = temporary_folder()
            self._store = BatchStore(self._temporary, self.salt)
        return self._store

    # --- the batches of an owner ---

    def _wake(self, owner: str) -> None:
        task = self._tasks.get(owner)
        if self._app is not None and (task is None or task.done()):
            self._tasks[owner] = asyncio.create_task(self._run_all(owner), name="batches")

    async def _run_all(self, owner: str) -> None:
        def next_one(store: BatchStore) -> StoredBatch | None:
            return next((batch for batch in store.active() if batch.owner == owner), None)

        try:
            while (batch := await self.use(next_one)) is not None:
                await self._run_or_fail(batch)
                if batch.has_ended:
                    self.figures.num_batches -= 1
                    self.figures.ended[batch.status] += 1
        except (OSError, sqlite3.Error) as error:  # not even the failure could be written
            logger.error("batches stop until the next one arrives or the server restarts: %s", reason_of(error))

    async def _run_or_fail(self, batch: StoredBatch) -> None:
        try:
            await self._run(batch)
        except OctavoError as error:
            await self._fail(batch, [{"code": "invalid_input", "message": str(error)}])
        except (OSError, sqlite3.Error) as error:
            logger.error("%s stops: %s", batch.id, error)
            with suppress(OSError, sqlite3.Error):
                await self.use(lambda store: _publish(store, batch))
            await self._fail(batch, [{"code": "storage_error", "message": f"the store: {reason_of(error)}"}])

    async def _run(self, batch: StoredBatch) -> None:
        running = self._running[batch.id] = _RunningBatch(batch, self, self._age_s)
        self.figures.num_running = len(self._running)
        try:
            if batch.status == "validating":
                await self._validate(batch)
            if not batch.has_ended and self._app is not None:
                await running.run(self._app)
        finally:
            del self._running[batch.id]
            self.figures.num_running = len(self._running)

    async def _validate(self, batch: StoredBatch) -> None:
        """Read all lines of the batch's file. One invalid line fails the whole file."""
        total, errors, model = await self.use(lambda store: _checked(store, batch))
        batch.total, batch.model = total, model
        if errors:
            await self._fail(batch, errors)
        elif batch.status == "validating":  # otherwise it has been cancelled
            batch.enter("in_progress")
            await self.use(lambda store: store.save(batch))

    async def _fail(self, batch: StoredBatch, errors: list[dict[str, Any]]) -> None:
        batch.errors = errors
        batch.enter("failed")
        await self.use(lambda store: store.save(batch))

    def width(self, model: str | None) -> int:
        """Return the number of lines that each owner with a running batch may have in progress.

        The owners share the engine's rows and a few spare lines equally. Live requests have priority over all lines.
        """
        with suppress(OctavoError, KeyError):
            info = self._models.entry(model).info
            if info is not None:
                return (info.max_num_seqs + SPARE_LINES) // max(len(self._running), 1)
        return _WIDTH // max(len(self._running), 1)


def _checked(store: BatchStore, batch: StoredBatch) -> tuple[int, list[dict[str, Any]], str | None]:
    """Return the number of lines, their errors, and the model named in the first line."""
    errors: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    model: str | None = None

    def note(code: str, message: str, line: int | None, param: str | None = None) -> None:
        errors.append({"code": code, "message": message, "line": line, "param": param})

    for line in _lines_of(store, batch):
        if len(errors) >= _MAX_ERRORS:
            break
        if isinstance(line, LineError):
            note(line.code, f"line {line.number}: {line.message}", line.number, line.param)
        elif line.custom_id in seen:
            first = seen[line.custom_id]
            note(
                "duplicate_custom_id",
                f"lines {first} and {line.number} have the same custom_id",
                line.number,
                "custom_id",
            )
        elif not seen:
            named = line.body.get("model")
            model = named if isinstance(named, str) else None
        seen.setdefault(line.custom_id, line.number)
        if len(seen) > MAX_LINES:
            note("too_many_lines", f"the file has more than {MAX_LINES} lines; create several batches", line.number)
            break
    if not seen:
        note("empty_file", "the file has no lines", None)
    return len(seen), errors, model


def _lines_of(store: BatchStore, batch: StoredBatch) -> Iterator[BatchLine | LineError]:
    with store.content_of(batch.input_file_id).open("rb") as file:
        yield from read_lines(file, batch.endpoint)


class _RunningBatch:
    """A batch whose lines are running. `stop` or its time limit ends it early."""

    def __init__(self, batch: StoredBatch, worker: BatchWorker, age_s: float) -> None:
        self.batch = batch
        self._worker = worker
        self._age_s = age_s
        self._lines: asyncio.Task[None] | None = None
        self._saved_at = self._ended_at = time.monotonic()
        self._has_aged = False
        self._problem: OSError | None = None
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        if self._lines is not None:
            self._lines.cancel()

    async def run(self, app: ASGIApp) -> None:
        batch, use = self.batch, self._worker.use
        journal = await use(lambda store: _journal(store, batch))
        try:
            await use(lambda _: _count(batch, journal))
            if batch.status == "in_progress":
                await self._run_lines(app, journal)
            await use(lambda _: _count(batch, journal))  # once all results are written
            if self._problem is not None:
                raise self._problem
            was_cancelled = batch.status == "cancelling"
            code = "batch_cancelled" if was_cancelled else "batch_expired"
            is_cut = await use(lambda store: _end_rest(store, batch, journal, code))
        finally:
            with suppress(OSError):  # a full disk ends the batch
                await use(lambda _: journal.end())
        if not was_cancelled:
            batch.enter("finalizing")
        await use(lambda store: _publish(store, batch))
        batch.enter("cancelled" if was_cancelled else "expired" if is_cut else "completed")
        await use(lambda store: store.save(batch))

    async def _run_lines(self, app: ASGIApp, journal: Journal) -> None:
        """Run the lines that have no result until all are done, the batch is cancelled or its time is up."""
        lines = await self._worker.use(lambda store: _left(store, self.batch, journal))
        put = partial(self._put, journal)
        runner = BatchRunner(partial(self._call, app), lambda: self._worker.width(self.batch.model), put)
        self._lines = asyncio.create_task(runner.run(lines))
        try:
            seconds = self.batch.times["expires_at"] - time.time()
            await asyncio.wait({self._lines}, timeout=max(seconds, 0.0))
        finally:
            self.stop()
            await asyncio.wait({self._lines})
        if not self._lines.cancelled():
            self._lines.result()  # raises the error that ended the lines

    def _put(self, journal: Journal, result: LineResult) -> None:
        """Write a result in the store's thread. The batch's counts are updated there at most twice a second."""
        now = self._ended_at = time.monotonic()
        figures = self._worker.figures
        figures.lines["failed" if result.is_failed else "completed"] += 1
        if not result.is_failed:
            figures.tokens.update(result.usage)
        self._worker.submit(lambda _: self._write(journal, result))
        if now - self._saved_at >= _SAVE_S:
            self._saved_at = now
            self._worker.submit(lambda _: _count(self.batch, journal))

    def _write(self, journal: Journal, result: LineResult) -> None:
        """Write a result. A full disk ends the batch, because further results would be lost."""
        try:
            if self._problem is None:
                journal.put(result)
        except OSError as error:
            self._problem = error
            self._loop.call_soon_threadsafe(self.stop)

    async def _call(self, app: ASGIApp, line: BatchLine) -> LineAnswer:
        body = json.dumps(with_seed(line, f"{self.batch.id} {line.number}")).encode()
        request_id, owner = f"req-{secrets.token_hex(12)}", self.batch.owner

        async def run(priority: int) -> LineAnswer:
            caller = BatchCaller(owner, priority)
            return await post(app, line.url, body, caller=caller, request_id=request_id)

        task = asyncio.create_task(run(BATCH_PRIORITY))
        self._worker.figures.num_running_lines += 1
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._age_s)
                if not task.done() and self._may_age():
                    task.cancel()
                    return await run(0)
            return task.result()
        finally:
            self._worker.figures.num_running_lines -= 1
            task.cancel()

    def _may_age(self) -> bool:
        """Return True if live requests have kept this batch waiting for too long and none of its other lines has been
        let in for that reason.
        """
        idle_s = time.monotonic() - self._ended_at
        may_age = idle_s >= self._age_s and not self._has_aged
        self._has_aged = idle_s >= self._age_s
        return may_age


def _journal(store: BatchStore, batch: StoredBatch) -> Journal:
    return Journal(store.content_of(batch.output_file_id), store.content_of(batch.error_file_id))


def _left(store: BatchStore, batch: StoredBatch, journal: Journal) -> Iterator[BatchLine | LineError]:
    return (line for line in _lines_of(store, batch) if not journal.has(line.custom_id))


def _count(batch: StoredBatch, journal: Journal) -> None:
    """Update the counts of a batch from its files."""
    batch.completed, batch.failed = journal.num_completed, journal.num_failed
    batch.usage = dict(journal.usage)


def _end_rest(store: BatchStore, batch: StoredBatch, journal: Journal, code: str) -> bool:
    """Write an error as the result of every line that has none. Return False if there are no such lines."""
    rest = _left(store, batch, journal) if journal.num_completed + journal.num_failed < batch.total else ()
    is_cut = False
    for line in rest:
        is_cut = True
        journal.put(failed(line, code, f"the batch was {code.removeprefix('batch_')} before this request ran"))
    _count(batch, journal)
    return is_cut


def _publish(store: BatchStore, batch: StoredBatch) -> None:
    """Turn the results into downloadable files, and drop empty ones."""
    names = {batch.output_file_id: batch.completed, batch.error_file_id: batch.failed}
    for file_id, count in names.items():
        path = store.content_of(file_id)
        if count:
            filename = f"{batch.id}_{file_id.rpartition('-')[2]}.jsonl"
            store.add_file(batch.owner, path, "batch_output", filename, batch.output_expires_s, file_id)
        else:
            path.unlink(missing_ok=True)
    store.save(batch)
