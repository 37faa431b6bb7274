"""The peer ik_llama.cpp with a `llama-bench` that is made up: the settings tried, and those kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FAKE = f"""#!{sys.executable}
import json, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open(pathlib.Path(__file__).with_name("log"), "a") as log:
    log.write(json.dumps(given) + "\\n")
if given["-m"] == "absent.gguf":
    sys.exit("failed to load model")
prompt, count = given["-gp"].split(",") if "-gp" in given else (given["-p"], "0")
print(json.dumps([
    {{"build_commit": "c0ffee", "avg_ns": 4000000000 - 2000000000 * int(r) - 1000000000 * int(f),
     "n_prompt": int(prompt), "n_gen": int(count), "repack": r == "1", "flash_attn": f == "1"}}
    for r in given["-rtr"].split(",") for f in given["-fa"].split(",")
]))
"""


@pytest.fixture
def engine(script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    program = tmp_path / "llama-bench"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return script("peers.ik_llama_cpp").IkLlamaCpp()


def load(engine: Any, script: Callable[[str], ModuleType], model: str = "a.gguf") -> None:
    engine.load(script("protocol").LoadOptions(model, threads=2, context=100, sequences=1))


def test_the_best_settings_of_a_figure_are_found_once(
    engine: Any, script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    load(engine, script)
    assert engine.version == "ik_llama.cpp c0ffee"
    for _ in range(2):
        answer = script("protocol").answer_to(engine, "decode", {"prompt": [5] * 16, "count": 3})
        assert answer == {"first_s": 1.0, "steps_s": 1.0, "tokens": [[0] * 4]}
    calls = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()][1:]
    assert [(call["-rtr"], call["-fa"]) for call in calls] == [("0,1", "0,1")] * 2 + [("1", "1")] * 2
    assert [(call["-p"], call.get("-gp")) for call in calls] == [("16", None), ("0", "16,3")] * 2
    assert all(call["-t"] == "2" and call["-r"] == "1" for call in calls)


def test_several_sequences_and_a_missing_program_are_refused_by_name(
    engine: Any, script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="status 1: failed to load model"):
        load(engine, script, "absent.gguf")
    with pytest.raises(NotImplementedError, match="one stream"):
        engine.many([[1], [2]], 3)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(RuntimeError, match="llama-bench is not on the PATH"):
        load(engine, script)
