"""The files and batches of a server: SQLite for their metadata, and a folder for their contents.

Each file or batch belongs to the API key of the request that created it; other keys do not see it. All methods except
`add_file` return quickly.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.errors import UsageError
from octavo.platform import files, locks
from octavo.private_database import open_private

MAX_FILE_BYTES = 200 << 20
MAX_LINES = 50_000
MAX_OWNED_BYTES = 8 << 30
MAX_OWNED_FILES = 10_000
MAX_ACTIVE_BATCHES = 64
MAX_ENDED_BATCHES = 1000  # per key; the oldest are removed with their results
FILE_S = 30 * 24 * 3600  # how long to keep the input of a batch unless its upload sets a time
ENDED_S = 30 * 24 * 3600  # a batch and its results, after its end
_TEMPORARY, _MIN_AGE_S = "octavo-batches-", 60.0
_APPLICATION_ID = 0x0C7A51
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, purpose TEXT NOT NULL,
  filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER);
CREATE TABLE IF NOT EXISTS batches (
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, is_active INTEGER NOT NULL,
  content TEXT NOT NULL, ended_at INTEGER);
CREATE INDEX IF NOT EXISTS owned_files ON files (owner, number);
CREATE INDEX IF NOT EXISTS owned_batches ON batches (owner, number);
"""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An uploaded file or a result.

    created_at, expires_at: seconds since 1970. If expires_at is None, the file does not expire.
    """

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None


@dataclass(slots=True)
class StoredBatch:
    """A batch as the API shows it.

    times: seconds since 1970 by the name of the field, such as `completed_at`.
    output_file_id, error_file_id: ids reserved for the files. A file exists once the batch has ended, if it has any
    lines.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_s: int | None
    output_file_id: str
    error_file_id: str
    times: dict[str, int]
    status: Status = "validating"
    errors: list[dict[str, Any]] = field(default_factory=list)
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def ended_at(self) -> int | None:
        return self.times[f"{self.status}_at"] if self.has_ended else None

    def enter(self, status: Status) -> None:
        """Change the status and record the time."""
        self.status = status
        self.times[f"{status}_at"] = int(time.time())


class StoreFullError(UsageError):
    """Raised when a key has used up its quota in the store."""


def temporary_folder() -> Path:
    """Create a folder for a store. Folders left by killed processes of this user are removed."""
    for folder in Path(tempfile.gettempdir()).glob(_TEMPORARY + "*"):
        with suppress(OSError):
            lock = os.open(folder / "lock", os.O_RDWR | files.O_NOFOLLOW | files.O_CLOEXEC)
            try:
                locks.lock_now(lock)
                status = os.fstat(lock)
                # A new folder is not locked yet when it is created.
                if status.st_uid == files.user_id() and time.time() - status.st_mtime > _MIN_AGE_S:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
    return Path(tempfile.mkdtemp(prefix=_TEMPORARY))


