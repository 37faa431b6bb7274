"""The modules of a model that a low-rank adapter changes, under their names in transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A weight of the graph that consists of rows of a module.

    rows: [out_features of the weight], the module's row for each row of the weight.
    """

    parameter: str
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A linear module and the graph weights that consist of its rows, for example q, k and v of a fused projection.

    name: name in transformers, for example `model.layers.0.self_attn.q_proj`.
    is_transposed: True if its checkpoint stores [in, out] (Conv1D).
    """

    name: str
    in_features: int
    out_features: int
    parts: tuple[ModulePart, ...]
    is_transposed: bool = False

    def num_numbers(self, rank: int) -> int:
        """Return the number of parameters in an adapter of this rank."""
        return rank * (self.in_features + self.out_features)
