"""A text of which some tokens are learnt in training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LearnedText:
    """Token ids [T] and which of them are learnt, [T]: the model is to predict each from the tokens before it."""

    ids: NDArray[np.int32]
    is_learned: NDArray[np.bool_]

    @property
    def num_learned(self) -> int:
        """The tokens that count in the loss; the first one of a text has nothing before it."""
        return int(np.count_nonzero(self.is_learned[1:]))
