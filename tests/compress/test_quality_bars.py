"""Real models by GPTQ and AWQ: nearer to their float form than by rounding on the same kind of grid."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.cli.quantize import convert, quantize
from octavo.quality.evaluation import ReferenceOptions, WindowOptions, evaluate_text
from octavo.quality.texts import read_text

GPTQ, AWQ = 0.7, 0.85
"""The largest divergence beside that of rounding, symmetric for GPTQ and with zeros for AWQ."""
CHUNKS = 12


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half prose, half code, and none of it in the text that the models are judged on."""
    prose = "".join(path.read_text() for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md")))
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text(prose + "".join(module.read_text() for module in modules)[: len(prose)])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "group", "tokens"), [("smollm2_path", 64, 4096), ("qwen_0_5b_path", 128, 2048)])
def test_calibration_of_real_models(
    fixture: str, group: int, tokens: int, calibration: Path, tmp_path: Path, request: pytest.FixtureRequest
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
        reference = ReferenceOptions(str(source), folder=tmp_path / "references")
        report, _ = evaluate_text(str(path), read_text(None), WindowOptions(max_tokens=tokens), reference=reference)
        assert report.divergence is not None
        return report.divergence.mean_kl

    text = ("--calibration", calibration, "--calibration-chunks", CHUNKS)
    assert divergence("gptq-4bit", *text) < GPTQ * divergence("rtn-4bit")
    assert divergence("awq", *text) < AWQ * divergence("rtn-4bit", "--asymmetric")
