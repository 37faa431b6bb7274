"""Reports of commands at work: every step, to the end, with the time left."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.cli import quantize as quantize_module
from octavo.cli import quantize_checkpoint
from octavo.compress.checkpoints import quantize_layers
from octavo.compress.checkpoints.quantize_layers import LayerQuantizer
from octavo.engine.loading import progress_bar
from tests.compress.models import write_model
from tests.compress.test_checkpoint_types import save_source
from tests.compress.test_quantize import run

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and a text."""
    folder = tmp_path_factory.mktemp("progress")
    write_model(folder / "m.gguf", layers=LAYERS)
    save_source(folder / "model", num_hidden_layers=LAYERS)
    (folder / "text.txt").write_text("ab cd a b dcab abcd bb cc " * 120)
    return folder


# type and source, the works with the steps of each; None: bytes of the file
CASES: dict[str, tuple[tuple[str, ...], str, dict[str, int | None]]] = {
    "gguf": (("--type", "q4_k_m"), "m.gguf", {"writing out.gguf": None}),
    "importance": (
        ("--type", "q4_k_m", "--imatrix", "text.txt"),
        "m.gguf",
        {"measuring layers": LAYERS, "writing out.gguf": None},
    ),
    "bpw": (
        ("--bpw", "5", "--calibration", "text.txt"),
        "m.gguf",
        {"measuring tensors": 7 * LAYERS + 1, "trying types": 7 * LAYERS + 1, "writing out.gguf": None},
    ),
    # each text goes twice through all layers but the last, which is not run again
    "gptq": (
        ("--type", "gptq-4bit", "--calibration", "text.txt", "--calibration-chunks", "2"),
        "model",
        {"quantizing layers": LAYERS * (7 + 2 * 2) - 2},
    ),
    "fp8": (("--type", "fp8"), "model", {"quantizing layers": LAYERS * 7}),
}


def result_of(folder: Path, tmp_path: Path, case: str) -> str:
    """Runs the command; what it wrote to standard error."""
    options, source, _ = CASES[case]
    arguments = [str(folder / a) if a == "text.txt" else a for a in options]
    code, _, error = run(folder / source, tmp_path / ("out.gguf" if source == "m.gguf" else "out"), *arguments)
    assert code == 0, error
    return error


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_reported(case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    reports: dict[str, list[tuple[int, int]]] = {}

    class Recorder(progress_bar.ProgressBar):
        def update(self, what: str, done: int, total: int) -> None:
            reports.setdefault(what, []).append((done, total))

    for module in (quantize_module, quantize_checkpoint):
        monkeypatch.setattr(module, "ProgressBar", Recorder)
    result_of(folder, tmp_path, case)
    works = CASES[case][2]
    assert reports.keys() == works.keys()
    for what, steps in works.items():
        counts, totals = ([numbers[i] for numbers in reports[what]] for i in (0, 1))
        [total] = {*totals}
        assert counts == sorted(counts)
        assert counts[-1] == total
        if steps is None:
            assert len({*counts}) > 7 * LAYERS
        else:
            assert total == steps
            assert {*range(1, steps + 1)} <= {*counts}


@pytest.mark.parametrize("case", CASES)
def test_lines_have_the_time_left(case: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a line at every report."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", -1.0)
    monkeypatch.setattr(progress_bar, "_LINE_S", 0.0)
    error = result_of(folder, tmp_path, case)
    number = r"[\d.,]+(?: [KMG]?i?B)?"
    for what in CASES[case][2]:
        assert re.search(rf"octavo: {what}: {number} of {number}, about \d+ s left\n", error), error


def test_layers_of_an_earlier_run_are_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time left would be told from those that took none."""
    layers, seen = 4, []
    monkeypatch.setattr(quantize_layers, "WorkingWeights", lambda _: SimpleNamespace(changed=set()))
    monkeypatch.setattr(LayerQuantizer, "_layer", lambda self, *_: self._step())
    plan = SimpleNamespace(checkpoint=None, layers=[None] * layers, matrices=[["a", "b"]] * layers)
    place = SimpleNamespace(num_finished=lambda: 2, write_layer=lambda *_: None)
    method = SimpleNamespace(needs_inputs=False)
    LayerQuantizer(plan, method, [], place, lambda done, _: seen.append(done)).run()  # type: ignore[arg-type]
    assert seen == [4, 5, 6]
