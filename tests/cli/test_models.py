"""`octavo pull`, `list` and `rm`, with a hub on loopback that the test controls."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.loader.aliases import ALIASES
from tests.loader.test_hub import NOWHERE, environment
from tests.support.fake_servers import COMMIT, Behaviour, serve
from tests.support.processes import octavo_here
from tests.support.tiny_gguf import tiny_gguf

FILES = {"m-Q4_0.gguf": tiny_gguf(), "m-Q8_0.gguf": tiny_gguf() + bytes(64)}


def run(cache: Path, endpoint: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo", *arguments]
    settings = environment(cache, endpoint, **more)
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def listed(cache: Path) -> dict[str, dict[str, object]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(cache / "octavo"))
        found = json.loads(octavo_here("list", "--json").stdout)
    return {model["name"]: model for model in found}


def test_pull_list_rm(tmp_path: Path) -> None:
    with serve(Behaviour(FILES)) as endpoint:
        for name in ("org/name", "hf.co/org/name:Q8_0", f"{endpoint}/org/name/blob/main/m-Q8_0.gguf"):
            pulled = run(tmp_path, endpoint, "pull", name)
            assert pulled.returncode == 0, pulled.stderr
    models = listed(tmp_path)
    assert set(models) == {"org/name", "org/name:Q8_0", "org/name:m-Q8_0.gguf"}
    assert models["org/name:Q8_0"]["bytes"] == len(FILES["m-Q8_0.gguf"])
    first = Path(str(models["org/name"]["path"]))
    assert first.read_bytes() == FILES["m-Q4_0.gguf"]
    table = run(tmp_path, NOWHERE, "list").stdout
    assert "org/name:Q8_0" in table
    assert "just now" in table
    refused = run(tmp_path, NOWHERE, "rm", "org/name")
    assert (refused.returncode, "give --yes" in refused.stderr) == (2, True)
    assert run(tmp_path, NOWHERE, "rm", "-y", "org/name:Q8_0").stdout.startswith("deleted org/name:Q8_0")
    # The other name has the same file.
    kept = Path(str(models["org/name:m-Q8_0.gguf"]["path"]))
    assert kept.read_bytes() == FILES["m-Q8_0.gguf"]
    assert run(tmp_path, NOWHERE, "rm", "-y", "hf.co/org/name", "org/name:m-Q8_0.gguf").returncode == 0
    assert listed(tmp_path) == {}
    assert not [p for p in (tmp_path / "hf").rglob("*") if p.is_file() and p.stat().st_size > 500]


def test_a_recorded_model_needs_no_hub(tmp_path: Path) -> None:
    """It stays at its commit until it is pulled again."""
    hub = Behaviour(FILES)
    with serve(hub) as endpoint:
        assert run(tmp_path, endpoint, "pull", "org/name").returncode == 0
        num_requests = len(hub.requests)
        assert run(tmp_path, endpoint, "show", "org/name").returncode == 0
        assert len(hub.requests) == num_requests
        assert run(tmp_path, endpoint, "pull", "org/name").returncode == 0
        assert len(hub.requests) > num_requests
    record = json.loads(next((tmp_path / "octavo/models/records").glob("*.json")).read_text())
    [file] = record["files"]
    assert record["commit"] == COMMIT
    assert file["sha256"] == hashlib.sha256(FILES["m-Q4_0.gguf"]).hexdigest()


def test_a_file_that_is_not_what_the_hub_says(tmp_path: Path) -> None:
    with serve(Behaviour(FILES, checksums={"m-Q4_0.gguf": "0" * 64})) as endpoint:
        outcome = run(tmp_path, endpoint, "pull", "org/name")
    assert outcome.returncode == 3
    assert "as the hub reports" in outcome.stderr
    assert listed(tmp_path) == {}


def test_last_use_orders_the_list(tmp_path: Path) -> None:
    with serve(Behaviour(FILES)) as endpoint:
        for name in ("org/a", "org/b"):
            run(tmp_path, endpoint, "pull", name)
    for file in (tmp_path / "octavo/models/records").glob("*.json"):
        os.utime(file, (0, 0))
    assert run(tmp_path, NOWHERE, "show", "org/a").returncode == 0
    assert list(listed(tmp_path)) == ["org/a", "org/b"]
    assert "days ago" in run(tmp_path, NOWHERE, "list").stdout


def test_the_last_use_of_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the model keeps its times: the cache of packed weights is found by them."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    alias = ALIASES["smollm2"]
    path = tmp_path / "models" / alias.sha256[:16] / alias.filename
    path.parent.mkdir(mode=0o700, parents=True)
    path.touch()
    os.truncate(path, alias.nbytes)
    os.utime(path, (0, 0))
    before = path.stat()
    assert json.loads(octavo_here("list", "--json").stdout)[0]["used"] == 0
    assert octavo_here("pull", "SmolLM2").returncode == 0
    assert json.loads(octavo_here("list", "--json").stdout)[0]["used"] > before.st_ctime - 1
    assert (path.stat().st_mtime_ns, path.stat().st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert octavo_here("rm", "-y", "smollm2").returncode == 0
    assert [path for path in (tmp_path / "models").rglob("*") if path.is_file()] == []


def test_damaged_records_are_passed_over(tmp_path: Path) -> None:
    with serve(Behaviour(FILES)) as endpoint:
        run(tmp_path, endpoint, "pull", "org/name")
        file = next((tmp_path / "octavo/models/records").glob("*.json"))
        for text in ("", "{}", '{"label": "org/name", "files": [], "commit": "", "snapshot": "/"}', "[" * 5000):
            file.write_text(text)
            assert listed(tmp_path) == {}
        assert run(tmp_path, endpoint, "pull", "org/name").returncode == 0
    assert list(listed(tmp_path)) == ["org/name"]


def test_records_that_others_may_write_are_not_believed(tmp_path: Path) -> None:
    with serve(Behaviour(FILES)) as endpoint:
        run(tmp_path, endpoint, "pull", "org/name")
    assert list(listed(tmp_path)) == ["org/name"]
    (tmp_path / "octavo/models/records").chmod(0o777)
    assert listed(tmp_path) == {}


def test_short_names() -> None:
    import click.testing

    from octavo.cli.models import list_models

    text = click.testing.CliRunner().invoke(list_models, ["--all"]).output
    assert "Qwen/Qwen3-4B-GGUF" in text
    assert "smollm2 " in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3:5b", "did you mean qwen3:"),
        ("gemma33", "did you mean gemma3?"),
        ("no such thing", "octavo list --all"),
        ("https://example.org/o/n", "models come from"),
    ],
)
def test_near_misses(name: str, message: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, NOWHERE, "pull", name)
    assert (outcome.returncode, message in outcome.stderr) == (3, True), outcome.stderr
