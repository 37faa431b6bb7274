"""The real models in the reference backend against transformers' own reading of the same files, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.backends import ExecutorLimits, reference
from octavo.backends.cpu.lowering import PASSES
from octavo.graph.passes import optimize
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import build_graph, known_architectures
from tests.models.test_parity import assert_close
from tests.support import quantized_checkpoints, tiny_models
from tests.support.batches import Request, step
from tests.support.scripts import load_script
from tests.support.tiny_models import expected_logits

ROOT = Path(__file__).resolve().parents[2]
real_models = load_script(ROOT / "tools" / "real_models.py")

NUM_TOKENS = 24
# Fixture -> architecture, and the model for the documentation.
REAL_MODELS = {
    "smollm2_path": ("llama", "SmolLM2 135M (GGUF)"),
    "qwen_0_5b_path": ("qwen2", "Qwen2.5-Coder 0.5B (GGUF)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fixture", REAL_MODELS)
def test_real_model(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    tokens = np.random.default_rng(0).integers(1000, 40000, NUM_TOKENS).tolist()
    checkpoint = open_checkpoint(path)
    assert checkpoint.architecture == REAL_MODELS[fixture][0]
    graph = optimize(build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes), PASSES)
    executor = reference.compile(graph, checkpoint.weights, ExecutorLimits(32, 1, 32, 64))
    executor.allocate_cache(8, 4)
    logits = executor.submit(step([(Request(tokens, [7, 1, 2, 3, 4, 5, 6]), NUM_TOKENS)])).wait().logits
    assert logits is not None
    executor.close()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert_close(logits, expected_logits(model, tokens))


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
