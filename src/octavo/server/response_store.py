"""Responses that clients may refer to later, stored in SQLite: in memory, or in the file of `--response-store`.

Each response belongs to the API key of its request and is hidden from other keys. The store is bounded: when it is
full, the oldest responses of the key that takes the most space are removed. One thread does all the work, in order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from octavo.private_database import open_private
from octavo.server.event_log import EventLogs

T = TypeVar("T")

MAX_RESPONSES = 10_000
MAX_MEMORY_BYTES = 64 << 20
MAX_FILE_BYTES = 1 << 30
_APPLICATION_ID = 0x0C7A50
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, size INTEGER NOT NULL, content TEXT);
CREATE INDEX IF NOT EXISTS sizes ON responses (owner, size);
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, and all items that it answers, including the items of earlier responses."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class BackgroundRun:
    """A response that is being made while no request waits for it.

    snapshot: returns the response so far
    """

    owner: str
    snapshot: Callable[[], dict[str, Any]]
    input_items: list[dict[str, Any]]
    task: asyncio.Task[None]

    async def cancel(self) -> None:
        """Cancel the response and wait until it has been stored."""
        self.task.cancel()
        await asyncio.wait({self.task})


class ResponseStore:
    """The stored responses of one server.

    salt: salt for the owners' names, which stay the same after a restart with the same file
    running: background responses by id; they are stored when they end
    logs: the events of background responses that are streamed
    path: a file, or None for memory
    max_bytes, max_responses: beyond these limits, the oldest responses of the owner with the most bytes are removed

    Raises UsageError if the file cannot be used.
    """

    def __init__(
        self, path: str | None = None, *, max_bytes: int | None = None, max_responses: int = MAX_RESPONSES
    ) -> None:
        self.max_bytes = max_bytes or (MAX_MEMORY_BYTES if path is None else MAX_FILE_BYTES)
        self.max_responses = max_responses
        self.running: dict[str, BackgroundRun] = {}
        self.logs = EventLogs()
        self._thread = ThreadPoolExecutor(1, "octavo-responses")
        self._database, self.salt = open_private(
            None if path is None else Path(path),
            f"--response-store {path}",
            _TABLES,
            application_id=_APPLICATION_ID,
            salt=secrets.token_bytes(16),
            synchronous="NORMAL",
        )

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Store or replace a response. This returns at once; later calls find the response."""
        self._thread.submit(self._put, owner, stored)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the response, or None if this owner has none with that id."""
        run = self.running.get(response_id)
        if run is not None and run.owner == owner:
            return StoredResponse(run.snapshot(), run.input_items)
        rows = await self._run(
            lambda: self._database.execute(
                "SELECT content FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            ).fetchall()
        )
        return StoredResponse(**json.loads(rows[0][0])) if rows else None

    async def delete(self, owner: str, response_id: str) -> bool:
        """Remove the response. Return False if this owner has none with that id."""

        def work() -> int:
            with self._database:
                query = "DELETE FROM responses WHERE id = ? AND owner = ?"
                return self._database.execute(query, (response_id, owner)).rowcount

        return await self._run(work) > 0

    async def close(self) -> None:
        """End all background responses, and the thread once it has written everything."""
        for run in tuple(self.running.values()):
            await run.cancel()
        self._thread.submit(self._database.close)
        self._thread.shutdown(wait=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _put(self, owner: str, stored: StoredResponse) -> None:
        response_id = stored.response["id"]
        parts = {"response": stored.response, "input_items": stored.input_items}
        content = json.dumps(parts, ensure_ascii=False)
        try:
            with self._database as database:
                values = (response_id, owner, len(content.encode()), content)
                database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?)", values)
                while self._is_full():
                    [largest] = database.execute(
                        "SELECT owner FROM responses GROUP BY owner ORDER BY SUM(size) DESC LIMIT 1"
                    ).fetchone()
                    database.execute(
                        "DELETE FROM responses WHERE rowid = (SELECT MIN(rowid) FROM responses WHERE owner = ?)",
                        (largest,),
                    )
        except sqlite3.Error as error:
            logger.error("response %s was not stored: %s", response_id, error)

    def _is_full(self) -> bool:
        count, size = self._database.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM responses").fetchone()
        return bool(count > self.max_responses or size > self.max_bytes)
