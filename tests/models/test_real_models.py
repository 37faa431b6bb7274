"""The real models in the reference backend against transformers' own reading of the same files, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.backends import ExecutorLimits, reference
from octavo.backends.cpu.lowering import PASSES
from octavo.graph.passes import optimize
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import build_graph
from tests.models.test_parity import assert_close
from tests.support.batches import Request, step
from tests.support.tiny_models import expected_logits

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
