"""The order of turns, engines that fail, and the report, with engines that are made up; once with the real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest


class FakePeer:
    """Any engine: answers at once, a little slower for each letter of its name."""

    log: ClassVar[list[str]] = []
    failing = ""
    error: type[Exception]

    def __init__(self, name: str, _python: str, _log: Path) -> None:
        self.name = name
        self.age_s = float(len(name))
        self.process_id = 0

    def ask(self, command: str, **_values: Any) -> dict[str, Any]:
        self.log.append(f"{self.name} {command}")
        if self.failing == f"{self.name} {command}":
            raise self.error(f"{self.name}: MemoryError")
        seconds = float(len(self.name))
        answers = {"load": {"version": f"{self.name} 1"}, "memory": {"peak_bytes": 10**8}, "cache_bytes": {"result": 5}}
        return answers.get(command, {"first_s": seconds, "steps_s": seconds, "result": seconds})

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


class FakeBandwidth:
    def __init__(self, _threads: int) -> None: ...

    def measure(self) -> float:
        return 3e10


@pytest.fixture
def compare(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = script("compare")
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(module, "Peer", FakePeer)
    monkeypatch.setattr(module, "ReadBandwidth", FakeBandwidth)
    monkeypatch.setattr(FakePeer, "error", module.PeerError, raising=False)
    monkeypatch.setattr(FakePeer, "log", [])
    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"x" * 1000)
    return path


def result(compare: ModuleType, model: Path, *words: str) -> dict[str, Any]:
    options = compare.arguments([str(model), "--runs", "2", *words])
    made: dict[str, Any] = compare.model_json(compare.Comparison(model, options), model)
    return made


def test_engines_take_turns_at_each_measure(compare: ModuleType, model: Path) -> None:
    made = result(compare, model, "--peer", "llama.cpp=python", "--measure", "decode,prefill-512")
    warm_up = ["octavo decode"] * 2 + ["llama.cpp decode"] * 2
    turns = ["octavo decode", "llama.cpp decode"] * 4
    assert FakePeer.log == ["octavo load", "llama.cpp load", *warm_up, *turns, "octavo closed", "llama.cpp closed"]
    ours, theirs = made["engines"]
    assert len(ours["measures"]["decode"]["values"]) == 2
    assert theirs["measures"]["decode"]["ratio"]["of_medians"] == pytest.approx(9 / 6)
    assert made["file_bytes"] == ours["weights_bytes"] == 1000


def test_start_and_memory_come_from_a_new_process_that_is_ended(compare: ModuleType, model: Path) -> None:
    made = result(compare, model, "--measure", "start,memory")
    once = ["octavo load", *["octavo decode"] * 3, "octavo memory", "octavo closed"]
    assert FakePeer.log == ["octavo load", *once, *once, "octavo cache_bytes", "octavo closed"]
    assert made["engines"][0]["measures"]["start"]["median"] == 6.0
    assert made["allowed_memory_bytes"] == 1150 + 5 + 200_000_000


def test_what_octavo_alone_has_is_asked_of_nobody_else(compare: ModuleType, model: Path) -> None:
    options = compare.arguments([str(model), "--peer", "vllm=python", "--measure", "host-1,many-16"])
    (_, host) = compare.wanted_workloads(options.measure)
    engine = compare.Engine("vllm", "python", {}, FakePeer("vllm", "", model), compare.Figures("vllm"), frozenset())
    assert engine.wants(host, options.measure) == set()


def test_a_measure_is_skipped_for_one_engine(compare: ModuleType, model: Path) -> None:
    made = result(
        compare, model, "--peer", "llama.cpp=p", "--measure", "decode,prefill-4096", "--skip", "llama.cpp=prefill-4096"
    )
    assert [set(engine["measures"]) for engine in made["engines"]] == [{"decode", "prefill-4096"}, {"decode"}]


def test_an_engine_that_fails_at_one_thing_is_asked_for_the_others(
    compare: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakePeer, "failing", "llama.cpp many")
    made = result(compare, model, "--peer", "llama.cpp=p", "--measure", "decode,many-16")
    theirs = made["engines"][1]
    assert (set(theirs["measures"]), theirs["left_out"]) == ({"decode"}, {"many-16": "llama.cpp: MemoryError"})
    assert FakePeer.log.count("llama.cpp many") == 1
    assert "many-16 left out: llama.cpp: MemoryError" in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_named(
    compare: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakePeer, "failing", "llama.cpp load")
    made = result(compare, model, "--peer", "llama.cpp=p", "--peer", "vllm=p", "--measure", "decode")
    assert set(made["absent"]) == {"llama.cpp", "vllm"}
    assert "--converted" in made["absent"]["vllm"]
    shown = compare.show(made)
    assert "- vllm: did not start" in shown
    assert "read bandwidth in the same turns: 30.0 GB/s" in shown


def test_peers_that_read_no_gguf_get_what_was_converted(compare: ModuleType, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "converted" / "a" / "ctranslate2"
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"y" * 700)
    made = result(
        compare, model, "--peer", "ctranslate2=p", "--converted", str(tmp_path / "converted"), "--measure", "decode"
    )
    assert made["engines"][1]["weights_bytes"] == 700


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure", "decode,speed"], "no measure speed"),
        (["--skip", "vllm=decode"], "no such engine takes part"),
        (["--peer", "llama.cpp"], "is not NAME=VALUE"),
        (["--runs", "0"], "at least one turn"),
    ],
)
def test_wrong_words_are_named(
    compare: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.arguments(["a.gguf", *words])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_octavo_itself_is_measured(
    script: Callable[[str], ModuleType], smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = script("compare")
    report = tmp_path / "report.json"
    words = ["compare", "--measure", "decode,prefix,start,memory,host-1,many-16", "--runs", "1", "--threads", "1"]
    monkeypatch.setattr("sys.argv", [*words, "--json", str(report), str(smollm2_path)])
    assert compare.main() == 0
    written = json.loads(report.read_text())
    (engine,) = written["results"][0]["engines"]
    assert engine["left_out"] == {}
    assert set(engine["measures"]) == {"decode", "prefix", "start", "memory", "host-1", "many-16"}
    assert engine["measures"]["prefix"]["median"] > 3
    assert engine["measures"]["memory"]["median"] < 400
    assert {"commit", "machine", "ceilings", "threads", "runs"} <= written.keys()
