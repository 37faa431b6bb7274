"""`examples/train_seeing_model.py`: its pictures, a model after a few steps, and the whole script for both families."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.support.scripts import load_script

SCRIPT = Path(__file__).parents[2] / "examples" / "train_seeing_model.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_an_answer_says_all_that_is_drawn(script: ModuleType) -> None:
    """The colour's pixels are where the shapes are, and the black ones of the digit where the answer says."""
    rng = np.random.default_rng(0)
    for grid in [(2, 2), (2, 3), (3, 2)] * 20:
        drawn = script.drawing(rng, grid)
        _, colour, _, digit, row, column = drawn.answer.split()
        pixels = np.asarray(drawn.picture)
        assert pixels.shape == (grid[0] * script.CELL, grid[1] * script.CELL, 3)
        assert (pixels == script.COLOURS[colour]).all(-1).any()
        ys, xs = np.nonzero((pixels == 0).all(-1))
        cells = {(y // script.CELL, x // script.CELL) for y, x in ((ys.min(), xs.min()), (ys.max(), xs.max()))}
        ((y, x),) = cells
        assert (script.ROWS[y * 2 // (grid[0] - 1)], script.COLUMNS[x * 2 // (grid[1] - 1)]) == (row, column)
        bits = "".join(f"{int(bits):03b}" for bits in script.DIGITS[int(digit)])
        assert len(ys) == 16 * bits.count("1")


def test_pictures_are_new_and_every_error_changes_them(script: ModuleType) -> None:
    task = script.Task("qwen3_vl")
    drawings = script.held_out(task, 30)
    known = {each.picture.tobytes() for each in drawings}
    assert len(known) == 30
    for change in script.CHANGES.values():
        others = script.changed(drawings, change)
        assert not known & {each.picture.tobytes() for each in others}
        assert [each.picture.size for each in others] == [each.picture.size for each in drawings]


@pytest.mark.parametrize("name", ["qwen3_vl", "idefics3"])
def test_a_model_of_a_few_steps_answers_in_octavo_as_in_transformers(
    name: str, script: ModuleType, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(before))
    task = script.Task(name)
    model = script.train(task, steps=4, batch=4)
    script.save(model, task, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 8 << 20
    drawings = script.held_out(task, 3)
    answers = script.answers_of_octavo(tmp_path, drawings, backend="cpu", num_threads=2, kv_cache_memory="16MiB")
    assert answers == script.answers_of_transformers(model, task, drawings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "idefics3"])
def test_a_trained_model_answers_nearly_always_rightly(name: str, tmp_path: Path) -> None:
    """Within 20 minutes on one core."""
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--family", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right answers about 200 new pictures" in done.stdout
