"""A decode step with the kernels takes its memory from the workspace, but for the operations that are listed here."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.backends import ExecutorLimits
from octavo.backends.torch import compile as compile_module
from octavo.backends.torch import executor as executor_module
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.operations import evaluate
from tests.support.batches import Request, step
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

LIMITS = ExecutorLimits(16, 2, 16, 1100)  # contexts that decode attention divides
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (6, 3)]


class Allocations(TorchDispatchMode):
    """Counts the bytes of new memory by the operation of the graph that takes it; "": before and after all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.operation, self.is_paused = "", False
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                num_bytes = 0 if self.is_paused else x.untyped_storage().nbytes()
                self.bytes[self.operation] += num_bytes
        return found


def allocated(name: str, backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that a decode step of two sequences takes beside the workspace, by operation."""
    from octavo.backends.torch import triton_calls

    for module in (compile_module, executor_module):
        monkeypatch.setattr(module, "triton_calls", lambda _: triton_calls)
    graph, weights = tiny_graph(name)
    limits = replace(LIMITS, max_model_len=min(LIMITS.max_model_len, graph.max_positions or LIMITS.max_model_len))
    subject = backend.compile(graph, weights, limits)
    subject.allocate_cache(8 * NUM_CACHE_GROUPS, 8, 4)
    requests = [Request([*prompt, 5, 6], [2 * i, 2 * i + 1]) for i, prompt in enumerate(PROMPTS)]

    def batch(counts: tuple[int, int]) -> Any:
        found = step(list(zip(requests, counts, strict=True)), block_size=8, num_groups=NUM_CACHE_GROUPS)
        found.return_logits = False
        return found

    subject.submit(batch((6, 3))).wait()  # tables that last are made
    counted = Allocations()

    def by_operation(node: Any, running: Any) -> None:
        counted.operation = node.op.name
        try:
            evaluate(node, running)
        finally:
            counted.operation = ""

    grid = sys.modules["triton.runtime.interpreter"].GridExecutor
    launch = grid.__call__

    def interpreted(*args: Any, **options: Any) -> Any:  # which copies tensors, where a GPU's launch does not
        counted.is_paused = True
        try:
            return launch(*args, **options)
        finally:
            counted.is_paused = False

    monkeypatch.setattr(executor_module, "evaluate", by_operation)
    if not torch.cuda.is_available():
        monkeypatch.setattr(grid, "__call__", interpreted)
    with counted:
        subject.submit(batch((1, 1))).wait()
    return {name: count for name, count in counted.bytes.items() if count}


@pytest.mark.parametrize(
    ("name", "elsewhere"),
    [
        ("llama", set()),
        ("gpt2", set()),
        *(
            pytest.param(name, elsewhere, marks=pytest.mark.slow)
            for name, elsewhere in (
                ("qwen3", set()),
                ("gemma2", set()),
                ("gpt-oss", {"moe"}),
                ("mixtral", {"moe"}),
                ("deepseek3", {"moe", "head_linear"}),
                ("lfm2", {"short_conv"}),
                ("qwen35", {"short_conv", "gated_delta_rule"}),
                ("granitehybrid-dense", {"short_conv", "selective_scan"}),
            )
        ),
    ],
)
def test_a_decode_step_takes_no_memory_beside_the_workspace(
    name: str, elsewhere: set[str], backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = allocated(name, backend, monkeypatch)
    arrays = found.pop("", 0)
    assert set(found) == elsewhere
    assert arrays < 4096 * 8  # indices of two sequences, and block tables, also those in pinned memory
