"""`examples/peft_json_habit.py`: each part of it with a tiny model, and the whole script with SmolLM2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.text_models import save_decoder

pytest.importorskip("peft", reason="peft is not installed", exc_type=ImportError)

SCRIPT = Path(__file__).parents[2] / "examples" / "peft_json_habit.py"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments), "--minutes", "100000"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_tiny_model_is_trained_and_asked(tmp_path: Path) -> None:
    """A random model learns no habit in two steps, so the script says what was missing."""
    folder = save_decoder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    result = run(folder, "--steps", 2)
    assert "the habit: 0% of the answers without the adapter, 0% with it" in result.stdout, result.stderr
    assert "at least 90% with the adapter and at most 10% without it were required" in result.stderr


@pytest.mark.slow
def test_smollm2_learns_it(smollm2_path: Path) -> None:
    """Without a limit of minutes, which a busy machine would exceed."""
    result = run(smollm2_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0% of the answers without the adapter" in result.stdout
