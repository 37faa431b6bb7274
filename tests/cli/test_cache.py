"""`octavo cache`: kept prompts are listed, and deleted where no model runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from octavo.cli.main import main
from octavo.engine.kv import disk_store
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.kv.disk_store import DiskStore, open_disk_store


def octavo(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def keep(root: Path, name: str) -> DiskStore:
    store = open_disk_store(root, CacheIdentity(name.encode(), b"layout"), 1 << 20, name)
    assert store is not None
    store.save(bytes(32), np.zeros(3000, np.uint8))
    store.flush()
    return store


def test_kept_prompts_are_listed_and_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo("cache", "list", tmp_path) == 0
    assert "No prompts are kept" in capsys.readouterr().out
    keep(tmp_path, "first").close()
    running = keep(tmp_path, "second")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "00000000.octkv").write_text("no folder of a model")
    assert octavo("cache", "list", tmp_path) == 0
    out = capsys.readouterr().out
    assert all(each in out for each in ("MODEL", "first", "second", "in total"))
    assert "mine" not in out
    assert octavo("cache", "list", tmp_path, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {each["model"] for each in listed} == {"first", "second"}
    assert all(each["bytes"] > 3000 for each in listed)
    assert octavo("cache", "clear", tmp_path) == 2  # nobody can be asked
    assert "--yes" in capsys.readouterr().err
    assert octavo("cache", "clear", tmp_path, "--yes") == 0
    out = capsys.readouterr().out
    assert "deleted first" in out
    assert "kept second" in out
    running.close()
    assert octavo("cache", "clear", tmp_path, "--yes") == 0
    assert [file.name for file in tmp_path.rglob("*.octkv")] == ["00000000.octkv"]
    assert octavo("cache", "list", tmp_path / "none") == 2
    assert "--prompt-cache-dir" in capsys.readouterr().err


def test_a_segment_that_a_model_removes_meanwhile_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, "first").close()
    segments_in = disk_store._segments_in

    def with_gone(folder: Path) -> list[Path]:
        return [*segments_in(folder), folder / "00000001.octkv"]

    monkeypatch.setattr(disk_store, "_segments_in", with_gone)
    assert octavo("cache", "list", tmp_path, "--json") == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["model"], listed["bytes"]) == (
        "first",
        sum(each.stat().st_size for each in tmp_path.rglob("*.octkv")),
    )
