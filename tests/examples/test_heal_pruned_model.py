"""`examples/heal_pruned_model.py` itself: half of the perplexity that two lost layers cost comes back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from contextlib import closing
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from octavo.backends.torch.distillation import TeacherTokens, TrainingOptions
from octavo.compress.distill import distilled
from octavo.compress.quantize import TypeOptions, choose_types, parse_mixture, quantize_model
from octavo.compress.source import as_source, open_source
from octavo.loader.checkpoint import open_checkpoint
from octavo.tokenizer import load_tokenizer
from tests.compress.models import write_model
from tests.support.scripts import load_script

SCRIPT = Path(__file__).parents[2] / "examples" / "heal_pruned_model.py"
LAYERS, WIDTH, LENGTH = 4, 128, 64


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def chain(seed: int, length: int) -> str:
    """Words of a chain in which a letter depends on the two before it."""
    likely = np.random.default_rng(0).dirichlet([0.2] * 4, (4, 4))
    rng = np.random.default_rng(seed)
    letters = [0, 1]
    for _ in range(length):
        letters.append(int(rng.choice(4, p=likely[letters[-2], letters[-1]])))
    text = "".join("abcd"[letter] for letter in letters)
    return " ".join(text[i : i + 16] for i in range(0, len(text), 16))


def trained_model(folder: Path, text: str) -> Path:
    """A small model that has learnt the next tokens of the text."""
    empty, path = write_model(folder / "random.gguf", layers=LAYERS, width=WIDTH), folder / "model.gguf"
    with open_source(empty) as source, closing(open_checkpoint(empty)) as checkpoint:
        ids = load_tokenizer(checkpoint).encode(text)
        texts = np.array(ids[: len(ids) // LENGTH * LENGTH], np.int32).reshape(-1, LENGTH)
        following = np.roll(texts, -1, axis=1)
        likeliest = np.stack([following, (following + 1) % 8], axis=2)
        logprobs = np.broadcast_to(np.log([0.98, 0.01]).astype(np.float16), likeliest.shape)
        options = TrainingOptions(steps=100, batch=8, rate=3e-3)
        tokens = TeacherTokens(texts, likeliest, logprobs)
        sources = distilled(tokens, checkpoint, source.architecture, options, lambda _share, _loss: None)
        model = as_source(source.path, source.metadata, checkpoint.file, sources)
        mixture = parse_mixture("f16")
        quantize_model(model, path, choose_types(model, mixture, TypeOptions()), mixture.file_type)
    return path


def test_a_small_model_is_pruned_and_healed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole script, as a user runs it, on a model that has learnt something."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of a small model wait for each other on a busy machine
    text, judged = tmp_path / "text.txt", tmp_path / "judged.txt"
    text.write_text(chain(1, 20_000))
    judged.write_text(chain(2, 4_000))
    model = trained_model(tmp_path, text.read_text())
    training = ("--steps", 40, "--rate", 1e-3, "--pieces", 64)
    done = run(model, text, "--judge", judged, "--tokens", 1024, *training, "--keep", tmp_path / "healed.gguf")
    assert done.returncode == 0, done.stderr + done.stdout
    whole, lost = (float(x) for x in re.findall(r"perplexity ([\d.]+), without the layers ([\d.]+)", done.stdout)[0])
    [(healed, share)] = re.findall(r"healed ([\d.]+): ([\d.]+)% of the lost perplexity came back", done.stdout)
    assert lost > 1.1 * whole
    assert float(share) / 100 == pytest.approx((lost - float(healed)) / (lost - whole), abs=0.01)
    assert float(share) >= 50
    assert re.search(r"the whole run took [\d.]+ minutes, and [\d.]+ minutes of processor time", done.stdout)
    with closing(open_checkpoint(tmp_path / "healed.gguf")) as checkpoint:
        assert checkpoint.config.num_layers == LAYERS - 2


@pytest.fixture
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.mark.parametrize(
    ("share", "minutes", "reason"),
    [(0.3, "20", "30.0% came back; --least requires 50%"), (0.6, "0", "minutes; the limit is --minutes 0")],
)
def test_a_missed_bar_is_an_error(
    share: float, minutes: str, reason: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "heal", lambda _options, _folder: share)
    monkeypatch.setattr(sys, "argv", ["heal", "model.gguf", "text", "--minutes", minutes])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert reason in str(end.value)


def test_a_command_that_fails_ends_the_script(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab cd")
    done = run(tmp_path / "nothing.gguf", tmp_path / "text.txt")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "`-m octavo prune` failed"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_smollm2_is_healed_within_twenty_minutes(smollm2_path: Path, tmp_path: Path) -> None:
    """On a machine without other load, with a text as docs/lab/quality.md has it: stories and code."""
    if (novels := os.environ.get("OCTAVO_TEST_NOVELS")) is None:
        pytest.skip("set OCTAVO_TEST_NOVELS to a file with a megabyte of stories")
    parts = [Path(novels), *sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))]
    text = tmp_path / "text.txt"
    text.write_text("".join(part.read_text("utf-8") for part in parts))
    done = run(smollm2_path, text)
    assert done.returncode == 0, done.stderr + done.stdout
