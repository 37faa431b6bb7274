"""Operations whose state persists from step to step and summarizes a sequence so far in arrays of a fixed size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar

import numpy as np

from octavo.batch import Array, Batch
from octavo.graph.cache import StateCache
from octavo.graph.cuts import Columnwise, Cut
from octavo.graph.head_cuts import StateHeads
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require, require_parameter
from octavo.graph.ops.rowwise import ACTIVATIONS, require_activation, sigmoid
from octavo.graph.splits import ColumnSplit, HeadSplit, Range, StateSplit, merged, side_by_side, split_heads
from octavo.graph.values import TOKENS, Parameter, RowDomain, Value

MAX_TAPS = 8  # in a short convolution; native kernels keep them in registers
MOST_ROWS = 256  # rows of a `DiagonalDeltaRule` state; native kernels keep their gates on the stack

# From the rows of one sequence and its states before them, which it replaces in place, to their output.
Advance = Callable[[slice, list[Array]], Array]


@dataclass(frozen=True, slots=True)
class ShortConv(Op):
    """A causal convolution along each column: row t is kind(bias + sum over j of weight[j] * x[t - taps + 1 + j]).

    Rows before the first of a sequence are zero. The state is the last taps - 1 rows of x.
    """

    cut: ClassVar[Cut[Any]] = Columnwise(from_whole=True)

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

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.x.rows is TOKENS, f"x {describe(self.x)} must have one row a token")
        shape = self.weight.shape
        require(
            len(shape) == 1 and shape[0] % self.x.cols == 0 and 2 <= self.taps <= MAX_TAPS,
            f"{self.weight.name} {list(shape)} is not 2 to {MAX_TAPS} times the columns of x {describe(self.x)}",
        )
        require_parameter(self.bias, self.x.cols)
        if self.kind is not None:
            require_activation(self.kind)
        return TOKENS, self.x.cols

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


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of a delta rule.

    is_tiled: value head h uses key head h % num_k_heads; otherwise neighbouring value heads share one.
    """

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool = False

    def split(self, size: int, step: int) -> StateSplit | None:
        """Return the heads of `size` ranks, or None if there are too few.

        step: each rank's output columns begin at a multiple of this number if possible.
        """
        group, unit = self.num_v_heads // self.num_k_heads, lcm(step, self.value_dim) // self.value_dim
        step = unit * group if self.is_tiled else unit
        found = split_heads(self.num_v_heads, self.num_k_heads, size, step)
        if found is None:
            return None
        heads = ColumnSplit(tuple(self._value_heads(found, rank) for rank in range(size)))
        keys, width = found.kv_columns(self.key_dim), self.num_k_heads * self.key_dim
        values = heads.mapped(self.value_dim)
        qkv = side_by_side([keys, keys.mapped(1, 1, width), values.mapped(1, 1, 2 * width)])
        local = tuple(
            replace(self, num_k_heads=end - begin, num_v_heads=heads.width(rank))
            for rank, (begin, end) in enumerate(found.kv_heads)
        )
        return StateSplit((qkv, heads, heads), heads, values, local)

    def _value_heads(self, found: HeadSplit, rank: int) -> tuple[Range, ...]:
        """Return the value heads of a rank.

        found: the split for neighbouring value heads that share a key head.
        """
        begin, end = found.heads[rank]
        if not self.is_tiled:
            return ((begin, end),)
        group, (first, last) = self.num_v_heads // self.num_k_heads, found.kv_heads[rank]
        tiles = range(begin - first * group, end - (last - 1) * group)
        return merged((tile * self.num_k_heads + first, tile * self.num_k_heads + last) for tile in tiles)


