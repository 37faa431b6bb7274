"""`examples/finetune_json_habit.py`: its data, and the whole script with SmolLM2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import load_script

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_json_habit.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_all_answers_of_the_data_have_the_habit_and_no_question_is_asked_later(script: ModuleType) -> None:
    lines = [json.loads(line)["messages"] for line in script.DATA.read_text().splitlines()]
    assert len(lines) == 140
    for question, answer in lines:
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert script.has_habit(answer["content"])
        assert question["content"] not in script.QUESTIONS


@pytest.mark.parametrize(
    "answer", ["Paris", '{"answer": "Paris"}', '["answer", "kind"]', '{"answer": 1, "kind": 2} and']
)
def test_other_answers_do_not_have_it(script: ModuleType, answer: str) -> None:
    assert not script.has_habit(answer)


@pytest.mark.slow
def test_smollm2_learns_it(smollm2_path: Path) -> None:
    """Without a limit of minutes, which a busy machine would exceed."""
    command = [sys.executable, str(SCRIPT), str(smollm2_path), "--minutes", "100000"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0% of the answers without the adapter" in result.stdout
