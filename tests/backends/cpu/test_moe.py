"""Mixtures of experts: every option and stored type against numpy, and the same bits for every step and thread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight, Weight
from tests.backends.cpu.conftest import AMX_ERROR, assert_agrees, available_isas
from tests.support.quantize import random_weight

HIDDEN, EXPERTS = 256, 6
ERROR = 8e-4  # of int8 activations, twice
MOE_AMX_ERROR = 4 * AMX_ERROR
X = Value(0, TOKENS, HIDDEN)
V3 = Routing(2, "sigmoid", scale=2.5, num_groups=3, top_groups=2, group_best=2)


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def weights_of(type_name: str, width: int, seed: int = 13, identities: int = 0) -> dict[str, Weight]:
    """Experts of that type, of intermediate size `width`; those of `down` fit any width. Identities are among them."""
    down = "F32" if width % 32 else "Q8_0" if width % 256 else type_name
    held = EXPERTS - identities
    shapes = {"gate": (held, width), "up": (held, width), "down": (held, HIDDEN)}
    biases = {f"{n}_bias": DenseWeight(gaussian(*s, seed=seed + i)) for i, (n, s) in enumerate(shapes.items(), 3)}
    return biases | {
        "router": DenseWeight(gaussian(EXPERTS, HIDDEN, seed=seed) * np.float32(0.05)),
        "router_bias": DenseWeight(gaussian(EXPERTS, seed=seed + 1)),
        "selection_bias": DenseWeight(gaussian(EXPERTS, seed=seed + 2)),
        "expert_scale": DenseWeight(gaussian(EXPERTS, seed=seed + 9)),
        "gate": random_weight(type_name, (held, width, HIDDEN), seed + 6),
        "up": random_weight(type_name, (held, width, HIDDEN), seed + 7),
        "down": random_weight(down, (held, HIDDEN, width), seed + 8),
    }


def moe(weights: dict[str, Weight], routing: Routing, biases: str = "", **options) -> MoE:
    """biases: the first letters of those to use: of the router, of the selection, of the experts."""
    names = ["router", "gate", "up", "down"]
    names += [n for n in weights if n.endswith("_bias") and ("e" if n[0] in "gud" else n[0]) in biases]
    parameters = {n: Parameter(n, weights[n].shape, plain=len(weights[n].shape) == 2 and "_" in n) for n in names}
    return MoE(X, routing=routing, **parameters, **options)


@pytest.mark.parametrize(
    ("type_name", "width", "routing", "options"),
    [
        ("Q4_K", 64, Routing(2), {}),
        ("Q4_1", 32, Routing(6, normalize=False, scale=2.5), {}),
        ("F16", 40, Routing(1, "sigmoid"), {"kind": "gelu_tanh"}),
        ("Q4_0", 24, Routing(3, "sigmoid"), {}),  # experts that begin within a panel
        ("F16", 40, V3, {"biases": "rse"}),
        ("Q8_0", 24, Routing(4), {"biases": "re", "kind": "quick_gelu", "limit": 1.5, "up_offset": 1.0}),
        ("Q8_0", 24, Routing(4), {"biases": "re", "limit": 0.3, "limits_activated": True}),
        ("F16", 40, Routing(3, "sigmoid"), {"limit": 0.5, "limits_activated": True, "up_offset": 1.0}),
        ("Q4_K", 64, Routing(3, normalize=False, scale=3.0, num_identities=2), {}),
        ("F16", 40, Routing(4, "sigmoid", num_identities=3), {"biases": "rse"}),
        ("Q4_0", 24, Routing(6, normalize=False, on_input=True, num_identities=1), {}),
        ("MXFP4", 96, Routing(4), {"biases": "re", "kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0}),
        ("Q4_K", 64, Routing(1, "sigmoid", normalize=False, on_input=True), {}),
        ("F16", 40, Routing(2, "sigmoid", normalize=False, on_input=True), {}),
        ("Q4_0", 24, Routing(3, on_input=True), {"biases": "re"}),
        ("F16", 40, Routing(2, "sparsemixer", normalize=False, jitter=0.01), {}),
        ("Q8_0", 24, Routing(3, "sparsemixer", normalize=False, jitter=0.3), {"biases": "r", "kind": "below_zero"}),
        ("Q6_K", 64, Routing(1, num_groups=2, normalize=False), {"biases": "s"}),
    ],
)
def test_experts(type_name, width, routing, options, isa, run_op, numpy_op):
    weights = weights_of(type_name, width, identities=routing.num_identities)
    op, x = moe(weights, routing, **options), gaussian(30, HIDDEN)
    together = run_op(op, {X: x}, weights=weights, isa=isa, threads=3)
    expected = numpy_op(op, {X: x}, weights=weights)
    assert relative_error(together, expected) <= ERROR
    assert_agrees(together, run_op(op, {X: x}, weights=weights, isa="scalar"), isa, expected, MOE_AMX_ERROR)
    for begin, end in ((17, 18), (3, 5), (6, 15), (0, 29)):
        for threads in (1, 2):
            part = run_op(op, {X: x[begin:end]}, weights=weights, isa=isa, threads=threads)
            assert_same_bits(part, together[begin:end])


@pytest.mark.parametrize("on_input", [False, True])
def test_rows_of_the_router_and_factors_of_experts(on_input, isa, run_op, numpy_op):
    weights, router_x = weights_of("Q4_K", 64), Value(1, TOKENS, HIDDEN)
    routing = Routing(2, on_input=on_input)
    scale = Parameter("expert_scale", (EXPERTS,))
    op = moe(weights, routing, expert_scale=scale, router_x=router_x)
    values = {X: gaussian(30, HIDDEN), router_x: gaussian(30, HIDDEN, seed=1)}
    together = run_op(op, values, weights=weights, isa=isa, threads=3)
    expected = numpy_op(op, values, weights=weights)
    assert relative_error(together, expected) <= ERROR
    assert relative_error(numpy_op(moe(weights, routing), values, weights=weights), expected) > 0.1
    assert_agrees(together, run_op(op, values, weights=weights, isa="scalar"), isa, expected, MOE_AMX_ERROR)
    for begin, end in ((17, 18), (6, 15)):
        part = {value: array[begin:end] for value, array in values.items()}
        assert_same_bits(run_op(op, part, weights=weights, isa=isa, threads=2), together[begin:end])


@pytest.mark.parametrize(("type_name", "width"), [("Q4_K", 64), ("Q4_0", 24), ("F16", 40)])
def test_experts_without_gates_and_a_router_of_wider_rows(type_name, width, isa, run_op, numpy_op):
    """`up` in the place of the gate gives the bits of a gate with the same numbers."""
    weights, router_x = weights_of(type_name, width), Value(1, TOKENS, 2 * HIDDEN)
    weights["router"] = DenseWeight(gaussian(EXPERTS, 2 * HIDDEN) * np.float32(0.05))
    weights["gate"] = random_weight(type_name, (EXPERTS, width, HIDDEN), 20)  # those of `up`
    weights["up"] = random_weight(type_name, (EXPERTS, width, HIDDEN), 20)
    gated = moe(weights, Routing(2), kind="relu", router_x=router_x)
    op = replace(gated, gate=gated.up)
    assert (op.products, op.parameters) == ((op.up, op.down), (op.router, op.up, op.down))
    values = {X: gaussian(30, HIDDEN), router_x: gaussian(30, 2 * HIDDEN, seed=1)}
    out = run_op(op, values, weights=weights, isa=isa, threads=3)
    assert relative_error(out, numpy_op(op, values, weights=weights)) <= ERROR
    assert_same_bits(out, run_op(gated, values, weights=weights, isa=isa, threads=2))


@pytest.mark.parametrize("type_name", _native.packable_types())
def test_every_type(type_name, run_op, numpy_op):
    weights = weights_of(type_name, 256)
    op, x = moe(weights, Routing(2), "e"), gaussian(20, HIDDEN)
    expected = numpy_op(op, {X: x}, weights=weights)
    for isa in available_isas():
        together = run_op(op, {X: x}, weights=weights, isa=isa, threads=2)
        assert relative_error(together, expected) <= ERROR, isa
        assert_same_bits(run_op(op, {X: x[7:8]}, weights=weights, isa=isa, threads=2), together[7:8])


@pytest.mark.parametrize("rows", [1, 11, 40])
def test_experts_without_rows(rows, isa, run_op, numpy_op):
    """The selection bias leaves the first and the last two experts to nobody, or all rows to one."""
    for favoured in ([1, 2, 3], [5]):
        weights = weights_of("Q5_K", 64)
        bias = np.full(EXPERTS, -100, np.float32)
        bias[favoured] = 0
        weights["selection_bias"] = DenseWeight(bias)
        op, values = moe(weights, Routing(1), "s"), {X: gaussian(rows, HIDDEN)}
        out = run_op(op, values, weights=weights, isa=isa, threads=2)
        assert relative_error(out, numpy_op(op, values, weights=weights)) <= ERROR


def test_one_rank_adds_the_identities(isa, run_op, numpy_op):
    """Without them the output lacks their weights times x. Rows that choose nothing else have that alone."""
    weights, values = weights_of("Q4_K", 64, identities=4), {X: gaussian(30, HIDDEN)}
    bias = np.zeros(EXPERTS, np.float32)
    bias[:2] = -100
    weights["selection_bias"] = DenseWeight(bias)
    for top_k in (2, 5):
        op = moe(weights, Routing(top_k, num_identities=4), "s")
        elsewhere = replace(op, adds_identities=False)
        both = [run_op(each, values, weights=weights, isa=isa, threads=2) for each in (op, elsewhere)]
        assert relative_error(both[0], numpy_op(op, values, weights=weights)) <= ERROR
        expected = numpy_op(elsewhere, values, weights=weights)
        assert np.abs(expected).max() == 0 if top_k == 2 else relative_error(both[1], expected) <= ERROR
        assert np.abs(both[1]).max() == 0 or top_k > 2


def test_equal_scores_choose_the_lower_expert(isa, run_op, numpy_op):
    weights = weights_of("Q4_K", 32)
    weights["router"] = DenseWeight(np.zeros((EXPERTS, HIDDEN), np.float32))
    values = {X: gaussian(3, HIDDEN)}
    for routing in (Routing(2), Routing(2, num_groups=3, top_groups=2), Routing(5)):
        op = moe(weights, routing)
        out = run_op(op, values, weights=weights, isa=isa)
        assert relative_error(out, numpy_op(op, values, weights=weights)) <= ERROR


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_what_is_not_a_number_reaches_the_output(scoring, isa, run_op):
    weights = weights_of("Q4_K", 64)
    x = gaussian(4, HIDDEN)
    x[2, 5] = np.nan
    with pytest.raises(RuntimeError, match=r"moe .*gave -?nan at row 2"):
        run_op(moe(weights, Routing(2, scoring)), {X: x}, weights=weights, isa=isa, threads=2)


@pytest.mark.parametrize("hidden", [32, 33])
def test_steps_too_long_for_one_chunk(hidden, run_op, numpy_op):
    """About 1,300 rows of such wide experts are computed at a time."""
    x, width, rows = Value(0, TOKENS, hidden), 4096, 1500
    weights: dict[str, Weight] = {
        "router": DenseWeight(gaussian(3, hidden) * np.float32(0.1)),
        "gate": random_weight("F16", (3, width, hidden), 1),
        "up": random_weight("F16", (3, width, hidden), 2),
        "down": random_weight("Q4_K", (3, hidden, width), 3),
    }
    router_x = Value(1, TOKENS, hidden)
    op = MoE(x, *(Parameter(name, w.shape) for name, w in weights.items()), Routing(3), router_x=router_x)
    values = {x: gaussian(rows, hidden), router_x: gaussian(rows, hidden, seed=1)}
    out = run_op(op, values, weights=weights, threads=2)
    assert relative_error(out, numpy_op(op, values, weights=weights)) <= ERROR
    part = {value: array[1200:1400] for value, array in values.items()}
    assert_same_bits(run_op(op, part, weights=weights, threads=1), out[1200:1400])
