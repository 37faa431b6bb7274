"""A GGUF adapter against llama.cpp on the same quantized model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.adapters.read import read_adapter
from octavo.backends import ExecutorLimits
from octavo.graph.ops.low_rank import AdapterLimits
from octavo.loader.checkpoint import open_checkpoint
from tests.support import adapted_steps
from tests.support.gguf_adapters import save_adapter

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed", exc_type=ImportError)

TOKENS = np.random.default_rng(0).integers(1000, 40000, 24).tolist()


def judged(model: Path, adapter: Path | None) -> NDArray[np.float32]:
    """llama.cpp's logits of all tokens."""
    lora = None if adapter is None else str(adapter)
    llama = llama_cpp.Llama(str(model), n_ctx=64, logits_all=True, n_threads=1, verbose=False, lora_path=lora)
    with closing(llama):
        llama.eval(TOKENS)
        return np.array(llama.scores[: len(TOKENS)])


@pytest.mark.slow
def test_the_effect_of_a_gguf_adapter(smollm2_path: Path, tmp_path: Path) -> None:
    """Llama's file has the rows of q and k in another order. The effect is llama.cpp's within the base's difference."""
    path = save_adapter(smollm2_path, tmp_path / "adapter.gguf")
    expected, plain = judged(smollm2_path, path), judged(smollm2_path, None)
    with closing(open_checkpoint(smollm2_path)) as checkpoint:
        limits = ExecutorLimits(64, 4, 64, 64, adapters=AdapterLimits(4, 8))
        executor = adapted_steps.executor_of(checkpoint, "cpu", limits)
        adapted_steps.load(executor, {0: read_adapter(path, adapted_steps.base_of(checkpoint))})
        [ours], [base] = (adapted_steps.logits_of(executor, [TOKENS], [slot]) for slot in (0, -1))
        executor.close()

    def error(logits: NDArray[np.float32], judge: NDArray[np.float32]) -> float:
        return float(np.sqrt(np.mean((logits - judge) ** 2)) / judge.std())

    assert error(plain, expected) > 0.3
    assert error(ours, expected) < 2 * error(base, plain) + 0.01