class BatchStore:
    """Stores a server's files and batches.

    path: its folder, created if needed.
    salt: for hashing the names of owners, if the store is new.

    Only one process at a time may use it. Raises UsageError.
    """

    def __init__(self, path: Path, salt: bytes) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | files.O_CLOEXEC, 0o600)
            locks.lock_now(self._lock)
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(f"--batch-store {path} is in use by another server; give each server its own") from None
        except OSError as error:
            raise UsageError(f"--batch-store {path}: {error.strerror}") from None
        try:
            self._database, self.salt = open_private(
                path / "batches.sqlite",
                f"--batch-store {path}",
                _TABLES,
                application_id=_APPLICATION_ID,
                salt=salt,
                synchronous="FULL",
            )
        except UsageError:
            os.close(self._lock)
            raise
        for leftover in path.glob("*.upload"):
            leftover.unlink(missing_ok=True)
        self.remove_expired()

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)

    # --- files ---

    def new_upload(self) -> Path:
        """Return the path for a file that is being uploaded; `add_file` takes it over."""
        return self.path / f"{secrets.token_hex(12)}.upload"

    def add_file(
        self, owner: str, source: Path, purpose: str, filename: str, expires_s: int | None = None, file_id: str = ""
    ) -> StoredFile:
        """Move a file into the store, under the given id or a new one. Raises StoreFullError."""
        now, size = int(time.time()), source.stat().st_size
        count, owned = self._database.execute(
            "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files WHERE owner = ?", (owner,)
        ).fetchone()
        if not file_id and (count >= MAX_OWNED_FILES or owned + size > MAX_OWNED_BYTES):
            raise StoreFullError(
                f"there are {count} files of {owned} bytes; a key may have {MAX_OWNED_FILES} files of "
                f"{MAX_OWNED_BYTES} bytes in total: delete some",
                param="file",
                code="storage_quota_exceeded",
            )
        found = StoredFile(
            file_id or f"file-{secrets.token_hex(12)}",
            owner,
            purpose,
            filename,
            size,
            now,
            None if expires_s is None else now + expires_s,
        )
        with source.open("rb") as content:
            os.fsync(content.fileno())
        source.replace(self.content_of(found.id))
        values = (owner, purpose, filename, size, now, found.expires_at)
        with self._database:
            self._database.execute("DELETE FROM files WHERE id = ?", (found.id,))
            query = f"INSERT INTO files ({_FILE_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
            self._database.execute(query, (found.id, *values))
        return found

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """Return the file, or None if this owner has none with that id."""
        self.remove_expired()
        rows = self._database.execute(
            f"SELECT {_FILE_FIELDS} FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        ).fetchall()
        return StoredFile(*rows[0]) if rows else None

    def files(
        self, owner: str, *, after: str | None, limit: int, is_newest_first: bool, purpose: str | None
    ) -> list[StoredFile]:
        """Return at most `limit` files that follow the one with the id `after`."""
        self.remove_expired()
        order, sign = ("DESC", "<") if is_newest_first else ("ASC", ">")
        rows = self._database.execute(
            f"SELECT {_FILE_FIELDS} FROM files WHERE owner = :owner AND (:purpose IS NULL OR purpose = :purpose) AND "
            f"(:after IS NULL OR number {sign} (SELECT number FROM files WHERE id = :after AND owner = :owner)) "
            f"ORDER BY number {order} LIMIT :limit",
            {"owner": owner, "purpose": purpose, "after": after, "limit": limit},
        )
        return [StoredFile(*row) for row in rows]

    def content_of(self, file_id: str) -> Path:
        """Return the path of a file's content.

        file_id: an id from the store, never one from a client.
        """
        return self.path / f"{file_id}.jsonl"

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Remove a file. Return False if this owner has none with that id."""
        with self._database:
            query = "DELETE FROM files WHERE id = ? AND owner = ?"
            is_deleted = self._database.execute(query, (file_id, owner)).rowcount > 0
        if is_deleted:
            self.content_of(file_id).unlink(missing_ok=True)
        return is_deleted

    def remove_expired(self) -> None:
        """Remove expired files and ended batches, and the oldest batches of a key that has too many."""
        now = int(time.time())
        query = "SELECT id, owner FROM files WHERE expires_at < ?"
        for file_id, owner in self._database.execute(query, (now,)).fetchall():
            self.delete_file(owner, file_id)
        query = (
            "SELECT content FROM (SELECT content, ended_at, ROW_NUMBER() OVER (PARTITION BY owner ORDER BY number DESC)"
            " AS place FROM batches WHERE NOT is_active) WHERE place > ? OR ended_at < ?"
        )
        for (content,) in self._database.execute(query, (MAX_ENDED_BATCHES, now - ENDED_S)).fetchall():
            self._delete_batch(_from_json(content))

    def _delete_batch(self, batch: StoredBatch) -> None:
        """Remove an ended batch and its results. The input stays, because other batches may use it."""
        with self._database:
            self._database.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
        for file_id in (batch.output_file_id, batch.error_file_id):
            self.delete_file(batch.owner, file_id)

    # --- batches ---

    def add_batch(self, batch: StoredBatch) -> None:
        """Add a batch. Raises StoreFullError."""
        query = "SELECT COUNT(*) FROM batches WHERE owner = ? AND is_active"
        [count] = self._database.execute(query, (batch.owner,)).fetchone()
        if count >= MAX_ACTIVE_BATCHES:
            raise StoreFullError(
                f"{count} batches are running or waiting; a key may have {MAX_ACTIVE_BATCHES}: wait for one to end, "
                "or cancel one",
                code="batch_quota_exceeded",
            )
        with self._database:
            self._database.execute(
                "INSERT INTO batches (id, owner, is_active, content) VALUES (?, ?, 1, ?)",
                (batch.id, batch.owner, _to_json(batch)),
            )

    def save(self, batch: StoredBatch) -> None:
        with self._database:
            self._database.execute(
                "UPDATE batches SET is_active = ?, content = ?, ended_at = ? WHERE id = ?",
                (not batch.has_ended, _to_json(batch), batch.ended_at, batch.id),
            )

    def batch(self, owner: str, batch_id: str) -> StoredBatch | None:
        """Return the batch, or None if this owner has none with that id."""
        self.remove_expired()
        query = "SELECT content FROM batches WHERE id = ? AND owner = ?"
        rows = self._database.execute(query, (batch_id, owner)).fetchall()
        return _from_json(rows[0][0]) if rows else None

    def batches(self, owner: str, after: str | None, limit: int) -> list[StoredBatch]:
        """Return batches created before the one with the id `after`, newest first."""
        self.remove_expired()
        rows = self._database.execute(
            "SELECT content FROM batches WHERE owner = :owner AND "
            "(:after IS NULL OR number < (SELECT number FROM batches WHERE id = :after AND owner = :owner)) "
            "ORDER BY number DESC LIMIT :limit",
            {"owner": owner, "after": after, "limit": limit},
        )
        return [_from_json(content) for (content,) in rows]

    def active(self) -> Iterator[StoredBatch]:
        """Yield all batches that have not ended, oldest first."""
        for (content,) in self._database.execute("SELECT content FROM batches WHERE is_active ORDER BY number"):
            yield _from_json(content)


_FILE_FIELDS = "id, owner, purpose, filename, bytes, created_at, expires_at"


def new_batch(owner: str, **fields: Any) -> StoredBatch:
    """Return a batch with new ids."""
    name = secrets.token_hex(12)
    return StoredBatch(
        id=f"batch_{name}",
        owner=owner,
        times={"created_at": int(time.time())},
        output_file_id=f"file-{name}-output",
        error_file_id=f"file-{name}-errors",
        **fields,
    )


def _to_json(batch: StoredBatch) -> str:
    return json.dumps({name: getattr(batch, name) for name in StoredBatch.__slots__}, ensure_ascii=False)


def _from_json(content: str) -> StoredBatch:
    return StoredBatch(**json.loads(content))
