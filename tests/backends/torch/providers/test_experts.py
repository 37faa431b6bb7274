"""Mixtures of experts by the grouped products of a library, with a stand-in for it."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from octavo.backends import ExecutorLimits
from octavo.backends.memory import PackedType
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.plain import ACTIVATIONS
from octavo.backends.torch.providers.calls import ProvidedCalls
from octavo.backends.torch.providers.choice import choose, product_problems
from octavo.backends.torch.providers.humming import extra_bytes
from octavo.backends.torch.providers.mixture import expert_order
from octavo.backends.torch.providers.problems import Place
from octavo.backends.torch.weights import held_type
from octavo.backends.torch.workspace import unplaced_bytes
from octavo.graph.builder import Graph
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import Weight, stack
from tests.support.fake_humming import FakeLayer, install
from tests.support.quantize import random_weight

H200 = Place((9, 0), torch.bfloat16)
EXPERTS, WIDTH, INNER, TOP_K = 6, 512, 256, 2


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


class Case:
    """A mixture with random weights of these types (gate, up, down), rows, and their experts."""

    def __init__(self, types: tuple[str, str, str], rows: int = 9, held: int = EXPERTS, **options: Any) -> None:
        torch.manual_seed(4)
        shapes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
        self.weights = [
            stack([random_weight(name, shape, 10 * seed + number) for seed in range(held)])
            for number, (name, shape) in enumerate(zip(types, shapes, strict=True))
        ]
        names = ("gate", "up", "down")
        stacks = [Parameter(name, weight.shape) for name, weight in zip(names, self.weights, strict=True)]
        on_input = options.pop("on_input", False)
        routing = Routing(TOP_K, on_input=on_input, normalize=not on_input)
        self.op = MoE(Value(0, TOKENS, WIDTH), Parameter("router", (EXPERTS, WIDTH)), *stacks, routing, **options)
        self.matrices: list[Planes | Tensor] = [planes(weight) for weight in self.weights]
        self.biases = [torch.randn(held, weight.shape[1]).bfloat16() for weight in self.weights]
        self.x = torch.randn(rows, WIDTH).bfloat16()
        shares, chosen = torch.rand(rows, EXPERTS).topk(TOP_K)
        self.choice = (chosen - (EXPERTS - held), shares)  # the first ones belong to another rank
        self.own = Mock()
        self.own.gated_product.side_effect = lambda gate, up, kind, *_: (
            ACTIVATIONS[kind](gate.float()) * up
        ).bfloat16()

    def run(self, *, repeats: bool = False) -> Tensor:
        found: Tensor = ProvidedCalls(self.own, H200, products=True).experts(
            self.op, self.x, self.choice, self.matrices, self.biases, repeats=repeats
        )
        return found

    def expected(self) -> Tensor:
        """Row by row in float32."""
        gate, up, down = (torch.from_numpy(weight.dequantize()).float() for weight in self.weights)
        found = torch.zeros(len(self.x), WIDTH)
        for row, (chosen, shares) in enumerate(zip(*self.choice, strict=True)):
            for e, share in zip(chosen.tolist(), shares.tolist(), strict=True):
                if e < 0:
                    continue
                x = self.x[row].float() * (share if self.op.routing.on_input else 1.0)
                a, b = gate[e] @ x + self.biases[0][e], up[e] @ x + self.biases[1][e]
                if self.op.limit is not None:
                    a, b = a.clamp(max=self.op.limit), b.clamp(-self.op.limit, self.op.limit)
                y = down[e] @ (ACTIVATIONS[self.op.kind](a) * (b + self.op.up_offset)) + self.biases[2][e]
                found[row] += y * (1.0 if self.op.routing.on_input else share)
        return found


def planes(weight: Weight) -> Planes:
    found = planes_of(weight)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("types", "options"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), {}),
        (("Q8_0", "Q4_K", "Q5_1"), {"on_input": True}),
        (("MXFP4", "MXFP4", "MXFP4"), {"kind": "quick_gelu", "limit": 7.0, "up_offset": 1.0}),
        (("Q4_0", "Q4_0", "Q4_0"), {"held": 4, "first_expert": 2}),
    ],
)
def test_a_mixture_by_the_library(types: tuple[str, str, str], options: dict[str, Any]) -> None:
    case = Case(types, **options)
    found, expected = case.run(), case.expected()
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() / expected.norm() < 2e-2
    assert not case.own.experts.called
    assert [layer.experts for layer in FakeLayer.made] == [(len(case.matrices[0].codes),)] * 3  # type: ignore[union-attr]
    assert torch.equal(case.run(), found)


def test_pairs_lie_in_the_order_of_their_experts_and_those_of_other_ranks_last() -> None:
    order, experts, ends = expert_order(torch.tensor([[2, 0], [-1, 2], [0, 3]]), 3)
    assert order.tolist() == [1, 4, 0, 3, 2, 5]
    assert experts.tolist() == [0, 0, 2, 2, 2, 2]
    assert ends.tolist() == [0, 2, 2, 4]


def test_other_mixtures_stay_ours_and_nothing_is_packed() -> None:
    quantized = ("Q4_K", "Q4_K", "Q4_K")
    plain = Case(quantized)
    plain.matrices[2] = torch.zeros(EXPERTS, WIDTH, INNER)
    for case in (Case(quantized, rows=4), Case(("Q4_K", "Q4_K", "IQ4_NL")), plain):
        case.run()
        assert case.own.experts.call_count == 1
    case = Case(quantized)
    case.run(repeats=True)
    streamed = ProvidedCalls(case.own, H200, products=False)
    streamed.experts(case.op, case.x, case.choice, case.matrices, case.biases, repeats=False)
    many = Case(quantized, rows=256 * EXPERTS // TOP_K + 1)
    many.run()
    assert (case.own.experts.call_count, many.own.experts.call_count) == (2, 1)
    assert not FakeLayer.made


def test_a_library_that_fails_leaves_the_whole_mixture_to_our_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = FakeLayer.transform

    def transform(layer: FakeLayer) -> None:
        if layer.shape == (WIDTH, INNER):
            raise RuntimeError("no compiler")
        whole(layer)

    monkeypatch.setattr(FakeLayer, "transform", transform)
    case = Case(("Q4_K", "Q4_K", "Q4_K"))
    calls = ProvidedCalls(case.own, H200, products=True)
    for _ in range(2):
        calls.experts(case.op, case.x, case.choice, case.matrices, case.biases, repeats=False)
    assert case.own.experts.call_count == 2
    assert len(FakeLayer.made) == 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "products of experts with Q4_K: humming failed, so our own kernel is used: no compiler"


def graph_with(down: str) -> tuple[Graph, dict[Parameter, PackedType]]:
    """A graph with a mixture, and its matrices: experts with gate, up and router in Q8_0."""
    stacks: dict[str, Weight] = {
        "gate": random_weight("Q8_0", (64, 256), 1),
        "embed": random_weight("Q8_0", (9, 256), 1),
    }
    given = {f"m.{name}.weight": weight for name, weight in stacks.items()}
    for part, name in (("gate", "Q8_0"), ("up", "Q8_0"), ("down", down)):
        given[f"m.experts.{part}_proj.weight"] = stack([random_weight(name, (256, 256), seed) for seed in range(64)])
    graph = Graph({name: weight.shape for name, weight in given.items()})
    graph.output = graph.moe(graph.embedding("m.embed"), "m", Routing(TOP_K))
    return graph, {p: held_type(given, p, torch.bfloat16) for p in graph.parameters if p.is_matrix}


def test_the_problems_of_a_graph_have_its_stacks_and_routers() -> None:
    problems = product_problems(*graph_with("Q4_K"), H200)
    assert {p.name.rpartition(".weight")[0]: (q.type_name, q.experts) for p, q in problems.items()} == {
        "m.gate": ("Q8_0", 0),
        **{f"m.experts.{name}_proj": ("Q8_0", 64) for name in ("gate", "up")},
        "m.experts.down_proj": ("Q4_K", 64),
    }
    lines = {choose(q).line for q in problems.values()}
    assert lines == {
        "products of some rows with Q8_0: humming",
        "products of experts with Q8_0: humming",
        "products of experts with Q4_K: humming",
    }
    down = next(q for q in problems.values() if q.type_name == "Q4_K")
    assert extra_bytes(down) == 64 * 256 * 256 * 5 // 8


@pytest.mark.parametrize(
    ("down", "reason"), [("IQ4_NL", "its codes are entries of a table"), ("BF16", "its weights are plain numbers")]
)
def test_a_stack_that_the_library_lacks_keeps_the_others_of_its_mixture(down: str, reason: str) -> None:
    found = [choose(q) for q in product_problems(*graph_with(down), H200).values() if q.experts]
    assert {choice.winner for choice in found} == {"triton"}
    assert f"products of experts with Q8_0: triton (humming: another stack of the mixture: {reason})" in {
        choice.line for choice in found
    }


def test_rows_in_the_order_of_their_experts_are_counted() -> None:
    graph, matrices = graph_with("Q4_K")
    limits = ExecutorLimits(32, 3, 32, 48, 5)
    own, theirs = (unplaced_bytes(graph, limits, torch.bfloat16, {}, provided) for provided in ((), matrices))
    assert theirs - own == 32 * TOP_K * 256 * (2 + 2 + 4)
