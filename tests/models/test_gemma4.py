"""Forms of Gemma 4's experts that its own checkpoints lack."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.compress.forms.gemma4 import GGUF
from octavo.loader.checkpoint import open_checkpoint
from octavo.models._reading import ConfigReader
from octavo.models.gemma4 import Config
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


@pytest.mark.parametrize(("num_shared", "widths"), [(0, None), (2, [96, 96, 96, 96, 192, 192])])
def test_layers_that_share_are_twice_as_wide(num_shared: int, widths: list[int] | None) -> None:
    """The key of a GGUF file says of each layer what the model reads, and without such layers of all."""
    config = tiny_models.CONFIGS["gemma4"]().to_dict() | {"num_kv_shared_layers": num_shared, "intermediate_size": 96}
    reader = ConfigReader(config)
    cfg = Config.from_hf(reader)
    assert cfg.mlp.intermediate_size == (192 if widths else 96)
    found = GGUF.keys(cfg, reader)["feed_forward_length"]
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == (widths or 96)
