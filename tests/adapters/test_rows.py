"""Rows of different adapters in one step: against the definition, and bit for bit against each row alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from octavo.adapters.adapter import AdapterBase
from octavo.backends import ExecutorLimits, reference
from octavo.backends.cpu import _native
from octavo.backends.cpu import compiler as cpu
from octavo.backends.cpu.executor import CpuExecutor
from octavo.errors import GraphError, UsageError
from octavo.graph.adapters import adaptable_weights, low_rank_pass
from octavo.graph.builder import Graph
from octavo.graph.ops.adapted import AdaptedLinear
from octavo.graph.ops.adapted_moe import AdaptedMoE
from octavo.graph.ops.low_rank import AdapterLimits, BesideWeights
from octavo.graph.ops.moe import Routing
from octavo.graph.passes import optimize
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.models import build_graph
from octavo.quantization.packed import DenseWeight
from tests.support import adapted_steps
from tests.support.tiny_models import NUM_CACHE_GROUPS, save_safetensors, tiny_model

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, 96, n).tolist() for n in (9, 1, 2, 7, 5, 1)]
ISAS = _native.known_isas()[: _native.known_isas().index(_native.detected_isa()) + 1]


@pytest.fixture(scope="module", params=["llama", "deepseek2", "mixtral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """Products of q, k and v side by side, of gate and up, of single heads, of experts, and an output head."""
    folder = save_safetensors(tiny_model(request.param), tmp_path_factory.mktemp(request.param))
    checkpoint = open_checkpoint(Path(folder))
    yield checkpoint
    checkpoint.close()


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_among_others_has_the_bits_of_the_row_alone(isa: str, checkpoint: Checkpoint) -> None:
    """With other ranks, other modules and no adapter beside it, in prompts and in single tokens."""
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    base = adapted_steps.base_of(checkpoint)
    adapters = {
        0: adapted_steps.random_adapter(base, 0, (4, 7, 1)),
        1: adapted_steps.random_adapter(base, 1, (8,), every=2),
        3: adapted_steps.random_adapter(base, 2, (1, 2), every=3),
    }
    options = cpu.CompileOptions(isa=isa)
    executor = cpu.compile(graph, checkpoint.weights, adapted_steps.LIMITS, num_threads=2, options=options)
    executor.allocate_cache(16 * NUM_CACHE_GROUPS, 16, 16)
    adapted_steps.load(executor, adapters)
    slots = [0, 1, 3, -1, 0, 1]
    together = adapted_steps.logits_of(executor, PROMPTS, slots)
    for prompt, slot, logits in zip(PROMPTS, slots, together, strict=True):
        np.testing.assert_array_equal(adapted_steps.logits_of(executor, [prompt], [slot])[0], logits)
    reference = adapted_steps.executor_of(checkpoint)
    adapted_steps.load(reference, adapters)
    expected = np.concatenate(adapted_steps.logits_of(reference, PROMPTS, slots))
    assert np.abs(np.concatenate(together) - expected).max() < 5e-3 * np.abs(expected).max()
    executor.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 5, 30])
@pytest.mark.parametrize(("hidden", "intermediate", "experts"), [(33, 7, 1), (31, 33, 3), (48, 20, 5)])
def test_experts_that_begin_within_a_panel(hidden: int, intermediate: int, experts: int, rows: int, isa: str) -> None:
    """Few pairs of rows and experts, and many; ranks of several panels; rows with and without an adapter."""
    rng = np.random.default_rng(0)
    shapes = {
        "embed.weight": (50, hidden),
        "moe.gate.weight": (experts, hidden),
        "moe.experts.gate_proj.weight": (experts, intermediate, hidden),
        "moe.experts.up_proj.weight": (experts, intermediate, hidden),
        "moe.experts.down_proj.weight": (experts, hidden, intermediate),
    }
    weights = {name: DenseWeight(rng.standard_normal(shape).astype(np.float16)) for name, shape in shapes.items()}
    graph = Graph(shapes)
    graph.output = graph.select_rows(graph.moe(graph.embedding("embed"), "moe", Routing(min(2, experts))))
    limits = ExecutorLimits(64, 4, 64, 64, adapters=AdapterLimits(4, 20))
    base = AdapterBase("", None, adaptable_weights(graph), {})  # type: ignore[arg-type]
    adapters = {slot: adapted_steps.random_adapter(base, slot, ranks) for slot, ranks in ((0, (17, 3)), (2, (1, 20)))}
    prompts, slots = [rng.integers(0, 50, rows).tolist(), [7], [8, 9]], [0, 2, -1]
    found = []
    for compile_graph in (reference.compile, partial(cpu.compile, options=cpu.CompileOptions(isa=isa), num_threads=2)):
        executor = compile_graph(graph, weights, limits)
        executor.allocate_cache(16 * NUM_CACHE_GROUPS, 16, 16)
        adapted_steps.load(executor, adapters)
        found.append(adapted_steps.logits_of(executor, prompts, slots))
        alone = [
            adapted_steps.logits_of(executor, [prompt], [slot])[0] for prompt, slot in zip(prompts, slots, strict=True)
        ]
        executor.close()
    scale = max(np.abs(each).max() for each in found[0])
    for expected, ours, own in zip(*found, alone, strict=True):
        np.testing.assert_array_equal(ours, own)
        assert np.abs(ours - expected).max() < 5e-3 * scale


def test_rows_without_adapter(checkpoint: Checkpoint) -> None:
    """A step that names no slots, an empty slot and one that was dropped are the base model."""
    executor = adapted_steps.executor_of(checkpoint, "cpu")
    nothing = adapted_steps.logits_of(executor, PROMPTS, None)
    adapted_steps.load(executor, {2: adapted_steps.random_adapter(adapted_steps.base_of(checkpoint), 0)})
    changed = adapted_steps.logits_of(executor, PROMPTS, [2] * 6)
    executor.drop_adapter(2)  # type: ignore[attr-defined]
    for slots in ([-1] * 6, [2] * 6, [0] * 6):
        for logits, expected in zip(adapted_steps.logits_of(executor, PROMPTS, slots), nothing, strict=True):
            np.testing.assert_array_equal(logits, expected)
    assert all(np.abs(a - b).max() > 0.1 for a, b in zip(changed, nothing, strict=True))
    executor.close()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_refusals(backend: str, checkpoint: Checkpoint) -> None:
    """A rank above the limit, and slots that there are not."""
    executor = adapted_steps.executor_of(checkpoint, backend)
    adapter = adapted_steps.random_adapter(adapted_steps.base_of(checkpoint), 0, (9,))
    with pytest.raises(GraphError, match="rank 9 is above the limit of 8"):
        adapted_steps.load(executor, {0: adapter})
    with pytest.raises((ValueError, UsageError), match=r"tokens\.adapters"):
        adapted_steps.logits_of(executor, PROMPTS, [4] * 6)
    executor.close()


def test_the_native_program_refuses_slots_and_parts_that_do_not_fit(checkpoint: Checkpoint) -> None:
    executor = adapted_steps.executor_of(checkpoint, "cpu")
    assert isinstance(executor, CpuExecutor)
    parts = executor.prepare_adapter(adapted_steps.random_adapter(adapted_steps.base_of(checkpoint), 0).parts)
    record, weight, a, b, gain, rank, scale = next(part for part in parts if part[2].size and part[1] == 1)
    for slot in (-1, 4):
        for given in (parts, []):
            with pytest.raises(ValueError, match=rf"adapter slot {slot}, must be from 0 to 3"):
                executor.load_adapter(slot, given)
    for part, message in (
        ((0, weight, a, b, gain, rank, scale), f"an adapter cannot change weight {weight} of record 0"),
        ((record, 9, a, b, gain, rank, scale), f"cannot change weight 9 of record {record}"),
        ((record, weight, a, b, gain, 9, scale), "an adapter of rank 9, must be from 1 to 8"),
        ((record, weight, a[:-1], b, gain, rank, scale), rf"have {a.size - 1} and {b.size} numbers, its gain has 0"),
        ((record, weight, a, b[:-1], gain, rank, scale), rf"have {a.size} and {b.size - 1} numbers"),
        ((record, weight, a, b, np.ones(3, np.float32), rank, scale), "its gain has 3: they do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            executor.load_adapter(0, [part])
    executor.close()


def test_graphs_without_adapters_have_nothing_of_them(checkpoint: Checkpoint) -> None:
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    limits = ExecutorLimits(64, 4, 64, 64)
    plain = cpu.sizes(graph, checkpoint.weights, limits)
    assert not any(isinstance(node.op, BesideWeights) for node in plain.graph.nodes)
    adapted = cpu.sizes(graph, checkpoint.weights, adapted_steps.LIMITS)
    kinds = [node.op.kind for node in adapted.graph.nodes if isinstance(node.op, AdaptedLinear | AdaptedMoE)]
    assert "silu" in kinds
    whole = optimize(graph, (low_rank_pass(AdapterLimits(1, 4)),))
    assert whole.hidden_states.cols == graph.hidden_states.cols
    assert whole.generates
