"""What the operations of a graph work on: symbolic values and named parameters."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Rows(enum.Enum):
    """The symbolic number of rows of a value; it becomes a number in each step.

    TOKENS: every scheduled token of the step. REQUESTS: one row a request.
    OUTPUTS: the rows whose logits are wanted (`Batch.logits_indices`).
    """

    TOKENS = "tokens"
    REQUESTS = "requests"
    OUTPUTS = "outputs"


@dataclass(frozen=True, slots=True)
class Value:
    """A matrix [rows, cols] that an operation produces. Heads are folded into the columns."""

    id: int
    rows: Rows
    cols: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight by its checkpoint name, for example `layers.0.self_attn.q_proj.weight`.

    shape: as in the checkpoint, [out_features, in_features] for a linear layer.
    """

    name: str
    shape: tuple[int, ...]
