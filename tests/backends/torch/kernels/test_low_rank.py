"""Low-rank products of adapters by the grouped kernel, alone and in whole steps."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from octavo.backends.torch.compile import TorchBackend
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import build_graph
from tests.support import adapted_steps
from tests.support.tiny_models import NUM_CACHE_GROUPS, save_safetensors, tiny_model


@pytest.mark.parametrize("slots", [[2, -1, 0, 2, 0, 1, -1], [-1, -1], [1] * 18])
def test_rows_have_the_products_of_their_slots(slots: list[int], device: torch.device) -> None:
    """Rows of a slot lie anywhere, slots may have no row, and a row's bits do not depend on those beside it."""
    from octavo.backends.torch import triton_calls

    generator = torch.Generator().manual_seed(0)
    shapes = ((len(slots), 40), (3, 5, 40), (3, 70, 5))
    x, a, b = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    wanted = torch.tensor(slots, dtype=torch.float32, device=device)[:, None]
    found = triton_calls.low_rank(x, a, b, triton_calls.sorted_by_slot(wanted, 3))
    assert found.shape == (len(slots), 70)
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        expected = x[row].double() @ a[slot].double().T @ b[slot].double().T
        np.testing.assert_allclose(found[row].cpu().numpy(), expected.cpu().numpy(), rtol=1e-4, atol=1e-4)
        alone = triton_calls.low_rank(x[row : row + 1], a, b, triton_calls.sorted_by_slot(wanted[row : row + 1], 3))
        assert torch.equal(alone[0], found[row])


def test_steps_with_adapters(backend: TorchBackend, tmp_path: Path) -> None:
    """Rows of three adapters and of none, by the kernel and by plain torch."""
    from octavo.backends.torch import triton_calls

    checkpoint = open_checkpoint(save_safetensors(tiny_model("llama"), tmp_path / "model"))
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    base = adapted_steps.base_of(checkpoint)
    adapters = {slot: adapted_steps.random_adapter(base, slot, (4, 7), every=1 + slot) for slot in (0, 1, 3)}
    prompts = [[5, 6, 7], [8], [9, 10], [11, 12]]
    found = []
    for calls in (None, Mock(wraps=triton_calls)):
        executor = backend.compile(graph, checkpoint.weights, adapted_steps.LIMITS)
        executor.calls = calls
        executor.allocate_cache(16 * NUM_CACHE_GROUPS, 16, 16)
        adapted_steps.load(executor, adapters)
        found.append(np.concatenate(adapted_steps.logits_of(executor, prompts, [3, 0, -1, 1])))
        executor.close()
    assert calls is not None
    names = [name for name, *_ in calls.mock_calls]
    assert names.count("low_rank") > names.count("sorted_by_slot") == 2  # for all tokens, and for those with outputs
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=5e-3 * np.abs(found[0]).max())
