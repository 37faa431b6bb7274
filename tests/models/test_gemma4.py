"""Forms of Gemma 4's experts that its own checkpoints lack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from octavo.loader.checkpoint import open_checkpoint
from tests.models.test_parity import logits_of
from tests.support import tiny_models


def test_a_tensor_for_each_expert(tmp_path: Path) -> None:
    """As quantized checkpoints have them: the same bits as from the stacked tensors."""
    stacked = tiny_models.save_safetensors(tiny_models.tiny_model("gemma4-experts"), tmp_path)
    expected = logits_of(open_checkpoint(stacked))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        stem, _, last = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
        if stem.endswith(".experts"):
            for part, matrices in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
                tensors |= {f"{stem}.{e}.{part}.weight": matrix.clone() for e, matrix in enumerate(matrices)}
        else:
            tensors[name] = tensor
    assert len([name for name in tensors if ".experts." in name]) == 6 * 6 * 3
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    np.testing.assert_array_equal(logits_of(open_checkpoint(tmp_path)), expected)
