"""A step of training for every architecture, with products in float32 and in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.torch.distillation import TeacherTokens, TrainingOptions, train
from tests.support.tiny_models import CONFIGS, tiny_graph


def teacher() -> TeacherTokens:
    """Two texts of nine tokens, and four likely next tokens after each."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(96)[:4] for _ in range(18)]).reshape(2, 9, 4)
    logprobs = np.log(rng.dirichlet([1.0] * 5, (2, 9))[..., :4])
    return TeacherTokens(rng.integers(0, 96, (2, 9), np.int32), ids.astype(np.int32), logprobs.astype(np.float16))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_in_bfloat16(name: str) -> None:
    """Its loss is near that in float32, and every weight that is trained there is trained here, and stays finite."""
    graph, weights = tiny_graph(name)
    losses: list[float] = []
    moved = []
    for in_bfloat16 in (False, True):
        options = TrainingOptions(1, batch=2, in_bfloat16=in_bfloat16)
        trained = train(graph, weights, teacher(), options, lambda _share, loss: losses.append(loss))
        assert all(np.isfinite(array).all() for array in trained.values())
        moved.append({n for n, array in trained.items() if (array != weights[n].dequantize()).any()})
    assert moved[1] == moved[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