@dataclass(frozen=True, slots=True)
class GatedDeltaRule(Op):
    """The gated delta rule with one state [key_dim, value_dim] per head. Yang et al., arXiv 2412.06464.

    For each token, with q and k of length one (q then divided by sqrt(key_dim)):
    state = g * state; state += outer(k, sigmoid(beta) * (v - k @ state)); out = q @ state,
    g = exp(decay * softplus(alpha + dt_bias)). Value heads share the key heads evenly.
    """

    cut: ClassVar[Cut[Any]] = StateHeads()

    qkv: Value  # [TOKENS, 2 * num_k_heads * key_dim + num_v_heads * value_dim], q, k and v side by side
    beta: Value  # [TOKENS, num_v_heads]
    alpha: Value
    decay: Parameter  # [num_v_heads], negative
    dt_bias: Parameter
    heads: DeltaHeads
    index: int
    eps: float = 1e-6  # added to the squared lengths of q and k

    @property
    def cache(self) -> StateCache:
        return StateCache(self.index, ((self.heads.num_v_heads, self.heads.key_dim, self.heads.value_dim),))

    def infer_shape(self) -> tuple[RowDomain, int]:
        h = self.heads
        require(min(h.num_k_heads, h.num_v_heads, h.key_dim, h.value_dim) > 0, f"sizes must be positive: {h}")
        require(
            h.num_v_heads % h.num_k_heads == 0,
            f"{h.num_v_heads} value heads do not share {h.num_k_heads} key heads evenly",
        )
        cols = h.num_v_heads * h.value_dim
        qkv = 2 * h.num_k_heads * h.key_dim + cols
        require_rows(self, {"qkv": qkv, "beta": h.num_v_heads, "alpha": h.num_v_heads})
        for parameter in self.parameters:
            require_parameter(parameter, h.num_v_heads)
        return TOKENS, cols

    def flops(self, sizes: StepSizes) -> int:
        h = self.heads
        per_head = 7 * h.key_dim * h.value_dim + 3 * h.value_dim + 6 * h.key_dim + 8
        return sizes.tokens * h.num_v_heads * per_head

    def evaluate(self, step: Evaluation) -> Array:
        qkv, beta, alpha = (step.values[value] for value in (self.qkv, self.beta, self.alpha))
        h = self.heads
        width, values = h.num_k_heads * h.key_dim, np.arange(h.num_v_heads)
        key_of = values % h.num_k_heads if h.is_tiled else values // (h.num_v_heads // h.num_k_heads)
        q, k = (
            unit(part.reshape(-1, h.num_k_heads, h.key_dim), self.eps)[:, key_of]
            for part in (qkv[:, :width], qkv[:, width : 2 * width])
        )
        q = q / np.sqrt(h.key_dim)
        v = qkv[:, 2 * width :].reshape(-1, h.num_v_heads, h.value_dim)
        gates = np.exp(step.weights[self.decay] * softplus(alpha + step.weights[self.dt_bias]))
        amounts = sigmoid(beta)

        def advance(rows: slice, states: list[Array]) -> Array:
            (state,) = states  # [heads, key_dim, value_dim]
            out = np.empty((rows.stop - rows.start, h.num_v_heads, h.value_dim), state.dtype)
            for at, t in enumerate(range(rows.start, rows.stop)):
                state *= gates[t, :, None, None]
                missing = v[t] - np.einsum("hk,hkv->hv", k[t], state)
                state += k[t, :, :, None] * (amounts[t, :, None] * missing)[:, None]
                out[at] = np.einsum("hk,hkv->hv", q[t], state)
            return out.reshape(len(out), -1)

        return advance_states(step, self.cache, h.num_v_heads * h.value_dim, advance)


