"""The values of a step lie where the memory plan says, and nothing that is still read is overwritten."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.backends import ExecutorLimits
from octavo.backends.torch import executor as executor_module
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.executor import TorchExecutor
from octavo.backends.torch.operations import evaluate
from octavo.backends.torch.step import TorchStep
from octavo.backends.torch.workspace import Workspace, unplaced_bytes
from octavo.graph.builder import Graph, Node
from octavo.graph.memory_plan import MemoryPlan, plan
from octavo.graph.ops.linear import FusedLinear
from octavo.graph.values import TOKENS, Parameter, Value
from tests.support.batches import Request, step
from tests.support.tiny_models import CONFIGS, NUM_CACHE_GROUPS, tiny_graph
from tests.support.traced_steps import TracedReplay

QUICK = {"llama", "gemma3n", "mixtral", "deepseek3", "lfm2", "bloom"}
LIMITS = ExecutorLimits(32, 3, 32, 48, 5)
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (13, 3)]


def compiled(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> TorchExecutor:
    found = TorchBackend(torch.device("cpu"), dtype, **options).compile(*tiny_graph(name), LIMITS)
    found.allocate_cache(8 * NUM_CACHE_GROUPS, 8, 4)
    return found


def results(subject: TorchExecutor) -> list[np.ndarray]:
    """Two prompts in chunks, mixed steps, hidden states, then a token each."""
    requests = [Request([*prompt, 5, 6, 7, 8], [3 * i, 3 * i + 1, 3 * i + 2]) for i, prompt in enumerate(PROMPTS)]
    found = []
    for number, counts in enumerate(((9, 3), (4, 1), (1, 1), (1, 1))):
        batch = step(list(zip(requests, counts, strict=True)), block_size=8, num_groups=NUM_CACHE_GROUPS)
        if number == 2:
            batch.hidden_indices, batch.logits_indices = batch.logits_indices, np.zeros(0, np.int32)
        output = subject.submit(batch).wait()
        found.append(output.hidden_states if number == 2 else output.logits)
    return found


def needed(graph: Graph, node: Node) -> set[Value]:
    """The values that this operation, later ones or the caller read."""
    index = graph.nodes.index(node)
    later = {value for other in graph.nodes[index:] for value in other.op.inputs}
    return later | {*graph.outputs, graph.hidden_states}


def poison(workspace: Workspace, alive: list[Tensor]) -> int:
    """Makes NaNs of all that no tensor needs. Returns the number of these bytes."""
    is_alive = torch.zeros_like(workspace.bytes)
    whole_numbers = {4: torch.int32, 2: torch.int16, 8: torch.int64}
    for x in alive:
        numbers = is_alive.view(whole_numbers[x.element_size()])
        numbers.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(-1)
    workspace.bytes[is_alive == 0] = 0xFF
    return int((is_alive == 0).sum())


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CONFIGS])
def test_what_no_operation_needs_may_hold_anything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each operation, all of the workspace but the values that are still read becomes NaN."""
    expected, subject = results(compiled(name)), compiled(name)
    poisoned, made = [], dict[Value, Tensor]()  # whole values: the head sees some rows at a time

    def over_nans(node: Node, running: TorchStep) -> None:
        workspace, values = subject._workspace, needed(subject._graph, node)
        assert workspace is not None
        if not running.values:
            made.clear()
        alive = [x for value, x in made.items() if value in values]
        assert all(x.untyped_storage().data_ptr() == workspace.bytes.data_ptr() for x in alive)
        poisoned.append(poison(workspace, alive))
        evaluate(node, running)
        made[node.output] = running.values[node.output]

    monkeypatch.setattr(executor_module, "evaluate", over_nans)
    for found, wanted in zip(results(subject), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert np.isfinite(found).all()
    assert min(poisoned) > 0


def test_the_peak_is_known_before_the_weights_are_loaded() -> None:
    backend = TorchBackend(torch.device("cpu"), torch.float32)
    sizes = backend.sizes(*tiny_graph("llama"), LIMITS)
    subject = compiled("llama")
    assert subject._workspace is not None
    assert 0 < subject._workspace.bytes.nbytes <= sizes.workspace_bytes == subject.workspace_bytes
    subject.sleep()
    assert subject._workspace is None
    subject.wake_up()
    assert subject._workspace is not None


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3n", marks=pytest.mark.slow)])
def test_captured_steps_of_all_sizes_share_their_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[dict[Value, int]] = []

    def watched(node: Node, running: TorchStep) -> None:
        if not running.values:
            places.append({})
        evaluate(node, running)
        places[-1][node.output] = running.values[node.output].data_ptr()

    monkeypatch.setattr(executor_module, "evaluate", watched)
    subject = compiled(name, capture=Launched)
    assert len(places) == 3  # 3, 2 and 1 sequences
    assert places[0] == places[1] == places[2]
    results(subject)
    assert all(found.items() <= places[0].items() for found in places[3:])


class Launched:
    """Implements `octavo.backends.torch.graphs.Replay` by running the step."""

    def __init__(self, run: Any) -> None:
        self._run, self.output = run, run()

    def __call__(self) -> None:
        self._run()


def test_replays_of_recorded_operations_use_the_workspace() -> None:
    for found, wanted in zip(results(compiled("llama", capture=TracedReplay)), results(compiled("llama")), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_values_of_bfloat16_and_logits_of_float32_lie_in_one_workspace() -> None:
    found, wanted = results(compiled("llama", torch.bfloat16)), results(compiled("llama"))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == np.float32
        assert np.abs(a - b).max() < 0.1 * np.abs(b).max()


def test_a_start_plans_its_places_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Graph] = []

    def planned(graph: Graph, *args: Any, **options: Any) -> MemoryPlan:
        calls.append(graph)
        return plan(graph, *args, **options)

    monkeypatch.setattr("octavo.backends.torch.workspace.plan", planned)
    TorchBackend(torch.device("cpu"), torch.float32).compile(*tiny_graph("llama"), LIMITS)
    assert len(calls) == 1


def test_matrices_that_are_written_out() -> None:
    """Of one type, the matrices of a product are one and written out together; of two types, one after the other."""
    a, b = Parameter("a.weight", (256, 64)), Parameter("b.weight", (64, 64))
    op = FusedLinear(Value(8, TOKENS, 64), None, (a, b), (None, None))
    fused = Mock(nodes=[Node(op, Value(9, TOKENS, 320), "")], outputs=[], results=(), makes_logits=False)
    limits = ExecutorLimits(512, 1, 1, 16)

    def needed(types: dict[Parameter, str]) -> int:
        return unplaced_bytes(fused, limits, torch.bfloat16, types)

    assert needed({a: "Q4_K", b: "Q4_K"}) == 2 * (256 + 64) * 64
    assert needed({a: "Q4_K", b: "Q6_K"}) == 2 * 256 * 64
    assert needed({}) == 0
