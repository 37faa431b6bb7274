"""The folder of downloaded models: private, trusted, written by one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.loader import model_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_private(cache: Path) -> None:
    assert model_cache.models_dir() == cache / "models"
    assert (cache / "models").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("case", ["open to everybody", "a file in the way", "somebody else's"])
def test_refused(
    case: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that is not usable or not trustworthy is replaced by a private one, with a warning."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    if case == "a file in the way":
        cache.write_text("")
    else:
        (cache / "models").mkdir(parents=True)
        (cache / "models").chmod(0o777 if case == "open to everybody" else 0o700)
    if case == "somebody else's":
        os.chown(cache / "models", 12345, -1)
    private = tmp_path / f"octavo-{os.getuid()}"
    assert model_cache.models_dir() == private
    assert private.stat().st_mode & 0o777 == 0o700
    assert f"{cache / 'models'} cannot hold models" in caplog.text
    private.rmdir()
    private.write_text("")
    with pytest.raises(ModelLoadError, match="set OCTAVO_CACHE to a folder of yours"):
        model_cache.models_dir()


def test_a_file_in_the_temporary_folder_moves_as_soon_as_it_can(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    relative = Path("key", "model.gguf")
    cache.write_text("a file in the way")
    file = model_cache.models_dir() / relative
    file.parent.mkdir()
    file.write_bytes(b"12345")
    caplog.clear()
    assert model_cache.find_file(relative, 5) == file
    assert "cannot hold models" in caplog.text
    cache.unlink()
    assert model_cache.find_file(relative, 5) == cache / "models" / relative
    assert (cache / "models" / relative).read_bytes() == b"12345"
    assert not file.exists()


def test_one_at_a_time(tmp_path: Path) -> None:
    with model_cache.staging_dir(tmp_path, "k") as staging:
        (staging / "half").write_text("x")
        descriptor = os.open(tmp_path / ".k.lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    assert [p.name for p in tmp_path.iterdir()] == [".k.lock"]


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_only_a_trusted_folder_is_searched(mode: int, cache: Path) -> None:
    directory = model_cache.models_dir()
    (directory / "m.gguf").write_bytes(b"12345")
    directory.chmod(mode)
    assert model_cache.find_file(Path("m.gguf"), 5) == (cache / "models" / "m.gguf" if mode == 0o700 else None)
    assert model_cache.find_file(Path("m.gguf"), 6) is None
    assert model_cache.find_file(Path("n.gguf"), 5) is None


def test_free_space(tmp_path: Path) -> None:
    model_cache.check_free_space(tmp_path, 1, "a byte")
    with pytest.raises(ModelLoadError, match=r"a yottabyte needs 1000000000000000000 MB here, but \d+ MB are free"):
        model_cache.check_free_space(tmp_path, 10**24, "a yottabyte")