@dataclass(frozen=True, slots=True)
class ScanHeads:
    """The heads of a state space, and the groups of neighbouring heads that share b and c."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int

    def split(self, size: int, step: int) -> StateSplit | None:
        """Return the heads of `size` ranks, or None if there are too few: see `DeltaHeads.split`."""
        found = split_heads(self.num_heads, self.num_groups, size, lcm(step, self.head_dim) // self.head_dim)
        if found is None:
            return None
        heads, groups = found.query_columns(1), found.kv_columns(self.state_dim)
        cols, width = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        values = heads.mapped(self.head_dim)
        xbc = side_by_side([values, groups.mapped(1, 1, cols), groups.mapped(1, 1, cols + width)])
        local = tuple(
            replace(self, num_heads=heads.width(rank), num_groups=end - begin)
            for rank, (begin, end) in enumerate(found.kv_heads)
        )
        return StateSplit((xbc, heads), heads, values, local)


@dataclass(frozen=True, slots=True)
class SelectiveScan(Op):
    """A selective state space with one decay per head, as in Mamba 2. Dao and Gu, arXiv 2405.21060.

    For each token, with step = softplus(dt + dt_bias):
    state = exp(decay * step) * state + outer(step * x, b); out = state @ c + skip * x.
    """

    cut: ClassVar[Cut[Any]] = StateHeads()

    xbc: Value  # [TOKENS, num_heads * head_dim + 2 * num_groups * state_dim], x, b and c side by side
    dt: Value  # [TOKENS, num_heads]
    decay: Parameter  # [num_heads], negative
    skip: Parameter
    dt_bias: Parameter
    heads: ScanHeads
    index: int

    @property
    def cache(self) -> StateCache:
        return StateCache(self.index, ((self.heads.num_heads, self.heads.head_dim, self.heads.state_dim),))

    def infer_shape(self) -> tuple[RowDomain, int]:
        h = self.heads
        require(min(h.num_heads, h.head_dim, h.num_groups, h.state_dim) > 0, f"sizes must be positive: {h}")
        require(h.num_heads % h.num_groups == 0, f"{h.num_groups} groups do not divide {h.num_heads} heads")
        cols = h.num_heads * h.head_dim
        require_rows(self, {"xbc": cols + 2 * h.num_groups * h.state_dim, "dt": h.num_heads})
        for parameter in self.parameters:
            require_parameter(parameter, h.num_heads)
        return TOKENS, cols

    def flops(self, sizes: StepSizes) -> int:
        h = self.heads
        return sizes.tokens * h.num_heads * (5 * h.head_dim * h.state_dim + 3 * h.head_dim + 4)

    def evaluate(self, step: Evaluation) -> Array:
        h = self.heads
        cols, width = h.num_heads * h.head_dim, h.num_groups * h.state_dim
        x, b, c = np.split(step.values[self.xbc], [cols, cols + width], axis=1)
        x = x.reshape(-1, h.num_heads, h.head_dim)
        share = h.num_heads // h.num_groups
        b, c = (np.repeat(y.reshape(-1, h.num_groups, h.state_dim), share, axis=1) for y in (b, c))
        steps = softplus(step.values[self.dt] + step.weights[self.dt_bias])
        gates = np.exp(step.weights[self.decay] * steps)
        skipped = step.weights[self.skip][:, None] * x

        def advance(rows: slice, states: list[Array]) -> Array:
            (state,) = states  # [heads, head_dim, state_dim]
            out = np.empty((rows.stop - rows.start, h.num_heads, h.head_dim), state.dtype)
            for at, t in enumerate(range(rows.start, rows.stop)):
                state *= gates[t, :, None, None]
                state += (steps[t, :, None] * x[t])[:, :, None] * b[t][:, None]
                out[at] = np.einsum("hpn,hn->hp", state, c[t]) + skipped[t]
            return out.reshape(len(out), -1)

        return advance_states(step, self.cache, cols, advance)


@dataclass(frozen=True, slots=True)
class ChannelScan(Op):
    """A selective state space with a decay for each column and state element, as in Mamba 1.

    Gu and Dao, arXiv 2312.00752.

    For each token, with step = softplus(dt): state = exp(decay * step) * state + outer(b, step * x); out = c @ state +
    skip * x.
    """

    x: Value  # [TOKENS, cols]
    dt: Value  # [TOKENS, cols]
    b: Value  # [TOKENS, state_dim]
    c: Value
    decay: Parameter  # [state_dim * cols], negative: all columns for the first state element, then for the next
    skip: Parameter  # [cols]
    index: int

    @property
    def cache(self) -> StateCache:
        return StateCache(self.index, ((self.b.cols, self.x.cols),))

    def infer_shape(self) -> tuple[RowDomain, int]:
        cols = self.x.cols
        require_rows(self, {"x": cols, "dt": cols, "b": self.b.cols, "c": self.b.cols})
        require_parameter(self.decay, self.b.cols * cols)
        require_parameter(self.skip, cols)
        return TOKENS, cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.tokens * self.x.cols * (7 * self.b.cols + 4)

    def evaluate(self, step: Evaluation) -> Array:
        x, dt, b, c = (step.values[value] for value in (self.x, self.dt, self.b, self.c))
        decay = step.weights[self.decay].reshape(self.b.cols, self.x.cols)
        steps, skipped = softplus(dt), step.weights[self.skip] * x

        def advance(rows: slice, states: list[Array]) -> Array:
            (state,) = states  # [state_dim, cols]
            out = np.empty((rows.stop - rows.start, self.x.cols), state.dtype)
            for at, t in enumerate(range(rows.start, rows.stop)):
                state *= np.exp(decay * steps[t])
                state += b[t][:, None] * (steps[t] * x[t])
                out[at] = c[t] @ state + skipped[t]
            return out

        return advance_states(step, self.cache, self.x.cols, advance)


@dataclass(frozen=True, slots=True)
class DiagonalDeltaRule(Op):
    """A delta rule with a decay for each row of a state [key_dim, value_dim].

    Used in Kimi Linear (arXiv 2510.26692) and RWKV 7 (2503.14456).

    For each token and head, with gates = exp(decay * softplus(gate)), or exp(gate) without `decay`: seen = read @
    state, where state is taken after the gates if `reads_decayed`, otherwise before them;
    state = gates * state + sigmoid(beta) * (outer(k, v) - outer(erase, seen)); out = q @ state. Without beta,
    sigmoid(beta) is replaced by 1.
    """

    q: Value  # [TOKENS, heads * key_dim], like all but v and beta
    k: Value
    v: Value  # [TOKENS, heads * value_dim]
    read: Value
    erase: Value
    gate: Value
    beta: Value | None  # [TOKENS, heads]
    decay: Parameter | None  # [heads], negative
    key_dim: int
    value_dim: int
    reads_decayed: bool
    index: int

    @property
    def num_heads(self) -> int:
        return self.v.cols // self.value_dim

    @property
    def cache(self) -> StateCache:
        return StateCache(self.index, ((self.num_heads, self.key_dim, self.value_dim),))

    def infer_shape(self) -> tuple[RowDomain, int]:
        sizes = f"heads of {self.key_dim} and {self.value_dim} columns"
        require(0 < self.key_dim <= MOST_ROWS, f"{sizes}: the first must be at most {MOST_ROWS}")
        require(self.value_dim > 0 and self.v.cols % self.value_dim == 0, f"v {describe(self.v)} is not of {sizes}")
        width = self.num_heads * self.key_dim
        require_rows(self, {**dict.fromkeys(("q", "k", "read", "erase", "gate"), width), "v": self.v.cols})
        if self.beta is not None:
            require_rows(self, {"beta": self.num_heads})
        require_parameter(self.decay, self.num_heads)
        return TOKENS, self.v.cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.tokens * self.num_heads * self.key_dim * (9 * self.value_dim + 3)

    def evaluate(self, step: Evaluation) -> Array:
        q, k, read, erase, gate = (
            step.values[x].reshape(-1, self.num_heads, self.key_dim)
            for x in (self.q, self.k, self.read, self.erase, self.gate)
        )
        v = step.values[self.v].reshape(-1, self.num_heads, self.value_dim)
        gates = np.exp(gate if self.decay is None else step.weights[self.decay][:, None] * softplus(gate))
        amounts = np.ones(v.shape[:2], v.dtype) if self.beta is None else sigmoid(step.values[self.beta])

        def advance(rows: slice, states: list[Array]) -> Array:
            (state,) = states  # [heads, key_dim, value_dim]
            out = np.empty((rows.stop - rows.start, *v.shape[1:]), state.dtype)
            for at, t in enumerate(range(rows.start, rows.stop)):
                before = read[t] * gates[t] if self.reads_decayed else read[t]
                seen = np.einsum("hk,hkv->hv", before, state)
                added = k[t, :, :, None] * v[t, :, None] - erase[t, :, :, None] * seen[:, None]
                state *= gates[t, :, :, None]
                state += amounts[t, :, None, None] * added
                out[at] = np.einsum("hk,hkv->hv", q[t], state)
            return out.reshape(len(out), -1)

        return advance_states(step, self.cache, self.v.cols, advance)


@dataclass(frozen=True, slots=True)
class RealGatedRecurrence(Op):
    """The RG-LRU of Griffin, arXiv 2402.19427: each column is a separate decaying sum.

    For each token, with rate = -sharpness * slope * sigmoid(decay_gate + decay_bias):
    state = exp(rate) * state + size * x * sigmoid(input_gate + input_bias), where size is sqrt(1 - exp(2 * rate)), or 1
    for the first token of a sequence. The state is the output.
    """

    x: Value  # [TOKENS, cols], like the gates
    input_gate: Value
    decay_gate: Value
    slope: Parameter  # [cols], like the biases; positive
    input_bias: Parameter
    decay_bias: Parameter
    index: int
    sharpness: float = 8.0

    @property
    def cache(self) -> StateCache:
        return StateCache(self.index, ((1, self.x.cols),))

    def infer_shape(self) -> tuple[RowDomain, int]:
        require_rows(self, dict.fromkeys(("x", "input_gate", "decay_gate"), self.x.cols))
        for parameter in (self.slope, self.input_bias, self.decay_bias):
            require_parameter(parameter, self.x.cols)
        return TOKENS, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.tokens * self.x.cols * 16

    def evaluate(self, step: Evaluation) -> Array:
        weights = (step.weights[p] for p in (self.slope, self.input_bias, self.decay_bias))
        slope, input_bias, decay_bias = weights
        rates = -self.sharpness * slope * sigmoid(step.values[self.decay_gate] + decay_bias)
        is_first = step.batch.positions[:, None] == 0
        sizes = np.where(is_first, 1.0, np.sqrt(-np.expm1(2 * rates))).astype(rates.dtype, copy=False)
        added = sizes * step.values[self.x] * sigmoid(step.values[self.input_gate] + input_bias)
        gates = np.exp(rates)

        def advance(rows: slice, states: list[Array]) -> Array:
            (state,) = states  # [1, cols]
            out = np.empty((rows.stop - rows.start, self.x.cols), state.dtype)
            for at, t in enumerate(range(rows.start, rows.stop)):
                state *= gates[t]
                state += added[t]
                out[at] = state[0]
            return out

        return advance_states(step, self.cache, self.x.cols, advance)


def require_rows(op: Op, widths: Mapping[str, int]) -> None:
    """Raise GraphError unless each of these inputs has one row per token and the given number of columns."""
    for name, width in widths.items():
        value: Value = getattr(op, name)
        fits = value.rows is TOKENS and value.cols == width
        require(fits, f"{name} {describe(value)} is not [tokens, {width}]")


def softplus(x: Array) -> Array:
    """log(1 + e^x)"""
    out: Array = np.logaddexp(x, 0).astype(x.dtype, copy=False)
    return out


def unit(x: Array, eps: float) -> Array:
    """Return x / sqrt(sum of its squares + eps), over the last dimension."""
    out: Array = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)
    return out


def advance_states(step: Evaluation, cache: StateCache, cols: int, advance: Advance) -> Array:
    """Return the output [tokens, cols] of an operation with states.

    States are read, replaced and saved as the batch directs.
    """
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
        first = begin
        for count, saved in [] if batch.state_saves is None else batch.state_saves[request].tolist():
            if saved >= 0:
                out[first : begin + count] = advance(slice(first, begin + count), states)
                first = begin + count
                for array, state in zip(step.states[cache.index], states, strict=True):
                    array[saved] = state
        if first < end:
            out[first:end] = advance(slice(first, end), states)
    return out


def check_states(batch: Batch, num_states: int) -> None:
    """Raise ValueError unless the batch's slots exist and no two sequences write to the same one."""
    if batch.state_slots is None or len(batch.state_slots) != len(batch.seq_lens):
        raise ValueError("state_slots must have one entry a request: the graph has operations with states")
    written = batch.state_slots.tolist()
    if batch.state_saves is not None:
        shape = batch.state_saves.shape
        if len(shape) != 3 or shape[0] != len(written) or shape[2] != 2:
            raise ValueError("state_saves must be [requests, saves, 2]: tokens, slot")
        counts = np.diff(batch.query_start_loc)
        for saves, most in zip(batch.state_saves.tolist(), counts.tolist(), strict=True):
            before = 0
            for count, slot in saves:
                if slot < 0:
                    continue
                written.append(slot)
                if not before < count <= most:
                    raise ValueError(f"state_saves after {count} tokens of a request that has {most} in this step")
                before = count
    for slot in [*written, *batch.state_copies.reshape(-1).tolist()]:
        if not 0 <= slot < num_states:
            raise ValueError(f"state slot {slot} is not one of the {num_states} slots")
    if len(set(written)) < len(written):
        raise ValueError("two sequences of a step write to one state slot")
