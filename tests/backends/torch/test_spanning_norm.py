"""Norms over the columns of several ranks: sums in float32, in one order, and nothing that waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.backends import ExecutorLimits
from octavo.backends.parameters import column_step
from octavo.backends.torch import executor as executor_module
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.operations import evaluate
from octavo.backends.torch.workspace import value_types
from octavo.graph.ops.collective import AllReduce
from octavo.graph.ops.spanning_norm import GroupSums
from octavo.graph.shard import shard
from tests.support.batches import Request, step
from tests.support.spanning import SPAN, spanning_graph
from tests.support.tiny_models import tiny_graph

LIMITS = ExecutorLimits(64, 8, 64, 16)
RNG = np.random.default_rng(3)


class Recorder(TorchDispatchMode):
    """The names of the operations that run, and those that copy numbers of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_sums_are_float32_on_their_way_through_the_ranks() -> None:
    graph, weights = tiny_graph("olmo2")
    part = shard(graph, 0, 2, lambda p: column_step(weights, p.name))
    types = value_types(part, torch.bfloat16)
    sums = [node.output for node in part.nodes if isinstance(node.op, GroupSums)]
    passed = [n.output for n in part.nodes if isinstance(n.op, AllReduce) and n.op.x in sums]
    others = [n.output for n in part.nodes if isinstance(n.op, AllReduce) and n.op.x not in sums]
    assert sums
    assert passed
    assert others
    assert {types[value] for value in sums + passed} == {torch.float32}
    assert {types[value] for value in others} == {torch.bfloat16}


def test_a_step_has_the_sums_in_float32() -> None:
    """In bfloat16 the sum of 32 squares would have eight bits."""
    graph, weights = spanning_graph()
    subject = TorchBackend(torch.device("cpu"), torch.bfloat16).compile(graph, weights, LIMITS)
    subject.allocate_cache(8, 8)
    found = subject.submit(step([(Request([5, 7, 3], [0]), 3)], block_size=8)).wait().logits
    x = torch.from_numpy(weights["embed.weight"].dequantize()[[5, 7, 3]]).bfloat16().double().numpy()
    groups = SPAN.groups(64)
    expected = np.zeros_like(x)
    for number in np.unique(groups):
        own = groups == number
        centred = x[:, own] - x[:, own].sum(axis=1, keepdims=True) / SPAN.group
        mean = (
            sum((x[:, [i]] - x[:, own].sum(axis=1, keepdims=True) / SPAN.group) ** 2 for i in np.flatnonzero(own))
            / SPAN.group
        )
        expected[:, own] = centred / np.sqrt(mean + 1e-5)
    # One rounding to bfloat16, of the result.
    assert found is not None
    np.testing.assert_array_equal(found, torch.from_numpy(expected).bfloat16().float().numpy())


def test_a_step_adds_in_one_order_and_copies_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, weights = spanning_graph()
    subject = TorchBackend(torch.device("cpu"), torch.float32).compile(graph, weights, LIMITS)
    subject.allocate_cache(64, 8)
    texts = [Request(RNG.integers(0, 96, 8).tolist(), [2 * i]) for i in range(8)]
    batch = step([(text, 8) for text in texts], block_size=8)
    recorder = Recorder()

    def recorded(node: Any, running: Any) -> None:
        with recorder:
            evaluate(node, running)

    monkeypatch.setattr(executor_module, "evaluate", recorded)
    found = subject.submit(batch).wait().logits
    assert any("sum" in name for name in recorder.names)
    forbidden = ("index_add", "index_put", "scatter_add", "aten.index.Tensor", "lift_fresh", "_local_scalar")
    assert not [name for name in recorder.names if any(word in name for word in forbidden)]
    for _ in range(3):
        np.testing.assert_array_equal(subject.submit(batch).wait().logits, found)
