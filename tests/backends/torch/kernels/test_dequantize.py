"""Planes and their numbers against the canonical weights, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.backends.torch.kernels.dequantize import dequantize
from octavo.backends.torch.kernels.planes import planes_of
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.ggml_blocks import E2M1_DOUBLED
from octavo.quantization.packed import CodebookWeight, Float8Weight, GroupedWeight, Weight
from octavo.quantization.packed.codebook import CodebookWeight as Codebook
from octavo.quantization.packed.grouped import packed
from tests.support.canonical import random_grouped
from tests.support.quantize import random_weight

_PLAIN = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}


def _codebook(shape: tuple[int, ...], block: int, seed: int, *, with_rows: bool = False) -> CodebookWeight:
    rng = np.random.default_rng(seed)
    *rows, width = shape
    groups = (*rows, width // block)
    scales = rng.integers(0, 126, groups).astype(np.uint8) if with_rows else rng.normal(size=groups).astype(np.float32)
    row_scales = rng.uniform(0.1, 2, (*rows, 1)).astype(np.float32) if with_rows else None
    table = tuple(rng.normal(size=16).astype(np.float32).tolist())
    return Codebook("NF4", table, block, rng.integers(0, 256, (*rows, width // 2)).astype(np.uint8), scales, row_scales)


def _float8(kind: str, shape: tuple[int, ...], blocks: tuple[int | None, int | None]) -> Float8Weight:
    rng = np.random.default_rng(3)
    *lead, rows, width = shape
    data = rng.integers(0, 256, shape).astype(np.uint8)
    counts = (*lead, -(-rows // (blocks[0] or rows)), -(-width // (blocks[1] or width)))
    return Float8Weight(kind, data, rng.normal(size=counts).astype(np.float32), *blocks)


_GROUPED: list[GroupedWeight] = [
    *(random_grouped((5, 256), bits, bits=bits, group=64) for bits in range(2, 9)),
    random_grouped((3, 96), 20, bits=4, group=32, mins="zeros"),
    random_grouped((3, 96), 21, bits=3, group=16, mins="minima"),
    random_grouped((4, 80), 22, bits=8, group=None, zero=128, dtype=np.float32),
    random_grouped((2, 3, 128), 23, bits=5, group=128, mins="minima", dtype=np.float32),
    replace(random_grouped((4, 144), 24, bits=8, group=None), inputs="int8"),  # whose codes have a sign
]
_OTHERS: list[Weight] = [
    _codebook((5, 192), 64, 1),
    _codebook((5, 160), 32, 2),
    _codebook((2, 3, 64), 16, 3, with_rows=True),
    replace(_codebook((3, 96), 32, 4), table=tuple((E2M1_DOUBLED / 2).tolist())),
    _float8("E4M3", (5, 144), (None, None)),
    _float8("E5M2", (5, 144), (1, None)),
    _float8("E4M3", (150, 272), (128, 128)),
]


def _check(weight: Weight, device: torch.device) -> None:
    planes = planes_of(weight)
    assert planes is not None
    out = torch.full(weight.shape, float("nan"), dtype=torch.float32, device=device)
    dequantize(planes.to(device), torch.float32, out=out)
    # On a GPU a product and the minimum after it are rounded once.
    tolerance = 2e-7 if device.type == "cuda" and planes.minima is not None else 0
    torch.testing.assert_close(
        out.cpu(), torch.from_numpy(weight.dequantize()), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("type_name", sorted(set(BLOCK_SIZES) - _PLAIN))
def test_every_ggml_type_is_exact(type_name: str, device: torch.device) -> None:
    _check(random_weight(type_name, (3, 2 * BLOCK_SIZES[type_name][0]), 7), device)


@pytest.mark.parametrize("weight", [*_GROUPED, *_OTHERS], ids=lambda w: f"{w.type_name}-{w.shape}")
def test_every_canonical_type_is_exact(weight: Weight, device: torch.device) -> None:
    _check(weight, device)


def test_a_column_order_is_kept_beside_the_codes(device: torch.device) -> None:
    weight = random_grouped((6, 128), 1, group=32)
    order = np.random.default_rng(0).permutation(128).astype(np.int32)
    ordered = GroupedWeight(weight.bits, weight.group, weight.codes, weight.scales, weight.zero, column_order=order)
    planes = planes_of(ordered)
    assert planes is not None
    numbers = dequantize(planes.to(device), torch.float32)
    x = torch.randn(2, 128, dtype=torch.float64, device=device)
    expected = x.cpu() @ torch.from_numpy(ordered.dequantize()).double().T
    torch.testing.assert_close((planes.to(device).ordered(x) @ numbers.double().T).cpu(), expected)


def test_rows_of_a_table(device: torch.device) -> None:
    weight = random_weight("Q6_K", (40, 256), 5)
    planes = planes_of(weight)
    assert planes is not None
    rows = torch.tensor([39, 0, 7, 7, 1], dtype=torch.int32, device=device)
    found = dequantize(planes.to(device), torch.float16, rows)
    expected = torch.from_numpy(weight.dequantize())[rows.cpu().long()].half()
    assert torch.equal(found.cpu(), expected)
    assert dequantize(planes.to(device), torch.float16, rows[:0]).shape == (0, 256)


@pytest.mark.parametrize("bits", range(2, 9))
def test_planes_take_the_bits_of_the_codes(bits: int) -> None:
    planes = planes_of(random_grouped((4, 256), 1, bits=bits))
    assert planes is not None
    taken = planes.codes.nbytes + (0 if planes.high is None else planes.high.nbytes)
    assert taken == 4 * 256 * (8 if bits == 7 else bits) // 8


def test_types_without_kernels_have_no_planes() -> None:
    small = GroupedWeight(4, 8, packed(np.zeros((2, 64), np.uint8), 4), np.ones((2, 8), np.float16))
    assert planes_of(small) is None
    assert planes_of(random_weight("F16", (2, 64), 1)) is None
