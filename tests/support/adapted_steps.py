"""Steps of executors that hold adapters, given the adapter slot of each sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from octavo.adapters.adapter import Adapter, AdapterBase
from octavo.backends import AdaptingExecutor, Executor, ExecutorLimits, get_backend
from octavo.batch import Batch, DomainRows, Float32
from octavo.graph.ops.low_rank import ADAPTER_SLOTS, ADAPTERS, AdapterLimits, LowRank
from octavo.loader.checkpoint import Checkpoint
from octavo.models import build_graph
from octavo.quantization.packed.stored import bfloat16
from tests.support.batches import Request, step
from tests.support.tiny_models import NUM_CACHE_GROUPS

LIMITS = ExecutorLimits(128, 8, 128, 64, adapters=AdapterLimits(4, 8))


def base_of(checkpoint: Checkpoint) -> AdapterBase:
    """Return what adapters need to know of the model."""
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    return AdapterBase.of(checkpoint.architecture, checkpoint.config, graph, checkpoint.weights)


def executor_of(checkpoint: Checkpoint, backend: str = "reference", limits: ExecutorLimits = LIMITS) -> Executor:
    """Return an executor with room for adapters, and a cache."""
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    executor = get_backend(backend).compile(graph, checkpoint.weights, limits)
    executor.allocate_cache(16 * NUM_CACHE_GROUPS, 16, 16)
    return executor


def load(executor: Executor, adapters: Mapping[int, Adapter]) -> None:
    """Put adapters into slots."""
    assert isinstance(executor, AdaptingExecutor)
    for slot, adapter in adapters.items():
        executor.load_adapter(slot, executor.prepare_adapter(adapter.parts))


def with_slots(batch: Batch, slots: Sequence[int], count: int = 4) -> Batch:
    """Return a batch whose sequences, or whose tokens, use the adapters in these slots; -1 means none."""
    tokens = np.array(slots, np.int32)
    if len(tokens) != len(batch.token_ids):
        tokens = np.repeat(tokens, np.diff(batch.query_start_loc))
    rows = DomainRows(len(tokens), indices={ADAPTER_SLOTS.name: tokens})
    return replace(batch, domains={"tokens": rows, ADAPTERS.name: DomainRows(count)})


def logits_of(
    executor: Executor, prompts: Sequence[list[int]], slots: Sequence[int] | None
) -> list[NDArray[np.float32]]:
    """Return the logits of all tokens of each prompt, with the adapters in these slots.

    None runs a step that names no slots.
    """
    requests = [(Request(prompt, [2 * i, 2 * i + 1]), len(prompt)) for i, prompt in enumerate(prompts)]
    batch = step(requests, block_size=16, num_groups=NUM_CACHE_GROUPS)
    output = executor.submit(batch if slots is None else with_slots(batch, slots)).wait()
    assert output.logits is not None
    return np.split(output.logits, np.cumsum([len(prompt) for prompt in prompts])[:-1])


def random_adapter(base: AdapterBase, seed: int, ranks: Sequence[int] = (4,), *, every: int = 1) -> Adapter:
    """Return an adapter that changes one of every `every` modules, with these ranks in turn.

    Its numbers are exact in bfloat16.
    """
    rng, parts = np.random.default_rng(seed), {}
    for i, (name, shape) in enumerate(list(base.places.items())[::every]):
        rank = ranks[i % len(ranks)]
        a = rng.standard_normal((*shape[:-2], rank, shape[-1])) * shape[-1] ** -0.5
        b = rng.standard_normal((*shape[:-2], shape[-2], rank)) * rank**-0.5
        parts[name] = LowRank(_rounded(a), _rounded(b), 0.7)
        if i % 3 == 1:  # as magnitudes make them
            parts[name] = replace(parts[name], gain=rng.uniform(0.5, 1.5, b.shape[:-1]).astype(np.float32))
    if (head := parts.get("lm_head.weight")) is not None and seed == 1:
        parts["lm_head.weight"] = LowRank.whole(_rounded(rng.standard_normal(head.shape) * 0.1))
    return Adapter.of(f"random-{seed}", parts)


def _rounded(numbers: NDArray[np.float64]) -> Float32:
    bits = bfloat16(numbers.astype(np.float32)).astype(np.uint32)
    return (bits << 16).view(np.float32)
