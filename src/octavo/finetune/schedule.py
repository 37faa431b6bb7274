"""The order of examples in a training run, its held-out part and its learning rate, all derived from the options."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_WARM_UP = 20  # the part of all steps in which the rate rises


def held_out_lines(lines: Sequence[int], share: float, seed: int) -> frozenset[int]:
    """Choose the lines to hold out: about this share of them, but at least one and never all.

    None are held out if the share is 0 or there is only one line.
    """
    known = sorted(set(lines))
    if not share or len(known) < 2:
        return frozenset()
    count = min(max(round(share * len(known)), 1), len(known) - 1)
    return frozenset(np.random.default_rng([seed, 1]).choice(known, count, replace=False).tolist())


def plan_steps(lengths: Sequence[int], batch_tokens: int, epochs: int, seed: int) -> list[list[int]]:
    """Return the example indices of each step.

    Every epoch has its own order. A step takes at most `batch_tokens` tokens; a longer example is a step by itself.
    """
    steps: list[list[int]] = []
    for epoch in range(epochs):
        current: list[int] = []
        for index in np.random.default_rng([seed, 2, epoch]).permutation(len(lengths)).tolist():
            if current and sum(lengths[i] for i in current) + lengths[index] > batch_tokens:
                steps.append(current)
                current = []
            current.append(index)
        steps.append(current)
    return steps


def rate_at(step: int, num_steps: int, highest: float) -> float:
    """Return the learning rate of a step: it rises over the first twentieth of the run, then falls along a cosine."""
    share = step / num_steps
    return highest * min(_WARM_UP * share + 1 / max(num_steps / _WARM_UP, 1), 0.5 + 0.5 * math.cos(math.pi * share))
