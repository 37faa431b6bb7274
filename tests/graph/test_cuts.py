"""docs/add_operation.md is true: its class, and others that are made up here, work with nothing else told of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, get_backend, reference
from octavo.backends.cpu.lowering import PASSES
from octavo.batch import Array
from octavo.errors import GraphError
from octavo.graph.builder import Graph
from octavo.graph.cost import node_cost
from octavo.graph.cuts import Cut, Groups
from octavo.graph.ops.base import Evaluation, Op, StepSizes
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.passes import optimize
from octavo.graph.values import Parameter, RowDomain, Value
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import build_graph
from octavo.quantization.packed import DenseWeight, Weight
from tests.graph.test_shard import assert_same, logits_of, ranks_of
from tests.support.batches import Request, step
from tests.support.scripts import load_script
from tests.support.tiny_encoders import save_gguf, tiny_encoder

PAGE = Path(__file__).parents[2] / "docs" / "add_operation.md"
HIDDEN, INNER, VOCAB = 256, 768, 96
NUM_RANKS = 2


@pytest.fixture(scope="module")
def bend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Op]]:
    """The class of the page, which is cut by columns."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("page") / "bend_of_the_page.py"
    path.write_text(code)
    yield load_script(path).Bend
    del sys.modules[path.stem]


@dataclass(frozen=True, slots=True)
class HeadTurn(Op):
    """The columns of each head from the last to the first."""

    cut: ClassVar[Cut[Any]] = Groups("head_dim")

    x: Value
    head_dim: int

    def infer_shape(self) -> tuple[RowDomain, int]:
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        x = step.values[self.x]
        return x.reshape(len(x), -1, self.head_dim)[:, :, ::-1].reshape(x.shape)


def made(bend: Any, x: Value) -> Op:
    op: Op = bend(x, Parameter("l.0.share", (INNER,)))
    return op


def graph_with(*made_up: type[Op] | int) -> tuple[Graph, dict[str, Weight]]:
    """A gated part of a layer with these operations between its products; a number is the head_dim of a HeadTurn."""
    shapes = {"embed": (VOCAB, HIDDEN), "l.0.up": (INNER, HIDDEN), "l.0.down": (HIDDEN, INNER), "head": (VOCAB, HIDDEN)}
    rng = np.random.default_rng(0)
    weights: dict[str, Weight] = {
        f"{name}.weight": DenseWeight(rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32))
        for name, shape in shapes.items()
    }
    weights["l.0.share"] = DenseWeight(rng.normal(0, 1, INNER).astype(np.float32))
    g = Graph({name: weight.shape for name, weight in weights.items()})
    x = g.embedding("embed")
    inner = g.linear(x, "l.0.up")
    for each in made_up:
        op = HeadTurn(inner, each) if isinstance(each, int) else made(each, inner)
        inner = g.add(op)
    x = x + g.linear(inner, "l.0.down")
    g.output = g.logits(g.select_rows(x), "head")
    return g, weights


def test_a_declared_operation_is_cut(bend: type[Op]) -> None:
    """Each rank has its columns of the value and of the vector; only the sums of the products are exchanged."""
    graph, weights = graph_with(bend)
    assert_same(logits_of(graph, weights, NUM_RANKS), logits_of(graph, weights, 1))
    for rank, part in enumerate(ranks_of(graph, weights, NUM_RANKS)):
        (op,) = (node.op for node in part.nodes if isinstance(node.op, bend))
        assert op.x.cols == op.share.shape[0] == INNER // NUM_RANKS
        assert op.share.part is not None
        assert op.share.part.begin == rank * INNER // NUM_RANKS
        kinds = [type(node.op) for node in part.nodes if isinstance(node.op, (AllReduce, AllGather))]
        assert kinds == [AllReduce, AllReduce, AllGather]  # embedding, product, logits


def test_an_operation_without_a_declaration_is_whole(bend: type[Op], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bend, "cut", Op.cut)
    graph, weights = graph_with(bend)
    assert_same(logits_of(graph, weights, NUM_RANKS), logits_of(graph, weights, 1))
    for part in ranks_of(graph, weights, NUM_RANKS):
        (op,) = (node.op for node in part.nodes if isinstance(node.op, bend))
        assert (op.x.cols, op.share.part) == (INNER, None)


@pytest.mark.parametrize(("head_dim", "is_cut"), [(96, True), (INNER, False)])
def test_groups_stay_together(bend: type[Op], head_dim: int, is_cut: bool) -> None:
    graph, weights = graph_with(bend, head_dim)
    assert_same(logits_of(graph, weights, 3), logits_of(graph, weights, 1))
    found = {node.op.x.cols for part in ranks_of(graph, weights, 3) for node in part.nodes if type(node.op) is HeadTurn}
    assert max(found) == (3 * head_dim if is_cut else INNER)
    assert all(cols % head_dim == 0 for cols in found)


@pytest.mark.parametrize("backend", ["cpu", "torch:cpu"])
def test_a_backend_without_a_kernel_refuses_it_by_name(bend: type[Op], backend: str) -> None:
    graph, weights = graph_with(bend)
    with pytest.raises(GraphError, match=r"l\.0: bend: the (cpu backend has no kernel|torch backend does not support)"):
        get_backend(backend).compile(graph, weights, ExecutorLimits(64, 4, 64, 64))


def test_cost_and_passes_take_a_made_up_operation(bend: type[Op]) -> None:
    graph, weights = graph_with(bend)
    found = [node for node in optimize(graph, PASSES).nodes if isinstance(node.op, bend)]
    assert [node.op.name for node in found] == ["bend"]
    sizes = StepSizes(tokens=5, requests=1, outputs=1, context=5)
    cost = node_cost(found[0], sizes, {p: weights[p.name].nbytes for p in graph.parameters})
    assert cost.flops == 2 * INNER  # of the one row that is wanted
    assert cost.bytes_read == 4 * INNER + 4 * INNER


def test_slopes_of_encoders_are_cut_by_heads(tmp_path: Path) -> None:
    """Three ranks, of which one has two of the four heads, make the states of the whole graph."""
    checkpoint = open_checkpoint(save_gguf(tiny_encoder("jina-bert"), tmp_path / "model.gguf", "cls"))
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    found = []
    for size in (1, 3):
        parts = ranks_of(graph, checkpoint.weights, size)
        group = [reference.compile(part, checkpoint.weights, ExecutorLimits(64, 4, 64, 64)) for part in parts]
        batch = step([(Request(list(range(4, 34)), [0, 1]), 30)], block_size=16)
        batch.hidden_indices, batch.logits_indices = batch.logits_indices, batch.hidden_indices
        found.append([output.hidden_states for output in reference.ReferenceGroup(group).run(batch)])
    for hidden in found[1]:
        assert hidden is not None
        np.testing.assert_allclose(hidden, found[0][0], rtol=0, atol=1e-5)
