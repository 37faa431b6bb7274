"""Mixtures of a size: the knapsack, the losses that it is given, and the command with `--bpw`."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, reference
from octavo.backends.whole_texts import whole_texts
from octavo.compress.allocation import Option, allocate
from octavo.compress.mixtures import can_be_quantized
from octavo.compress.quantize import TypeOptions, check_size, choose_by_size, free_tensors
from octavo.compress.sensitivity import (
    Measurements,
    Sensitivity,
    calibration_texts,
    least_bytes,
    measured_of,
    probe_of,
    types_of,
)
from octavo.compress.source import open_source
from octavo.errors import UsageError
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import build_graph
from octavo.quality.figures import kl_divergence, log_softmax
from octavo.quantization.ggml import stored_bytes
from tests.compress.models import write_model
from tests.compress.test_quantize import run

TEXT = "ab cd a b dcab abcd bb cc " * 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("by_size") / "model.gguf", layers=2)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_knapsack_against_every_combination() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        tensors = [
            [Option(f"{i}", int(n) * 7, float(x)) for i, (n, x) in enumerate(zip(*pair, strict=True))]
            for pair in zip(rng.integers(1, 60, (5, 4)), rng.random((5, 4)), strict=True)
        ]
        least = sum(min(option.nbytes for option in options) for options in tensors)
        budget = least + int(rng.integers(0, 400))
        found = allocate(tensors, budget)
        best = min(
            sum(option.loss for option in choice)
            for choice in itertools.product(*tensors)
            if sum(option.nbytes for option in choice) <= budget
        )
        assert sum(option.nbytes for option in found) <= budget
        assert sum(option.loss for option in found) == pytest.approx(best)


def test_a_budget_below_the_smallest_types() -> None:
    with pytest.raises(UsageError, match="10 bytes, 3 more than allowed"):
        allocate([[Option("a", 10, 1.0), Option("b", 12, 0.5)]], 7)


def test_the_layers_that_are_measured(tmp_path: Path) -> None:
    with open_source(write_model(tmp_path / "m.gguf", layers=10)) as model:
        tensors = [tensor for tensor in model.tensors if "attn_q" in tensor.name]
        assert [tensor.name.split(".")[1] for tensor in measured_of(tensors)] == ["0", "1", "3", "6", "8", "9"]


def test_a_divergence_against_the_specification(source: Path, tmp_path: Path) -> None:
    """One matrix is quantized and the whole model computed in numpy, by float64: the same divergence."""
    texts = calibration_texts([2, 3, 4, 5, 6, 7] * 30, 0)
    with open_source(source) as model, closing(open_checkpoint(source)) as checkpoint:
        tensors = [t for t in model.tensors if t.name in ("blk.0.ffn_down.weight", "token_embd.weight")]
        known = Measurements(tmp_path, checkpoint, texts, {})
        sensitivity = Sensitivity(checkpoint, texts, {}, kl_divergence)
        sensitivity.measure(tensors, known)
        assert known.divergences.keys() == {tensor.name for tensor in tensors}
        graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
        limits = ExecutorLimits(texts.size, len(texts), len(texts) * len(sensitivity.rows), texts.shape[1])

        def logits(weights: object) -> np.ndarray:
            executor = reference.compile(graph, weights, limits, dtype=np.float64)  # type: ignore[arg-type]
            executor.allocate_cache(len(texts), 128, len(texts))
            output = executor.submit(whole_texts(graph, texts, sensitivity.rows)).wait()
            assert output.logits is not None
            return output.logits.astype(np.float32)

        base = log_softmax(logits(checkpoint.weights))
        for tensor in tensors:
            [name] = [n for n in checkpoint.weights if tensor.name in checkpoint.weights.info(n).tensors]
            changed = {n: checkpoint.weights[n] for n in checkpoint.weights}
            changed[name] = sensitivity.probed(name, tensor)
            expected = kl_divergence(base, logits(changed)).mean()
            assert expected > 1e-5
            assert known.divergences[tensor.name] == pytest.approx(expected, rel=0.02), tensor.name


def test_losses_follow_the_errors_of_the_types(source: Path, tmp_path: Path) -> None:
    texts = calibration_texts([2, 3, 4, 5, 6, 7] * 30, 0)
    with open_source(source) as model, closing(open_checkpoint(source)) as checkpoint:
        tensors = [t for t in model.tensors if can_be_quantized(t.name, t.shape)]
        known = Measurements(tmp_path, checkpoint, texts, {})
        known.divergences = {tensor.name: 1e-3 for tensor in tensors}
        options = Sensitivity(checkpoint, texts, {}, kl_divergence).options(tensors, known)
    for found in options:
        losses = {option.type_name: option.loss for option in found}
        assert losses[probe_of(256)] == pytest.approx(1e-3)
        assert losses["Q2_K"] > losses["Q3_K"] > losses["Q4_K"] > losses["Q5_K"] > losses["Q6_K"] > losses["Q8_0"] > 0
        assert losses["F16"] == 0


def test_the_command_makes_the_size_that_is_asked(source: Path, text: Path, tmp_path: Path) -> None:
    for bits in (4.0, 6.5):
        path = tmp_path / f"{bits}.gguf"
        code, out, error = run(source, path, "--bpw", bits, "--imatrix", text, "--json")
        assert code == 0, error
        report = json.loads(out)
        assert bits - 0.4 < report["bits_per_weight"] <= bits
        assert len(set(report["tensors"].values())) > 2
        open_checkpoint(path).close()
    [kept] = (tmp_path / "cache" / "sensitivities").iterdir()  # measured once for both sizes
    assert len(json.loads(kept.read_text())) == 15


def test_the_limit_of_a_size_is_exact(source: Path) -> None:
    """Bits for exactly the bytes of the smallest types are enough, and one byte less is refused."""
    with open_source(source) as model:
        options = TypeOptions()
        losses = {
            t.name: [Option(name, stored_bytes(name, t.shape), 1.0) for name in types_of(t)]
            for t in free_tensors(model, options)
        }
        smallest = {t.name: least_bytes(t) for t in free_tensors(model, options)}
        numbers = sum(math.prod(t.shape) for t in model.tensors)
        fixed = sum(t.shape[0] * 4 for t in model.tensors if len(t.shape) == 1)
        least = fixed + sum(smallest.values())
        exact = 8 * least / numbers
        check_size(model, options, exact, smallest)
        assert sum(choice.nbytes for choice in choose_by_size(model, options, exact, losses)) == least
        with pytest.raises(UsageError, match="is too small"):
            check_size(model, options, 8 * (least - 1) / numbers, smallest)


def test_overrides_count_in_the_size(source: Path, text: Path, tmp_path: Path) -> None:
    options = ("--bpw", 5, "--calibration", text, "--tensor-type", "attn_q=q8_0", "--keep", "attn_v")
    code, out, error = run(source, tmp_path / "m.gguf", *options, "--dry-run", "--json")
    assert code == 0, error
    report = json.loads(out)
    assert report["tensors"]["blk.0.attn_q.weight"] == "Q8_0"
    assert report["tensors"]["blk.1.attn_v.weight"] == "F16"
    assert report["bits_per_weight"] <= 5


def test_a_kill_keeps_what_is_measured(source: Path, text: Path, tmp_path: Path) -> None:
    """A process killed while it measures leaves no model, and the next one goes on from there."""
    code = (
        "import os, signal\n"
        "from octavo.compress.sensitivity import Measurements\n"
        "add = Measurements.add\n"
        "Measurements.add = lambda *what: (add(*what), os.kill(os.getpid(), signal.SIGKILL))\n"
        "from octavo.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "quantize", source, tmp_path / "m.gguf", "--bpw", "5", "--calibration"]
    assert subprocess.run([*command, text], capture_output=True, timeout=120, check=False).returncode == -9
    assert not (tmp_path / "m.gguf").exists()
    [kept] = (tmp_path / "cache" / "sensitivities").glob("*.json")
    measured = json.loads(kept.read_text())
    assert len(measured) == 1
    measured = dict.fromkeys(measured, 0.125)  # which no second measurement would give
    kept.write_text(json.dumps(measured))
    code, _, error = run(source, tmp_path / "m.gguf", "--bpw", 5, "--calibration", text)
    assert code == 0, error
    assert json.loads(kept.read_text()).items() > measured.items()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --type or --bpw"),
        (("--type", "q8_0", "--bpw", "4"), "give either --type or --bpw"),
        (("--bpw", "4"), "--bpw measures the loss on a text: give --imatrix TEXT or --calibration TEXT"),
        (("--type", "q8_0", "--calibration", "TEXT"), "--calibration needs --bpw"),
        (("--bpw", "1.5", "--calibration", "TEXT"), "--bpw 1.5 is too small: this model needs"),
        (("--bpw", "4", "--calibration", "EMPTY"), "is empty; give a file with text"),
        (("--bpw", "4", "--imatrix", "EMPTY"), "is empty; give a file with text"),
    ],
)
def test_mistakes_end_in_one_line(
    source: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    files = {"TEXT": text, "EMPTY": empty}
    code, _, error = run(source, tmp_path / "m.gguf", *(files.get(a, a) for a in arguments))
    assert code != 0
    assert message in error
    assert not list(tmp_path.glob("m.gguf*"))
