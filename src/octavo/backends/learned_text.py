"""Texts in which some of the tokens are learned in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LearnedText:
    """Token ids [T] and a mask [T] of the tokens to be learned: the model is trained to predict each of these from the
    tokens before it.
    """

    ids: NDArray[np.int32]
    is_learned: NDArray[np.bool_]

    @property
    def num_learned(self) -> int:
        """The number of tokens that contribute to the loss. The first token never does, because nothing precedes it."""
        return int(np.count_nonzero(self.is_learned[1:]))
