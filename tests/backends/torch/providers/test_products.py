"""Planes as `humming-kernels` reads them, and the calls that choose it, with a stand-in for the library."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.plain import ProductEnd
from octavo.backends.torch.providers import humming
from octavo.backends.torch.providers.calls import ProvidedCalls, provided
from octavo.backends.torch.providers.grouped import grouped_codes
from octavo.backends.torch.providers.problems import Place
from octavo.quantization.packed import GGMLWeight, Weight
from tests.support.canonical import random_grouped
from tests.support.fake_humming import FakeLayer, install
from tests.support.quantize import random_weight

H200 = Place((9, 0), torch.bfloat16)
INTEGERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SHAPE = (64, 256)


def planes(weight: Weight) -> Planes:
    found = planes_of(weight)
    assert found is not None
    return found


def numbers(p: Planes) -> Tensor:
    """(code - zero) * scale of each number, as `humming.utils.weight.dequantize_weight` has it."""
    codes, scales, zeros = grouped_codes(p)
    spread = [x.repeat_interleave(p.group, dim=1)[:, : SHAPE[1]] for x in (scales, zeros) if x is not None]
    middle = 1 << (p.bits + p.high_bits - 1)
    return (codes - (spread[1] if zeros is not None else middle)) * spread[0]


@pytest.mark.parametrize("type_name", INTEGERS)
def test_ggml_types_are_codes_with_a_scale_and_a_zero_a_group(type_name: str) -> None:
    weight = random_weight(type_name, SHAPE, 4)
    p = planes(weight)
    codes, scales, zeros = grouped_codes(p)
    assert codes.dtype == torch.int32
    assert scales.shape == (SHAPE[0], SHAPE[1] // p.group)
    assert zeros is None or zeros.shape == scales.shape
    assert p.group == (16 if type_name in ("Q2_K", "Q3_K", "Q6_K") else 32)
    expected = weight.dequantize()
    np.testing.assert_allclose(numbers(p).numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_group_without_a_scale_keeps_its_minimum() -> None:
    weight = random_weight("Q4_K", SHAPE, 4)
    assert isinstance(weight, GGMLWeight)
    data = weight.data.copy()
    data[0, 4] &= 0xC0  # the scale of the first group of the first block
    flat = GGMLWeight("Q4_K", data)
    expected = flat.dequantize()
    assert len(set(expected[0, :32].tolist())) == 1
    np.testing.assert_allclose(numbers(planes(flat)).numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def weights() -> dict[str, Weight]:
    found: dict[str, Weight] = {name: random_weight(name, SHAPE, 2) for name in (*INTEGERS, "MXFP4", "NVFP4")}
    return found | {"I4_128_Z": random_grouped(SHAPE, 3, bits=4, group=128, mins="zeros")}


@pytest.mark.parametrize("name", [*INTEGERS, "MXFP4", "NVFP4", "I4_128_Z"])
def test_a_product_by_the_library(name: str) -> None:
    """With scales and zeros in bfloat16, as the library has them beside rows in bfloat16."""
    weight = weights()[name]
    p = planes(weight)
    x = torch.randn(7, SHAPE[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    bias, residual = torch.randn(SHAPE[0]).bfloat16(), torch.randn(7, SHAPE[0]).bfloat16()
    own = Mock()
    calls = ProvidedCalls(own, H200, products=True)
    found = calls.linear(x, p, ProductEnd(bias, residual.clone()), repeats=False)
    expected = p.ordered(x).float() @ torch.from_numpy(weight.dequantize()).float().T
    total = expected + bias.float() + residual.float()
    assert (found.float() - total).norm() / total.norm() < 2e-2
    assert not own.linear.called
    into = residual.clone()
    assert calls.linear(x, p, ProductEnd(bias, into, None, into), repeats=False).data_ptr() == into.data_ptr()
    assert torch.equal(into, found)
    assert len(FakeLayer.made) == 1


def test_other_products_stay_ours() -> None:
    p, own = planes(weights()["Q4_K"]), Mock()
    calls = ProvidedCalls(own, H200, products=True)
    for rows, end, repeats in ((4, ProductEnd(), False), (257, ProductEnd(), False), (8, ProductEnd(), True),
                               (8, ProductEnd(dtype=torch.float32), False)):  # fmt: skip
        calls.linear(torch.zeros(rows, SHAPE[1]).bfloat16(), p, end, repeats=repeats)
    calls.linear(torch.zeros(8, 8).bfloat16(), torch.zeros(8, 8).bfloat16(), ProductEnd(), repeats=False)
    ProvidedCalls(own, H200, products=False).linear(torch.zeros(8, 256).bfloat16(), p, ProductEnd(), repeats=False)
    assert own.linear.call_count == 6
    assert not FakeLayer.made
    assert calls.normed is own.normed
    assert provided(own, Place((9, 0), torch.bfloat16, repeats=True)) is own
    assert provided(None, H200) is None


def test_a_library_that_fails_is_named_once_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeLayer, "transform", Mock(side_effect=RuntimeError("no compiler\nand more")))
    own = Mock()
    calls = ProvidedCalls(own, H200, products=True)
    for weight in (random_weight("Q4_K", SHAPE, 1), random_weight("Q4_K", SHAPE, 2)):
        for _ in range(2):
            calls.linear(torch.zeros(8, SHAPE[1]).bfloat16(), planes(weight), ProductEnd(), repeats=False)
    assert own.linear.call_count == 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "products of some rows with Q4_K: humming failed, so our own kernel is used: no compiler"


def test_a_packed_matrix_goes_with_its_codes() -> None:
    calls, p = ProvidedCalls(Mock(), H200, products=True), planes(weights()["Q4_K"])
    calls.linear(torch.zeros(8, SHAPE[1]).bfloat16(), p, ProductEnd(), repeats=False)
    assert len(calls._layers) == 1
    del p
    gc.collect()
    assert len(calls._layers) == 0


def test_prompts_and_states_go_to_their_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From as many tokens on as a launch is worth; with a float32 cache, or few tokens, ours."""
    from octavo.backends.torch.providers import calls as calls_module
    from tests.backends.torch.providers.test_attention import PLAIN, Case

    chosen = Mock()
    monkeypatch.setattr(calls_module, "provider", lambda name: getattr(chosen, name))
    own = Mock()
    found = ProvidedCalls(own, H200, products=True)
    case = Case(PLAIN, 64, (64,), 8)
    half: Any = SimpleNamespace(keys=case.pages.keys.half(), group=0)
    for pages, some in ((case.pages, case.some), (half, case.some), (half, Case(PLAIN, 63, (64,), 8).some)):
        found.attend(case.q, pages, PLAIN, some, None, repeats=False, memory=(None, None))
    assert chosen.varlen.attend.call_count == 1
    assert own.attend.call_count == 2
    assert humming.LEAST_ROWS == 5
