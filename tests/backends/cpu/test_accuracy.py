"""The cpu backend against the reference backend on real models: how much the native arithmetic costs in accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.cpu.lowering import PASSES
from octavo.graph.passes import optimize
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.models import build_graph
from octavo.quality.figures import kl_divergence, log_softmax
from octavo.tokenizer import load_tokenizer
from tests.support.batches import Request, step

DATA = Path(__file__).resolve().parents[3] / "src" / "octavo" / "quality" / "data"
NUM_POSITIONS = 64  # of each of the two texts
BLOCK_SIZE = 16


@pytest.mark.parametrize(
    ("fixture", "max_mean_kl"),
    [("smollm2_path", 0.006), pytest.param("qwen_0_5b_path", 0.0015, marks=pytest.mark.slow)],
)
def test_the_cpu_backend_predicts_as_the_reference(
    fixture: str, max_mean_kl: float, request: pytest.FixtureRequest
) -> None:
    """Nearly twice the KL divergence that AVX2 has: room for another instruction set, none for a worse kernel."""
    checkpoint = open_checkpoint(request.getfixturevalue(fixture))
    tokenizer = load_tokenizer(checkpoint)
    texts = []
    for name in ("prose.txt", "code.txt"):
        ids = tokenizer.encode((DATA / name).read_text(encoding="utf-8")[4000:6000], add_special_tokens=False)
        texts.append(ids[: NUM_POSITIONS + 1])
    reference, found = (logits_of(checkpoint, backend, texts) for backend in ("reference", "cpu"))
    assert kl_divergence(log_softmax(reference), found).mean() < max_mean_kl
    assert (reference.argmax(axis=1) == found.argmax(axis=1)).mean() > 0.9


def logits_of(checkpoint: Checkpoint, backend: str, texts: list[list[int]]) -> NDArray[np.float32]:
    """[2 * NUM_POSITIONS, vocabulary]: both texts in one step, each from an empty cache."""
    rows, blocks = len(texts) * NUM_POSITIONS, NUM_POSITIONS // BLOCK_SIZE
    graph = optimize(build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes), PASSES)
    executor = get_backend(backend).compile(
        graph, checkpoint.weights, ExecutorLimits(rows, len(texts), rows, NUM_POSITIONS)
    )
    executor.allocate_cache(len(texts) * blocks, BLOCK_SIZE)
    requests = [Request(ids, list(range(i * blocks, (i + 1) * blocks))) for i, ids in enumerate(texts)]
    logits = executor.submit(step([(one, NUM_POSITIONS) for one in requests], block_size=BLOCK_SIZE)).wait().logits
    executor.close()
    assert logits is not None
    return logits
