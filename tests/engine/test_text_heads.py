"""Dense layers against torch, for every activation that checkpoints may name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from octavo.engine.texts.text_heads import DenseLayer
from octavo.loader.dense_module import read_dense
from tests.support.text_models import save_dense


@pytest.mark.parametrize("activation", [nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer(activation: type[nn.Module], dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(24, 40, dtype=dtype), activation())
    save_dense(layer, tmp_path)
    vector = torch.randn(24)
    with torch.no_grad():
        expected = layer.float()(vector).numpy()
    actual = DenseLayer.load(read_dense(tmp_path))(vector.numpy())
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=1e-6)
