"""The folders of stores that servers make for themselves."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from octavo.batches.store import BatchStore, temporary_folder


def test_folders_of_killed_servers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, running, new, foreign = (temporary_folder() for _ in range(4))
    BatchStore(killed, b"salt").close()
    store = BatchStore(running, b"salt")
    BatchStore(new, b"salt").close()
    (foreign / "lock").symlink_to(killed / "batches.sqlite")
    hours_ago = time.time() - 7200
    for folder in (killed, running):
        os.utime(folder / "lock", (hours_ago, hours_ago))
    latest = temporary_folder()
    assert set(tmp_path.iterdir()) == {running, new, foreign, latest}
    store.close()
