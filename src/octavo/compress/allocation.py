"""Chooses a type for each tensor so that the total loss is as small as possible within a size limit.

This is a multiple-choice knapsack problem: every tensor gets exactly one of its options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.errors import UsageError

_STEPS = 50_000


@dataclass(frozen=True, slots=True)
class Option:
    """A type that a tensor could have, its size, and the loss it is expected to cause."""

    type_name: str
    nbytes: int
    loss: float


def allocate(tensors: Sequence[Sequence[Option]], budget: int) -> list[Option]:
    """Choose one option per tensor with the least total loss, so that their sizes sum to at most `budget` bytes.

    Solved by dynamic programming over the bytes beyond the smallest options, in at most 50,000 steps. Sizes are rounded
    up to whole steps, so the budget is never exceeded. Raises UsageError if even the smallest options exceed it.
    """
    useful = [_useful(options) for options in tensors]
    spare = budget - sum(options[0].nbytes for options in useful)
    if spare < 0:
        raise UsageError(f"the smallest types take {budget - spare:,} bytes, {-spare:,} more than allowed")
    extras = [[option.nbytes - options[0].nbytes for option in options] for options in useful]
    step = max(math.gcd(*(extra for row in extras for extra in row)), -(-spare // _STEPS), 1)
    # least[i]: the least loss with i steps beyond the smallest sizes; taken[t][i]: the option of tensor t for that.
    least = np.zeros(spare // step + 1)
    taken = np.zeros((len(useful), len(least)), np.uint8)
    for options, row, choice in zip(useful, extras, taken, strict=True):
        before, least = least, np.full(len(least), np.inf)
        for index, (option, extra) in enumerate(zip(options, row, strict=True)):
            width = -(-extra // step)
            if width >= len(least):
                continue
            sums = before[: len(least) - width] + option.loss
            is_better = sums < least[width:]
            least[width:][is_better] = sums[is_better]
            choice[width:][is_better] = index
    chosen: list[Option] = []
    place = len(least) - 1
    for options, row, choice in zip(reversed(useful), reversed(extras), taken[::-1], strict=True):
        index = int(choice[place])
        place -= -(-row[index] // step)
        chosen.append(options[index])
    return chosen[::-1]


def _useful(options: Sequence[Option]) -> list[Option]:
    """Return the options by size, leaving out any that another option beats in both size and loss."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.loss)):
        if not kept or option.loss < kept[-1].loss:
            kept.append(option)
    return kept
