"""Quantized weights written by the formats' own libraries, which also judge them, where these are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.loader.safetensors import open_safetensors
from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints import Lowered, lowered

ROWS, WIDTH = 128, 256


def weight_of(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Lowered:
    save_file({f"layer.{part}": tensor.contiguous() for part, tensor in tensors.items()}, path)
    [weight] = lowered(ConfigReader({"q": config}).section("q"), open_safetensors(path))
    return weight


def random_matrix() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [64, 256, 1024])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_of_four_bits(kind: str, block: int, nested: bool, tmp_path: Path) -> None:
    """The library dequantizes the matrix as one row: its CPU code takes wrong scales for blocks longer than a row."""
    functional = pytest.importorskip("bitsandbytes.functional")
    options = {"blocksize": block, "quant_type": kind, "compress_statistics": nested}
    data, state = functional.quantize_4bit(random_matrix(), **options)
    tensors = {"weight": data} | {f"weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    weight = weight_of(tmp_path / "x.safetensors", tensors, {"quant_method": "bitsandbytes"}).make()
    state.shape = torch.Size([1, ROWS * WIDTH])
    expected = functional.dequantize_4bit(data, state).numpy().reshape(ROWS, WIDTH)
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=1e-6, atol=1e-7)
    absmax = random_matrix().reshape(-1, block).abs().amax(1).repeat_interleave(block).reshape(ROWS, WIDTH).numpy()
    # Half of the widest gap of either table, and the rounding of nested scales.
    assert (np.abs(weight.dequantize() - random_matrix().numpy()) < 0.2 * absmax).all()


def test_bitsandbytes_of_eight_bits(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    data, scb, _ = functional.int8_vectorwise_quant(random_matrix().half())
    tensors = {"weight": data, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    weight = weight_of(tmp_path / "x.safetensors", tensors, {"quant_method": "bitsandbytes"}).make()
    expected = functional.int8_vectorwise_dequant(data, scb).numpy()
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
@pytest.mark.parametrize("optimize", [False, True])
def test_hqq(bits: int, optimize: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("hqq.core.quantize")
    linear = torch.nn.Linear(WIDTH, ROWS, bias=False)
    linear.weight.data = random_matrix()
    config = library.BaseQuantizeConfig(nbits=bits, group_size=64, axis=1)
    config["weight_quant_params"]["optimize"] = optimize
    layer = library.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    weight = weight_of(tmp_path / "x.safetensors", dict(layer.state_dict()), {"quant_method": "hqq"}).make()
    np.testing.assert_allclose(weight.dequantize(), layer.dequantize().numpy(), rtol=1e-6, atol=2e-6)


INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True, "num_bits": 8}
FOUR_BIT_FLOAT = {"type": "float", "symmetric": True, "num_bits": 4}


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        *(("pack-quantized", {**INT, "num_bits": n, "strategy": "group", "group_size": 64}) for n in (2, 3, 4, 5, 8)),
        ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("pack-quantized", {**INT, "num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("pack-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {**INT, "num_bits": 8, "strategy": "tensor"}),
        ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("float-quantized", {**FLOAT, "strategy": "tensor"}),
        ("float-quantized", {**FLOAT, "strategy": "channel"}),
        ("float-quantized", {**FLOAT, "strategy": "block", "block_structure": [64, 128]}),
        ("nvfp4-pack-quantized", {**FOUR_BIT_FLOAT, "strategy": "tensor_group", "group_size": 16}),
    ],
)
def test_compressed_tensors(form: str, weights: dict[str, Any], tmp_path: Path) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    base = pytest.importorskip("compressed_tensors.compressors").BaseCompressor
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
    w = random_matrix()
    block = {"tensor": (ROWS, WIDTH), "channel": (1, WIDTH), "block": weights.get("block_structure")}
    rows, columns = block.get(weights["strategy"]) or (1, weights.get("group_size"))
    parts = w.reshape(ROWS // rows, rows, WIDTH // columns, columns)
    low, high = parts.amin((1, 3)), parts.amax((1, 3))
    state = {"weight": w}
    if weights["strategy"] == "tensor_group":
        state["weight_global_scale"] = utils.generate_gparam(w.min(), w.max())
    scale, zero = utils.calculate_qparams(low, high, scheme.weights, state.get("weight_global_scale"))
    is_tensor = weights["strategy"] == "tensor"
    state |= {"weight_scale": scale.reshape(1) if is_tensor else scale, "weight_zero_point": zero.to(torch.int8)}
    if weights["symmetric"]:
        state.pop("weight_zero_point")
    compressor = base.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": scheme.model_dump()}}
    weight = weight_of(tmp_path / "x.safetensors", stored, config).make()
    expected = compressor.decompress(stored, scheme)["weight"].float().numpy()
    np.testing.assert_allclose(weight.dequantize(), expected, rtol=1e-6 if form != "nvfp4-pack-quantized" else 5e-3)
    assert np.abs(weight.dequantize() - w.numpy()).mean() < 1
