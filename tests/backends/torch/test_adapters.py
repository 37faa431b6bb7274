"""Steps with adapters on torch tensors, whose output head takes some rows at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.loader.checkpoint import open_checkpoint
from tests.support import adapted_steps
from tests.support.tiny_models import save_safetensors, tiny_model


def test_rows_of_the_output_head_have_their_own_adapters(tmp_path: Path) -> None:
    """As many rows each time, of other adapters."""
    checkpoint = open_checkpoint(save_safetensors(tiny_model("llama"), tmp_path))
    base = adapted_steps.base_of(checkpoint)
    adapters = {slot: adapted_steps.random_adapter(base, slot) for slot in (0, 1, 3)}
    limits = replace(adapted_steps.LIMITS, max_logits_rows=2)
    found = []
    for backend in ("reference", "torch:cpu"):
        executor = adapted_steps.executor_of(checkpoint, backend, limits)
        adapted_steps.load(executor, adapters)
        prompts = [[5, 6], [7, 8], [9, 10], [11, 12], [13]]
        found.append(np.concatenate(adapted_steps.logits_of(executor, prompts, [3, 0, -1, 1, 0])))
        executor.close()
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=5e-3 * np.abs(found[0]).max())
