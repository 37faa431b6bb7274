"""Operations whose state lasts from step to step: what a sequence has seen so far, in arrays of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.batch import Array, Batch
from octavo.graph.cache import StateCache
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require, require_parameter
from octavo.graph.ops.rowwise import ACTIVATIONS, require_activation
from octavo.graph.values import Parameter, Rows, Value

MAX_TAPS = 8  # of a short convolution; native kernels keep them in registers

# From the rows of one sequence and its states before them, which it replaces in place, to their output.
Advance = Callable[[slice, list[Array]], Array]


@dataclass(frozen=True, slots=True)
class ShortConv(Op):
    """A causal convolution along each column: row t is kind(bias + sum over j of weight[j] * x[t - taps + 1 + j]).

    Rows before the first of a sequence are zero. The state is the last taps - 1 rows of x.
    """

    x: Value  # [TOKENS, cols]
    weight: Parameter  # [cols * taps]: the taps of the first column, the oldest row's first, then of the next one
    bias: Parameter | None  # [cols]
    index: int
    kind: str | None = None

    @property
    def taps(self) -> int:
        return self.weight.shape[0] // self.x.cols

    @property
    def cache(self) -> StateCache:
        return StateCache(self.index, ((self.taps - 1, self.x.cols),))

    def infer_shape(self) -> tuple[Rows, int]:
        require(self.x.rows is Rows.TOKENS, f"x {describe(self.x)} must have one row a token")
        shape = self.weight.shape
        require(
            len(shape) == 1 and shape[0] % self.x.cols == 0 and 2 <= self.taps <= MAX_TAPS,
            f"{self.weight.name} {list(shape)} is not 2 to {MAX_TAPS} times the columns of x {describe(self.x)}",
        )
        require_parameter(self.bias, self.x.cols)
        if self.kind is not None:
            require_activation(self.kind)
        return Rows.TOKENS, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        per_element = 2 * self.taps + (self.bias is not None) + 4 * (self.kind is not None)
        return sizes.tokens * self.x.cols * per_element

    def evaluate(self, step: Evaluation) -> Array:
        x, taps = step.values[self.x], step.weights[self.weight].reshape(self.x.cols, self.taps)

        def advance(rows: slice, states: list[Array]) -> Array:
            window = np.concatenate([states[0], x[rows]])
            states[0][:] = window[len(window) - self.taps + 1 :]
            count = rows.stop - rows.start
            rows_by_age = [window[j : j + count] for j in range(self.taps)]
            out: Array = np.einsum("jtc,cj->tc", np.stack(rows_by_age), taps)
            out = out if self.bias is None else out + step.weights[self.bias]
            return out if self.kind is None else ACTIVATIONS[self.kind](out)

        return advance_states(step, self.cache, x.shape[1], advance)


def advance_states(step: Evaluation, cache: StateCache, cols: int, advance: Advance) -> Array:
    """The output [tokens, cols] of an operation with states; they are read, replaced and saved as the batch says."""
    batch = step.batch
    assert batch.state_slots is not None
    out = np.empty((len(batch.token_ids), cols), step.dtype)
    for request, slot in enumerate(batch.state_slots.tolist()):
        begin, end = batch.query_start_loc[request : request + 2].tolist()
        if begin == end:
            continue
        states = [array[slot] for array in step.states[cache.index]]
        if batch.positions[begin] == 0:
            for state in states:
                state[...] = 0.0
        count, saved = (end - begin, -1) if batch.state_saves is None else batch.state_saves[request].tolist()
        border = begin + count if saved >= 0 else end
        out[begin:border] = advance(slice(begin, border), states)
        if saved >= 0:
            for array, state in zip(step.states[cache.index], states, strict=True):
                array[saved] = state
        if border < end:
            out[border:end] = advance(slice(border, end), states)
    return out


def check_states(batch: Batch, num_states: int) -> None:
    """Raises ValueError unless the slots of the batch are there, and no two sequences write to one."""
    if batch.state_slots is None or len(batch.state_slots) != len(batch.seq_lens):
        raise ValueError("state_slots must have one entry a request: the graph has operations with states")
    written = batch.state_slots.tolist()
    if batch.state_saves is not None:
        if batch.state_saves.shape != (len(written), 2):
            raise ValueError("state_saves must be [requests, 2]: tokens, slot")
        counts = np.diff(batch.query_start_loc)
        for (count, slot), most in zip(batch.state_saves.tolist(), counts.tolist(), strict=True):
            if slot >= 0:
                written.append(slot)
                if not 1 <= count <= most:
                    raise ValueError(f"state_saves after {count} tokens of a request that has {most} in this step")
    for slot in [*written, *batch.state_copies.reshape(-1).tolist()]:
        if not 0 <= slot < num_states:
            raise ValueError(f"state slot {slot} is not one of the {num_states} slots")
    if len(set(written)) < len(written):
        raise ValueError("two sequences of a step write to one state slot")
