"""Products with quantized weights against float64."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.torch.kernels.common import INTERPRETED
from octavo.backends.torch.kernels.linear import linear, most_rows, parts_of
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.workspace import MANY_ROWS
from octavo.quantization.packed import Weight
from tests.support.canonical import random_grouped
from tests.support.quantize import random_weight

_FORMATS: list[Weight] = [
    random_grouped((40, 272), 1, bits=4, group=16),
    random_grouped((40, 384), 2, bits=4, group=128, mins="zeros"),
    random_grouped((40, 256), 3, bits=3, group=32, mins="minima"),
    random_grouped((40, 144), 4, bits=8, group=None),
    random_weight("Q6_K", (36, 256), 5),
    random_weight("IQ4_NL", (36, 288), 6),
    random_weight("MXFP4", (36, 160), 7),
    random_weight("Q1_0", (36, 256), 8),
    random_weight("Q2_K", (36, 256), 9),
    random_weight("Q4_0", (36, 160), 10),
    random_weight("Q4_K", (36, 512), 11),
    random_weight("Q5_K", (36, 256), 12),
    random_grouped((40, 336), 13, bits=4, group=None),
    random_grouped((40, 160), 14, bits=4, group=32, mins="zeros"),
]


def _planes(weight: Weight, device: torch.device) -> tuple[Planes, torch.Tensor]:
    planes = planes_of(weight)
    assert planes is not None
    return planes.to(device), torch.from_numpy(weight.dequantize()).double().to(device)


def _check(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (found.double() - expected).norm() / expected.norm()
    assert error < tolerance


@pytest.mark.parametrize("weight", _FORMATS, ids=lambda w: w.type_name)
@pytest.mark.parametrize("rows", [1, 3, 19])
def test_products_of_every_kind_of_planes(weight: Weight, rows: int, device: torch.device) -> None:
    planes, numbers = _planes(weight, device)
    x = torch.randn(rows, numbers.shape[1] + 8, device=device)[:, : numbers.shape[1]]
    bias = torch.randn(numbers.shape[0], device=device)
    residual = torch.randn(rows, numbers.shape[0] + 3, device=device)[:, : numbers.shape[0]]
    out = torch.full((rows, numbers.shape[0]), float("nan"), device=device)
    linear(x, planes, bias, residual, out=out)
    _check(out, x.double() @ numbers.T + bias.double() + residual.double(), 1e-6)


@pytest.mark.parametrize("rows", [1, 5])
def test_half_precision_rows(rows: int, device: torch.device) -> None:
    planes, numbers = _planes(_FORMATS[0], device)
    x = torch.randn(rows, numbers.shape[1], device=device).half()
    _check(linear(x, planes), x.double() @ numbers.T, 1e-3)
    assert linear(x, planes).dtype == torch.float16
    assert linear(x, planes, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("size", [1e-10, 1e12])
def test_one_row_of_small_and_large_numbers(size: float, device: torch.device) -> None:
    # Its codes are numbers below the normal ones, which the row is to bring back.
    planes, numbers = _planes(_FORMATS[1], device)
    x = torch.randn(1, numbers.shape[1], device=device) * size
    _check(linear(x, planes), x.double() @ numbers.T, 1e-6)


def test_no_rows(device: torch.device) -> None:
    planes, numbers = _planes(_FORMATS[0], device)
    assert linear(torch.zeros(0, numbers.shape[1], device=device), planes).shape == (0, 40)


def test_deterministic_rows_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    planes, numbers = _planes(_FORMATS[4], device)
    x = torch.randn(37, numbers.shape[1], device=device)
    together = linear(x, planes, deterministic=True)
    # Under the interpreter a tile's product is numpy's, which depends on the place in the tile: both are the first.
    for row in (0, 32) if INTERPRETED else (0, 17, 36):
        assert torch.equal(linear(x[row : row + 1], planes, deterministic=True)[0], together[row])


def test_the_workspace_has_room_for_the_first_matrix_that_is_written_out(device: torch.device) -> None:
    assert min(most_rows(_planes(weight, device)[0]) for weight in _FORMATS) == MANY_ROWS - 1


def test_parts_of_the_columns_cover_them() -> None:
    assert parts_of(blocks=32, tiles=1000) == 1
    assert parts_of(blocks=32, tiles=64) == 4
    assert parts_of(blocks=1, tiles=1) == 1
