"""gpt-oss as it is published: experts in MXFP4, with transformers' reading of the blocks as the judge."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo.loader.checkpoint import open_checkpoint
from octavo.quantization.packed import GGMLWeight
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support.safetensors_writer import safetensors
from tests.support.tiny_models import expected_logits, stored_tensors, tiny_model

Tensors = dict[str, NDArray[np.generic]]


def with_quantized_experts(model: PreTrainedModel) -> Tensors:
    """Random blocks in place of the experts, which get their meaning. Returns what a checkpoint has."""
    rng = np.random.default_rng(0)
    tensors: Tensors = dict(stored_tensors(model))
    for i, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            experts, width, rows = parameter.shape
            blocks = rng.integers(0, 256, (experts, rows, width // 32, 16), dtype=np.uint8)
            scales = rng.integers(121, 125, (experts, rows, width // 32), dtype=np.uint8)
            meaning = convert_moe_packed_tensors(
                torch.from_numpy(blocks), torch.from_numpy(scales.copy()), dtype=torch.float32
            )
            with torch.no_grad():
                parameter.copy_(meaning.reshape(parameter.shape))
            stem = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[stem]
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
    return tensors


@pytest.mark.parametrize(("backend", "tolerance"), [("reference", 1e-4), ("cpu", 3e-2)])
def test_experts_in_mxfp4(backend: str, tolerance: float, tmp_path: Path) -> None:
    """The cpu backend rounds activations to 8 bits."""
    model = tiny_model("gpt-oss")
    (tmp_path / "model.safetensors").write_bytes(safetensors(with_quantized_experts(model)))
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    gate = checkpoint.weights["layers.0.mlp.experts.gate_proj.weight"]
    assert isinstance(gate, GGMLWeight)
    assert (gate.type_name, gate.shape) == ("MXFP4", (4, 96, 64))
    checkpoint.weights.release("layers.0.mlp.experts.gate_proj.weight")
    found, expected = logits_of(checkpoint, backend), expected_logits(model, TOKENS)
    if backend == "reference":
        assert_close(found, expected, tolerance)
    assert np.square(found - expected).sum() < tolerance**2 * np.square(expected).sum()
