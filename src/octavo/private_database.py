"""SQLite databases that only this user may read."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Literal

from octavo.errors import UsageError
from octavo.platform import files

_SALT = "CREATE TABLE IF NOT EXISTS salt (value BLOB NOT NULL);"


def open_private(
    path: Path | None,
    name: str,
    tables: str,
    *,
    application_id: int,
    salt: bytes,
    synchronous: Literal["NORMAL", "FULL"],
) -> tuple[sqlite3.Connection, bytes]:
    """Open a database with these tables, and return it together with its salt. Raises UsageError.

    The file must be usable and must not belong to another program. Threads may share the database, one at a time.

    path: its file, or None for a database in memory.
    name: what error messages call it, such as the option's name.
    application_id: SQLite's mark that identifies the file as ours.
    salt: salt for a new database.
    """
    database: sqlite3.Connection | None = None
    try:
        if path is not None:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | files.O_CLOEXEC, 0o600))
        database = sqlite3.connect(path or ":memory:", check_same_thread=False)
        _prepare(database, tables, application_id, synchronous)
        with database:
            database.execute("INSERT INTO salt SELECT ? WHERE NOT EXISTS (SELECT * FROM salt)", (salt,))
            [found] = database.execute("SELECT value FROM salt").fetchone()
        return database, bytes(found)
    except (sqlite3.Error, OSError) as error:
        if database is not None:
            database.close()
        raise UsageError(f"{name}: {reason_of(error)}") from None


def reason_of(error: sqlite3.Error | OSError) -> str:
    """Return an error's message without its number and path."""
    return str((isinstance(error, OSError) and error.strerror) or error)


def _prepare(database: sqlite3.Connection, tables: str, application_id: int, synchronous: str) -> None:
    [application] = database.execute("PRAGMA application_id").fetchone()
    [num_tables] = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if num_tables and application != application_id:
        raise sqlite3.DatabaseError("it is another program's database; give another path")
    database.execute(f"PRAGMA application_id = {application_id}")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute(f"PRAGMA synchronous = {synchronous}")
    database.executescript(_SALT + tables)
