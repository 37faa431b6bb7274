"""Products of experts and of few rows against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.backends.torch.kernels.dense import dense_linear
from octavo.backends.torch.kernels.experts import Gate, expert_gate, expert_linear, sort_by_expert
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.plain import ProductEnd
from octavo.backends.torch.products import linear
from octavo.quantization.packed import Weight, stack
from tests.support.canonical import random_grouped
from tests.support.quantize import random_weight


def _chosen(rows: int, experts: int, top_k: int, device: torch.device) -> torch.Tensor:
    rng = np.random.default_rng(rows)
    found = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]) if rows else np.zeros((0, top_k))
    return torch.from_numpy(found.astype(np.int64)).to(device)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_sorted_pairs_are_each_in_a_tile_of_their_expert(rows: int, device: torch.device) -> None:
    chosen = _chosen(rows, 5, 2, device)
    chosen[:, 0] = 3  # of which there are many
    chosen[:, 1] = torch.where(chosen[:, 1] == 3, 4, chosen[:, 1])
    pairs, expert_of, size = sort_by_expert(chosen, 5)
    assert sorted(pairs[pairs >= 0].tolist()) == list(range(rows * 2))
    for tile, expert in enumerate(expert_of.tolist()):
        inside = pairs[tile * size : (tile + 1) * size]
        inside = inside[inside >= 0].long()
        assert (chosen.reshape(-1)[inside] == expert).all()
        assert inside.tolist() == sorted(inside.tolist())


@pytest.mark.parametrize("kind", ["Q4_K", "plain"])
@pytest.mark.parametrize("rows", [3, 21])
def test_products_of_experts(kind: str, rows: int, device: torch.device) -> None:
    experts, top_k = 4, 2
    if kind == "plain":
        numbers = torch.randn(experts, 40, 72, device=device)
        weight: Planes | torch.Tensor = numbers
        numbers = numbers.double()
    else:
        stacked = stack([random_weight(kind, (40, 256), seed) for seed in range(experts)])
        planes = planes_of(stacked)
        assert planes is not None
        weight, numbers = planes.to(device), torch.from_numpy(stacked.dequantize()).double().to(device)
    chosen = _chosen(rows, experts, top_k, device)
    x, bias = torch.randn(rows, numbers.shape[2], device=device), torch.randn(experts, 40, device=device)
    factors = torch.rand(rows * top_k, device=device)
    places = sort_by_expert(chosen, experts)
    found = expert_linear(x, weight, places, top_k, bias, factors)
    flat = chosen.reshape(-1)
    spread = x.double().repeat_interleave(top_k, 0)
    wide = torch.einsum("pk,pnk->pn", spread, numbers[flat]) + bias.double()[flat]
    assert (found.double() - wide * factors.double()[:, None]).norm() / wide.norm() < 1e-6
    # Rows of their own for each pair, as those between the products of an expert are.
    again = expert_linear(spread.float(), weight, places, 1, bias)
    assert (again.double() - wide).norm() / wide.norm() < 1e-6
    halves = expert_linear(x.half(), weight.half() if isinstance(weight, torch.Tensor) else weight, places, top_k)
    assert halves.dtype == torch.float16
    assert (halves.double() + bias.double()[flat] - wide).norm() / wide.norm() < 3e-3


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("plain", "plain"), ("plain", "Q4_K")])
@pytest.mark.parametrize("rows", [1, 21])
def test_gate_and_up_of_experts_in_one_launch(kinds: tuple[str, str], rows: int, device: torch.device) -> None:
    """Also of two types; codes beside numbers take a launch each."""
    weights: list[Planes | torch.Tensor] = []
    numbers = []
    for seed, kind in enumerate(kinds):
        stacked = stack([random_weight("Q4_K" if kind == "plain" else kind, (40, 256), seed * 4 + i) for i in range(4)])
        numbers.append(torch.from_numpy(stacked.dequantize()).to(device))
        planes = planes_of(stacked)
        assert planes is not None
        weights.append(numbers[-1] if kind == "plain" else planes.to(device))
    chosen, x = _chosen(rows, 4, 2, device), torch.randn(rows, 256, device=device) / 16
    biases = [torch.randn(4, 40, device=device) for _ in range(2)]
    flat, spread = chosen.reshape(-1), x.double().repeat_interleave(2, 0)
    gate, up = (
        torch.einsum("pk,pnk->pn", spread, n.double()[flat]) + b.double()[flat]
        for n, b in zip(numbers, biases, strict=True)
    )
    for end in (Gate("silu"), Gate("gelu", 1.5, 1.0), Gate("silu", 0.2, 0.0, after=True)):
        limit = float("inf") if end.limit is None else end.limit
        kind = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}[end.kind]
        activated = kind(gate).clamp(max=limit) if end.after else kind(gate.clamp(max=limit))
        expected = activated * (up.clamp(-limit, limit) + end.offset)
        places = sort_by_expert(chosen, 4)
        found = expert_gate(x, (weights[0], weights[1]), places, 2, (biases[0], biases[1]), end)
        assert (found.double() - expected).norm() / expected.norm() < 1e-5


def test_no_rows(device: torch.device) -> None:
    places = sort_by_expert(_chosen(0, 4, 2, device), 4)
    x = torch.zeros(0, 72, device=device)
    assert expert_linear(x, torch.zeros(4, 8, 72, device=device), places, 2).shape == (0, 8)
    assert dense_linear(x, torch.zeros(8, 72, device=device)).shape == (0, 8)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_of_plain_weights(rows: int, device: torch.device) -> None:
    x, weight = torch.randn(rows, 143, device=device)[:, :130], torch.randn(37, 130, device=device)
    bias, residual = torch.randn(37, device=device), torch.randn(rows, 37, device=device)
    found = dense_linear(x, weight, bias, residual)
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    assert (found.double() - expected).norm() / expected.norm() < 1e-6
    assert torch.equal(dense_linear(x[:1], weight, bias, residual[:1])[0], found[0])


@pytest.mark.parametrize("kind", ["plain", "Q4_K", "int8 by int8"])
@pytest.mark.parametrize("rows", [1, 3, 21])
def test_a_product_takes_a_low_rank_pair_where_its_residual_ends(kind: str, rows: int, device: torch.device) -> None:
    """x W + (x A) B + residual: two small products, the second onto the residual, which is that of the large one."""
    stored: Weight = random_weight("Q4_K", (40, 256), 0)
    if kind == "int8 by int8":
        stored = replace(random_grouped((40, 256), 0, bits=8, group=None), inputs="int8")
    planes = planes_of(stored)
    assert planes is not None
    numbers = torch.from_numpy(stored.dequantize()).to(device)
    matrix = numbers if kind == "plain" else planes.to(device)
    x, residual = torch.randn(rows, 256, device=device), torch.randn(rows, 40, device=device)
    down, up = torch.randn(4, 256, device=device), torch.randn(40, 4, device=device)
    bias, memory = torch.randn(40, device=device), residual.clone()
    small = linear(x, down, ProductEnd(), repeats=False)
    low = linear(small, up, ProductEnd(residual=memory, out=memory), repeats=False)
    found = linear(x, matrix, ProductEnd(bias, low, None, low), repeats=False)
    assert found.data_ptr() == memory.data_ptr()  # no pass and no memory for the sum
    pair = (x.double() @ down.double().T) @ up.double().T
    expected = x.double() @ numbers.double().T + pair + bias.double() + residual.double()
    assert (found.double() - expected).norm() / expected.norm() < (1e-2 if kind == "int8 by int8" else 1e-5)
    assert (found.double() - (expected - pair)).norm() / expected.norm() > 0.05
