"""`tools/real_models.py`: on the real models that are here, on tiny ones, and what it reports of failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.models import known_architectures
from tests.support import quantized_checkpoints, tiny_models
from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
real_models = load_script(ROOT / "tools" / "real_models.py")

# Fixture -> architecture, and the model for the documentation.
REAL_MODELS = {
    "smollm2_path": ("llama", "SmolLM2 135M (GGUF)"),
    "qwen_0_5b_path": ("qwen2", "Qwen2.5-Coder 0.5B (GGUF)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fixture", REAL_MODELS)
def test_real_model(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    family, _ = REAL_MODELS[fixture]
    result = real_models.compared(family, path.name, path)
    assert result.passed, result
    assert not result.problem


def test_every_family_of_the_tool_is_known() -> None:
    assert set(real_models.MODELS) <= set(known_architectures().values())


@pytest.mark.parametrize("name", ["qwen3", "granitehybrid", "mamba2"])
def test_the_tool_compares_a_checkpoint(name: str, tmp_path: Path) -> None:
    """With attention, with both and with states alone."""
    tiny_models.save_safetensors(tiny_models.tiny_model(name), tmp_path)
    result = real_models.compared("", "tiny", tmp_path)
    assert result.passed, result
    assert result.family == known_architectures()[tiny_models.config_values(name)["model_type"]]
    assert "not compared" not in result.row()


@pytest.mark.parametrize("layout", ["bitnet", "bitnet-divided"])
def test_the_tool_compares_bitnet_without_the_rounding_of_activations(layout: str, tmp_path: Path) -> None:
    """transformers rounds them to eight bits, the reference backend does not."""
    quantized_checkpoints.write(tiny_models.tiny_model("bitnet"), tmp_path, *quantized_checkpoints.CASES[layout])
    result = real_models.compared("bitnet", "tiny", tmp_path)
    assert result.passed, result


def test_the_tool_reports_what_differs_and_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.save_safetensors(tiny_models.tiny_model("qwen3"), tmp_path / "model")
    read = real_models.own_logits
    monkeypatch.setattr(real_models, "own_logits", lambda *arguments: read(*arguments) * 1.01)
    result = real_models.compared("qwen3", "tiny", tmp_path / "model")
    assert result.error == pytest.approx(0.01, rel=0.2)
    assert not result.passed
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "larch"}))
    result = real_models.compared("qwen3", "tiny", tmp_path / "model")
    assert (result.error, result.passed) == (None, False)
    assert "larch" in result.row()


def test_the_tool_fails_without_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_models, "LOCAL", tmp_path)
    report = tmp_path / "report.md"
    assert real_models.main(["--local", "--report", str(report)]) == 1
    assert report.read_text().startswith("| family |")
