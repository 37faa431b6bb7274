"""Products of codes with codes against their numpy meaning."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from octavo.backends.torch.coded import rounded
from octavo.backends.torch.kernels.coded_linear import coded_linear
from octavo.backends.torch.kernels.common import INTERPRETED
from octavo.backends.torch.kernels.gate import coded_rows
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.plain import ProductEnd, scaled_linear
from octavo.backends.torch.quantized import product, whole
from octavo.quantization.packed import Float8Weight, GroupedWeight
from octavo.quantization.packed.float8 import e4m3
from tests.support.rounded_inputs import rounded_inputs

RNG = np.random.default_rng(3)
Kind = Literal["int8", "row", "tensor", "block", "small block"]
KINDS: tuple[Kind, ...] = ("int8", "row", "tensor", "block", "small block")


def _weight(kind: Kind, features: int, width: int) -> GroupedWeight | Float8Weight:
    if kind == "int8":
        codes = RNG.integers(1, 256, (features, width), dtype=np.uint8)
        return GroupedWeight(8, None, codes, RNG.random((features, 1)).astype(np.float16), 128, inputs="int8")
    rows, columns = {"row": (1, None), "tensor": (None, None), "block": (128, 128), "small block": (16, 32)}[kind]
    data = e4m3(RNG.standard_normal((features, width)).astype(np.float32) * 100)
    shape = (-(-features // (rows or features)), -(-width // (columns or width)))
    return Float8Weight("E4M3", data, RNG.random(shape).astype(np.float32), rows, columns, "e4m3")


def _planes(weight: GroupedWeight | Float8Weight, device: torch.device) -> Planes:
    found = planes_of(weight)
    assert found is not None
    assert found.inputs is not None
    np.testing.assert_allclose(whole(found, torch.float32).numpy(), weight.dequantize(), rtol=1e-6)
    return found.to(device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "features", "width"), [(1, 37, 304), (4, 70, 144), (13, 33, 288), (30, 40, 64),
                                                         (130, 70, 176)])  # fmt: skip
def test_products_of_codes(kind: Kind, rows: int, features: int, width: int, device: torch.device) -> None:
    weight = _weight(kind, features, width)
    planes = _planes(weight, device)
    assert planes.inputs is not None
    x = torch.randn(rows, width + 5, device=device)[:, :width]
    bias, residual = torch.randn(features, device=device), torch.randn(rows, features + 3, device=device)[:, :features]
    codes = coded_rows(x, planes.inputs)
    numbers = rounded_inputs(x.cpu().numpy(), *planes.inputs).astype(np.float64)
    expected = numbers @ weight.dequantize().astype(np.float64).T
    wide = expected + bias.cpu().double().numpy() + residual.cpu().double().numpy()
    found = coded_linear(codes, planes, bias, residual)
    assert found.dtype == torch.float32
    # E4M3 units of a GPU keep fewer bits than float32 within 128 columns; a code may differ where a number is between.
    tolerance = 1e-5 if INTERPRETED else 2e-3
    np.testing.assert_allclose(found.cpu().numpy(), wide, rtol=0, atol=tolerance * np.abs(wide).max())
    same = coded_linear(codes, planes, deterministic=True, dtype=torch.float32)
    np.testing.assert_allclose(same.cpu().numpy(), expected, rtol=0, atol=tolerance * np.abs(wide).max())
    assert torch.equal(coded_linear(coded_rows(x[:1], planes.inputs), planes, deterministic=True)[0], same[0])
    plain = product(x.cpu(), planes.to("cpu"))
    np.testing.assert_allclose(plain.numpy(), expected, rtol=0, atol=1e-5 * np.abs(wide).max())


def test_int8_sums_are_exact(device: torch.device) -> None:
    """Each way gives the same numbers: a row alone, a few and many of them."""
    planes = _planes(_weight("int8", 40, 4100), device)
    x = torch.randn(70, 4100, device=device)
    assert planes.inputs is not None
    together = coded_linear(coded_rows(x, planes.inputs), planes)
    for rows in (1, 3, 16, 64):
        part = coded_linear(coded_rows(x[:rows], planes.inputs), planes)
        torch.testing.assert_close(part, together[:rows], rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
@pytest.mark.parametrize("number", ["inf", "nan"])
@pytest.mark.parametrize("kind", ["int8", "row"])
def test_numbers_that_are_not_finite_stay_so(kind: Kind, number: str, device: torch.device) -> None:
    planes = _planes(_weight(kind, 8, 48), device)
    x = torch.randn(3, 48, device=device)
    x[1, 7] = float(number)
    assert planes.inputs is not None
    for found in (coded_linear(coded_rows(x, planes.inputs), planes), product(x.cpu(), planes.to("cpu"))):
        assert found.isfinite().all(dim=1).tolist() == [True, False, True]


def test_the_product_of_the_library_has_the_same_numbers(device: torch.device) -> None:
    planes = _planes(_weight("row", 48, 160), device)
    x = torch.randn(20, 160, device=device)
    assert planes.inputs is not None
    bias, residual = (torch.randn(*shape, device=device).bfloat16() for shape in ((48,), (20, 48)))
    expected = rounded(x, planes.inputs) @ whole(planes, torch.float32).T + bias.float() + residual.float()
    for out in (None, residual):  # the latter is overwritten
        end = ProductEnd(bias, residual, out=out)
        found = scaled_linear(coded_rows(x, planes.inputs), planes.codes, planes.scales, end)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=float(expected.abs().max()) / 100)


def test_sums_of_the_library_lie_in_the_memory_of_the_result_or_in_planned_memory(device: torch.device) -> None:
    planes = _planes(_weight("row", 48, 128), device)
    assert planes.inputs is not None
    x = coded_rows(torch.randn(17, 128, device=device).bfloat16(), planes.inputs)
    args = (x, planes.codes, planes.scales)
    plain = scaled_linear(*args, ProductEnd())
    out, sums = (torch.empty(17, 48, dtype=torch.bfloat16, device=device) for _ in range(2))
    assert scaled_linear(*args, ProductEnd(out=out)).data_ptr() == out.data_ptr()
    assert torch.equal(out, plain)
    residual = torch.randn(17, 48, device=device).bfloat16()
    expected = plain + residual
    found = scaled_linear(*args, ProductEnd(residual=residual, out=residual), lambda _shape, _dtype: sums)
    assert found.data_ptr() == residual.data_ptr()
    assert torch.equal(found, expected)
    assert torch.equal(sums, plain)


def test_no_rows(device: torch.device) -> None:
    planes = _planes(_weight("int8", 8, 40), device)
    assert planes.inputs is not None
    assert coded_linear(coded_rows(torch.zeros(0, 40, device=device), planes.inputs), planes).shape == (0, 8)
