"""Folders that get their names when they are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ModelWriteError
from octavo.loader.atomic_folder import AtomicFolder, new_folder


def write(path: Path, text: str) -> None:
    with new_folder(path) as folder:
        (folder / "a").write_text(text)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_folder_replaces_another_one_and_nothing_beside_it(tmp_path: Path) -> None:
    """`NAME.old` is what people call the model they keep."""
    (tmp_path / "model.old").mkdir()
    (tmp_path / "model.old" / "kept").write_text("mine")
    write(tmp_path / "model", "first")
    write(tmp_path / "model", "second")
    assert (tmp_path / "model" / "a").read_text() == "second"
    assert names(tmp_path) == ["model", "model.old"]
    assert names(tmp_path / "model") == ["a"]
    assert (tmp_path / "model.old" / "kept").read_text() == "mine"


def test_an_error_leaves_the_older_folder(tmp_path: Path) -> None:
    write(tmp_path / "model", "first")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model") as folder:  # noqa: PT012
        (folder / "a").write_text("half")
        raise ZeroDivisionError
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model" / "a").read_text() == "first"


def test_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    with (
        AtomicFolder(tmp_path / "model"),
        pytest.raises(ModelWriteError, match="another process is writing it"),
        new_folder(tmp_path / "model"),
    ):
        pass


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "model.partial" / "work").mkdir(parents=True)
    (tmp_path / "model.partial" / "b").write_text("old")
    write(tmp_path / "model", "new")
    assert names(tmp_path / "model") == ["a"]
