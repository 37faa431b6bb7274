"""An adapter of PEFT on a real quantized model: the logits beside those of PEFT over the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.adapters.read import read_adapter
from octavo.backends import ExecutorLimits
from octavo.graph.ops.low_rank import AdapterLimits
from octavo.loader.checkpoint import open_checkpoint
from tests.support import adapted_steps
from tests.support.peft_adapters import save_peft
from tests.support.tiny_models import expected_logits

pytest.importorskip("peft", reason="peft is not installed", exc_type=ImportError)

TOKENS = np.random.default_rng(0).integers(1000, 50000, 24).tolist()


@pytest.mark.slow
def test_the_effect_of_an_adapter_on_a_quantized_model(qwen_0_5b_path: Path, tmp_path: Path) -> None:
    """Quantized activations make the base's own error; the adapter's effect is that of PEFT within this error."""
    path = qwen_0_5b_path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    expected = save_peft(model, tmp_path / "adapter", TOKENS, seed=1, r=16, lora_alpha=4)
    plain = expected_logits(model, TOKENS)
    checkpoint = open_checkpoint(path)
    limits = ExecutorLimits(64, 4, 64, 64, adapters=AdapterLimits(4, 16))
    executor = adapted_steps.executor_of(checkpoint, "cpu", limits)
    adapter = read_adapter(tmp_path / "adapter", adapted_steps.base_of(checkpoint))
    adapted_steps.load(executor, {1: adapter})
    [ours], [base] = (adapted_steps.logits_of(executor, [TOKENS], [slot]) for slot in (1, -1))
    executor.close()

    def error(logits: np.ndarray, judge: np.ndarray) -> float:
        return float(np.sqrt(np.mean((logits - judge) ** 2)) / judge.std())

    effect, of_base, of_adapted = error(plain, expected), error(base, plain), error(ours, expected)
    assert effect > 0.3
    assert of_adapted < 2 * of_base + 0.01
