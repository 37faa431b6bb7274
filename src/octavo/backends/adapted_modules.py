"""The modules of a model that an adapter of low rank changes, under their names in transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A weight of the graph, made of rows of a module.

    rows: [out_features of the weight], those of the module.
    """

    parameter: str
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A linear module with the weights of the graph that are made of it, such as q, k and v of a fused one.

    name: in transformers, such as `model.layers.0.self_attn.q_proj`.
    is_transposed: its file has [in, out] (Conv1D).
    """

    name: str
    in_features: int
    out_features: int
    parts: tuple[ModulePart, ...]
    is_transposed: bool = False

    def num_numbers(self, rank: int) -> int:
        """The numbers of an adapter of this rank."""
        return rank * (self.in_features + self.out_features)
