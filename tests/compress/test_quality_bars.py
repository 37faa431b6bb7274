"""Real models made smaller: with calibration, importance and measured losses they are nearer to their float form."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli.quantize import convert, quantize
from octavo.quality.evaluation import ReferenceOptions, WindowOptions, evaluate_text
from octavo.quality.texts import read_text

BARS: dict[str, tuple[float, list[str]]] = {"gptq-4bit": (0.7, []), "awq": (0.85, ["--asymmetric"])}
"""The largest divergence beside that of rounding, and the options of a rounding with the same grid."""
IMPORTANCE, MEASURED = 0.9, 0.8
"""The largest divergence beside that of Q4_K_M without importance; and of `--bpw` beside Q4_K_M of the same size."""
CHUNKS = 12
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half prose, half code of Python's library, and none of it in the text that the models are judged on."""
    library = Path(sysconfig.get_path("stdlib"))
    prose = (library / "pydoc_data/topics.py").read_text()  # the reference of the language
    modules = sorted(library.glob("[a-d]*.py"))
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text(prose + "".join(module.read_text() for module in modules)[: len(prose)])
    return path


def divergence_of(model: Path, reference: Path, tokens: int, folder: Path) -> float:
    """The mean from the reference on the built-in text."""
    found = ReferenceOptions(str(reference), folder=folder / "references")
    report, _ = evaluate_text(str(model), read_text(None), WindowOptions(max_tokens=tokens), reference=found)
    assert report.divergence is not None
    return report.divergence.mean_kl


@pytest.mark.slow
@pytest.mark.parametrize("type_name", BARS)
@pytest.mark.parametrize(("fixture", "group", "tokens"), [("smollm2_path", 64, 4096), ("qwen_0_5b_path", 128, 2048)])
def test_calibration_of_real_models(
    fixture: str,
    group: int,
    tokens: int,
    type_name: str,
    calibration: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """The divergence from the float model on the built-in text."""
    source = tmp_path / "source"
    run = CliRunner().invoke
    options = [request.getfixturevalue(fixture), source, "--to", "safetensors", "--dtype", "bf16"]
    assert run(convert, [str(option) for option in options]).exit_code == 0

    def divergence(*options: object) -> float:
        path = tmp_path / "made"
        arguments = [source, path, "--force", "--group-size", group, "--type", *options]
        result = run(quantize, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.exception
        return divergence_of(path, source, tokens, tmp_path)

    text = ("--calibration", calibration, "--calibration-chunks", CHUNKS)
    bar, same_grid = BARS[type_name]
    assert divergence(type_name, *text) < bar * divergence("rtn-4bit", *same_grid)


@pytest.mark.slow
def test_importance_and_measured_losses_of_a_real_model(
    smollm2_path: str, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q4_K_M with importance beside Q4_K_M, and `--bpw` in the size of Q4_K_M beside that with the same importance.

    The reference has noise in its weights: those of the file lie on the grid of Q4_1, which `--bpw` would take.
    """
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    source, importance = tmp_path / "source.gguf", tmp_path / "importance.gguf"
    subprocess.run([sys.executable, BENCHMARKS / "dither.py", smollm2_path, source], check=True)

    def made(name: str, *options: object) -> tuple[float, float]:
        """Divergence and bits per weight."""
        path = tmp_path / f"{name}.gguf"
        result = CliRunner().invoke(quantize, [str(option) for option in (source, path, "--json", *options)])
        assert result.exit_code == 0, result.exception
        bits = json.loads(result.stdout)["bits_per_weight"]
        return divergence_of(path, source, 4096, tmp_path), bits

    plain, _ = made("plain", "--type", "q4_k_m")
    text = ("--imatrix", calibration, "--calibration-chunks", CHUNKS, "--save-imatrix", importance)
    weighted, bits = made("weighted", "--type", "q4_k_m", *text)
    measured, least = made("measured", "--bpw", bits, "--imatrix", importance, "--calibration", calibration)
    assert least <= bits
    assert weighted < IMPORTANCE * plain
    assert measured < MEASURED * weighted
