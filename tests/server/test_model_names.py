"""The names of models: what a file is called, aliases, and which model a request means."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import UsageError
from octavo.server.config import ServerConfig
from octavo.server.models.model_names import ModelNames, read_aliases, served_name


def test_a_file_is_called_by_its_stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "models--org--name.of-it" / "snapshots" / "0a1b"
    hub.mkdir(parents=True)
    files = {
        tmp_path / "SmolLM2-135M.Q4_K_M.gguf": "SmolLM2-135M.Q4_K_M",
        tmp_path / "big-00001-of-00003.gguf": "big",
        tmp_path / "without": "without",
        tmp_path / "model.safetensors": tmp_path.name,
        tmp_path / "model.safetensors.index.json": tmp_path.name,
        hub / "model.safetensors": "org/name.of-it",
        hub / "a-Q8_0.gguf": "a-Q8_0",
    }
    for path, name in files.items():
        path.touch()
        assert served_name(str(path)) == name
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name(str(hub)) == served_name(f"{hub}/") == "org/name.of-it"
    monkeypatch.chdir(tmp_path)
    assert served_name("big-00001-of-00003.gguf") == "big"
    assert served_name(".") == tmp_path.name
    monkeypatch.setenv("HOME", str(tmp_path))
    assert served_name("~/without") == "without"


@pytest.mark.parametrize(
    "name", ["smollm2", "qwen3:4b", "org/name", "org/name:Q4_K_M", "/nowhere/a.gguf", "hf.co/a/b", "x" * 5000, "a\0b"]
)
def test_other_words_are_names_already(name: str) -> None:
    assert served_name(name) == name


def test_which_model_a_name_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ModelNames({"a": "a.gguf", "b": "org/b", "same": "a.gguf"}, {"x": "b", "y": "b"})
    assert {name: names.find(name) for name in ("a", "a.gguf", str(tmp_path / "a.gguf"), "default")} == dict.fromkeys(
        ("a", "a.gguf", str(tmp_path / "a.gguf"), "default"), "a"
    )
    assert [names.find(name) for name in ("b", "org/b", "x", "y", "same")] == ["b", "b", "b", "b", "same"]
    assert [names.find(name) for name in ("A", "", "z", "b.gguf")] == [None] * 4
    assert (names.aliases_of("b"), names.aliases_of("a")) == (["x", "y"], [])
    assert ModelNames({"a": "m", "default": "n"}).find("default") == "default"


def test_aliases() -> None:
    assert read_aliases(["a, b", "c"], ["a"]) == {"b": "a", "c": "a"}
    assert read_aliases(["m=a,b", "n=c"], ["m", "n"]) == {"a": "m", "b": "m", "c": "n"}
    for given, said in (
        (["a"], "name its model: m=a"),
        (["o=a"], "no model 'o'"),
        (["m=a", "n=a"], "is given to two models"),
        (["m=n"], "is given to two models"),
    ):
        with pytest.raises(UsageError, match=said):
            read_aliases(given, ["m", "n"])
    with pytest.raises(UsageError, match="empty name"):
        ServerConfig(alias=("a,,b",))
