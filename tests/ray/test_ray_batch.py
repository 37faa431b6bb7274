"""The example for Ray Data, run to its end on a local Ray, stopped and run again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from octavo.ray.data import Generate
from tests.support.scripts import load_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_batch.py"
OPTIONS = {"kv_cache_memory": "16MiB", "sampling_params": {"max_tokens": 3, "temperature": 0.0}}


def example() -> ModuleType:
    return load_script(EXAMPLE)


def rows_of(folder: Path) -> list[dict[str, object]]:
    lines = [line for path in sorted(folder.glob("*.json*")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.usefixtures("cluster")
def test_answers_are_written_while_actors_have_all_cpus(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed then loses a few blocks, not all of them."""
    module, prompts, answers = example(), tmp_path / "prompts.jsonl", tmp_path / "answers"

    class Counting(Generate):
        """Adds the number of files that are there before its batch."""

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            time.sleep(0.5)  # timed: how long a batch takes
            count = len(list(answers.glob("*.json")))
            return {**super().__call__(batch), "files": np.full(len(batch["id"]), count)}

    monkeypatch.setattr(module, "Generate", Counting)
    prompts.write_text("".join(json.dumps({"id": i, "prompt": "abcd"}) + "\n" for i in range(80)))
    options = {"batch_size": 4, "num_cpus": 1, "actors": 2, "model": str(tiny_path), **OPTIONS}
    assert module.answer(prompts, answers, **options) == 80
    rows = rows_of(answers)
    assert len(rows) == 80
    assert max(int(str(row["files"])) for row in rows) > 4  # of 20


@pytest.mark.usefixtures("cluster")
def test_a_batch_is_answered_and_goes_on_by_id(tiny_path: Path, tmp_path: Path) -> None:
    module, prompts, answers = example(), tmp_path / "prompts.jsonl", tmp_path / "answers"
    lines = [json.dumps({"id": f"row-{i}", "prompt": "abcd"[: 1 + i % 4]}) for i in range(60)]
    prompts.write_text("\n".join(lines[:24]) + "\n")
    options = {"batch_size": 8, "num_cpus": 1, "actors": 1, "model": str(tiny_path), **OPTIONS}
    assert module.answer(prompts, answers, **options) == 24
    first = rows_of(answers)
    assert sorted(str(row["id"]) for row in first) == sorted(f"row-{i}" for i in range(24))
    # A run that is killed loses whole files, and may leave half a line.
    victim = sorted(answers.glob("*.json*"))[0]
    kept = victim.read_text().splitlines()
    victim.write_text("\n".join(kept[:3]) + "\n" + kept[3][:20])
    prompts.write_text("\n".join(lines) + "\n")
    assert module.answer(prompts, answers, **options) == 36 + len(kept) - 3
    found = rows_of(answers)
    assert sorted(str(row["id"]) for row in found) == sorted(f"row-{i}" for i in range(60))
    assert all(row["error"] == "" and row["num_tokens"] for row in found)
    assert module.answer(prompts, answers, **options) == 0
