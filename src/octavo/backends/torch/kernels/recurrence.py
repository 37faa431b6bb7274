"""Steps of operations with states: short convolution, gated delta rule, selective scan.

The states of a layer are float32 [slots, ...]. A program advances one head (or a few columns) of one sequence through
the tokens of the step and keeps its state in registers. `octavo.graph.ops.recurrence` defines the operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import activation, power_of_two, require_columns, sigmoid, tile
from octavo.graph.ops.recurrence import DeltaHeads, ScanHeads

_COLUMNS = tile({"BLOCK": 256, "num_warps": 4}, {"BLOCK": 64})
_VALUES = tile({"BV": 32, "num_warps": 4})


class StateRows(NamedTuple):
    """Device tensors that describe a step, int32. N = sequences, T = tokens.

    starts: index of each sequence's first token, [N + 1].
    sequences: sequence of each token, [T].
    positions: position of each token, [T]; a sequence whose first token is at 0 begins with a zero state.
    slots: slot of each sequence's state, [N]; -1 for a padding row.
    saves: [N, S, 2], pairs (token count, slot) in ascending order: the state after `token count` tokens is also written
    to the slot. A slot of -1 ends the list.
    """

    starts: Tensor
    sequences: Tensor
    positions: Tensor
    slots: Tensor
    saves: Tensor


@triton.jit
def _conv(
    out, x, state, weight, bias, starts, sequences, positions, slots, x_row, COLS, TAPS: tl.constexpr,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < COLS
    sequence = tl.load(sequences + token)
    start, slot = tl.load(starts + sequence), tl.load(slots + sequence).to(tl.int64)
    is_new = tl.load(positions + start) == 0
    acc = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        acc += tl.load(bias + c, mask, 0).to(tl.float32)
    for j in tl.static_range(TAPS):
        at = token - start - (TAPS - 1) + j
        new = tl.load(x + (start + at).to(tl.int64) * x_row + c, mask & (at >= 0), 0).to(tl.float32)
        has_old = (at < 0) & (slot >= 0) & (is_new == 0)
        old = tl.load(state + (slot * (TAPS - 1) + TAPS - 1 + at) * COLS + c, mask & has_old, 0)
        acc += tl.load(weight + c * TAPS + j, mask, 0).to(tl.float32) * (new + old)
    if KIND is not None:
        acc = activation(acc, KIND)
    tl.store(out + token.to(tl.int64) * COLS + c, acc.to(out.dtype.element_ty), mask)


@triton.jit
def _keep_rows(state, x, start, count, slot, target, is_new, c, mask, x_row, COLS, TAPS: tl.constexpr):
    """Write the last rows after `count` tokens to slot `target`. Each row of the state is read before it is
    overwritten.
    """
    for r in tl.static_range(TAPS - 1):
        at = count + r - (TAPS - 1)
        new = tl.load(x + (start + at).to(tl.int64) * x_row + c, mask & (at >= 0), 0).to(tl.float32)
        old = tl.load(state + (slot * (TAPS - 1) + count + r) * COLS + c, mask & (at < 0) & (is_new == 0), 0)
        tl.store(state + (target * (TAPS - 1) + r) * COLS + c, new + old, mask)


@triton.jit
def _conv_states(
    state, x, starts, positions, slots, saves, x_row, COLS, SAVES: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + sequence)
    count, slot = tl.load(starts + sequence + 1) - start, tl.load(slots + sequence).to(tl.int64)
    if (count > 0) & (slot >= 0):
        is_new = tl.load(positions + start) == 0
        for i in tl.static_range(SAVES):
            save = saves + 2 * (sequence * SAVES + i)
            saved, target = tl.load(save), tl.load(save + 1).to(tl.int64)
            if target >= 0:
                _keep_rows(state, x, start, saved, slot, target, is_new, c, c < COLS, x_row, COLS, TAPS)
        _keep_rows(state, x, start, count, slot, slot, is_new, c, c < COLS, x_row, COLS, TAPS)


def short_conv(
    x: Tensor,
    state: Tensor,
    weights: tuple[Tensor, Tensor | None],
    kind: str | None,
    rows: StateRows,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve each sequence's tokens: x [T, cols], any row stride -> [T, cols].

    state: [slots, taps - 1, cols].
    weights: kernel [cols * taps] and bias [cols].
    """
    require_columns(x)
    tokens, cols = x.shape
    taps = state.shape[1] + 1
    out = torch.empty((tokens, cols), dtype=x.dtype, device=x.device) if out is None else out
    if tokens:
        columns = -(-cols // _COLUMNS["BLOCK"])
        sizes = (x.stride(0), cols)
        _conv[(tokens, columns)](out, x, state, *weights, *rows[:4], *sizes, TAPS=taps, KIND=kind, **_COLUMNS)
        _conv_states[(rows.slots.shape[0], columns)](
            state, x, rows.starts, rows.positions, rows.slots, rows.saves, x.stride(0), cols,
            SAVES=rows.saves.shape[1], TAPS=taps, **_COLUMNS,
        )  # fmt: skip
    return out


@triton.jit
def _softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _unit(at, k, K: tl.constexpr, eps):
    x = tl.load(at + k, k < K, 0).to(tl.float32)
    return x / tl.sqrt(tl.sum(x * x) + eps)


@triton.jit
def _delta(
    out, qkv, beta, alpha, state, decay, dt_bias, starts, positions, slots, saves, qkv_row, gate_row, alpha_row, eps,
    SAVES: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    TILED: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    v_at = tl.program_id(2) * BV + tl.arange(0, BV)
    k_at = tl.arange(0, KP)
    key_head = head % HK if TILED else head // (HV // HK)
    start, slot = tl.load(starts + sequence), tl.load(slots + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1)
    if (end > start) & (slot >= 0):
        place = (head * K + k_at)[:, None] * V + v_at[None, :]
        mask = (k_at < K)[:, None] & (v_at < V)[None, :]
        is_old = tl.load(positions + start) > 0
        s = tl.load(state + slot * (HV * K * V) + place, mask & is_old, 0)
        save = SAVES * sequence
        last = save + SAVES - 1
        saved, target = tl.load(saves + 2 * save), tl.load(saves + 2 * save + 1).to(tl.int64)
        rate, shift = tl.load(decay + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
        row = qkv + start.to(tl.int64) * qkv_row
        at = out + start.to(tl.int64) * (HV * V) + head * V + v_at
        for token in range(start, end):
            q = _unit(row + key_head * K, k_at, K, eps) / tl.sqrt(K * 1.0)
            k = _unit(row + (HK + key_head) * K, k_at, K, eps)
            v = tl.load(row + 2 * HK * K + head * V + v_at, v_at < V, 0).to(tl.float32)
            step = _softplus(tl.load(alpha + token * alpha_row + head).to(tl.float32) + shift)
            s *= tl.exp(rate * step)
            amount = sigmoid(tl.load(beta + token * gate_row + head).to(tl.float32))
            missing = amount * (v - tl.sum(k[:, None] * s, 0))
            s += k[:, None] * missing[None, :]
            tl.store(at, tl.sum(q[:, None] * s, 0).to(out.dtype.element_ty), v_at < V)
            is_due = token - start + 1 == saved
            tl.store(state + target * (HV * K * V) + place, s, mask & (target >= 0) & is_due)
            if SAVES > 1:
                save += (is_due & (save < last)).to(tl.int32)
                saved, target = tl.load(saves + 2 * save), tl.load(saves + 2 * save + 1).to(tl.int64)
            row += qkv_row
            at += HV * V
        tl.store(state + slot * (HV * K * V) + place, s, mask)


def delta_rule(
    values: tuple[Tensor, Tensor, Tensor],
    state: Tensor,
    weights: tuple[Tensor, Tensor],
    heads: DeltaHeads,
    eps: float,
    rows: StateRows,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `GatedDeltaRule` of (qkv, beta, alpha) -> [T, num_v_heads * value_dim].

    state: [slots, num_v_heads, key_dim, value_dim], contiguous.
    weights: decay and dt_bias, [num_v_heads] each.
    """
    qkv, beta, alpha = values
    require_columns(qkv, beta, alpha)
    h = heads
    if out is None:
        out = torch.empty((qkv.shape[0], h.num_v_heads * h.value_dim), dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0]:
        _delta[(rows.slots.shape[0], h.num_v_heads, -(-h.value_dim // _VALUES["BV"]))](
            out, *values, state, *weights, rows.starts, rows.positions, rows.slots, rows.saves, qkv.stride(0),
            beta.stride(0), alpha.stride(0), eps, SAVES=rows.saves.shape[1], HK=h.num_k_heads, HV=h.num_v_heads,
            K=h.key_dim, V=h.value_dim,
            KP=power_of_two(h.key_dim), TILED=h.is_tiled, **_VALUES,
        )  # fmt: skip
    return out


@triton.jit
def _scan(
    out, xbc, dt, state, decay, skip, dt_bias, starts, positions, slots, saves, row_step, dt_row,
    SAVES: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    p_at = tl.program_id(2) * BV + tl.arange(0, BV)
    n_at = tl.arange(0, SP)
    start, slot = tl.load(starts + sequence), tl.load(slots + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1)
    if (end > start) & (slot >= 0):
        place = (head * P + p_at)[:, None] * S + n_at[None, :]
        mask = (p_at < P)[:, None] & (n_at < S)[None, :]
        s = tl.load(state + slot * (H * P * S) + place, mask & (tl.load(positions + start) > 0), 0)
        save = SAVES * sequence
        last = save + SAVES - 1
        saved, target = tl.load(saves + 2 * save), tl.load(saves + 2 * save + 1).to(tl.int64)
        rate, shift = tl.load(decay + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
        kept = tl.load(skip + head).to(tl.float32)
        group = head // (H // G)
        row = xbc + start.to(tl.int64) * row_step
        at = out + start.to(tl.int64) * (H * P) + head * P + p_at
        for token in range(start, end):
            x = tl.load(row + head * P + p_at, p_at < P, 0).to(tl.float32)
            b = tl.load(row + H * P + group * S + n_at, n_at < S, 0).to(tl.float32)
            c = tl.load(row + H * P + (G + group) * S + n_at, n_at < S, 0).to(tl.float32)
            step = _softplus(tl.load(dt + token * dt_row + head).to(tl.float32) + shift)
            s = s * tl.exp(rate * step) + (step * x)[:, None] * b[None, :]
            y = tl.sum(s * c[None, :], 1) + kept * x
            tl.store(at, y.to(out.dtype.element_ty), p_at < P)
            is_due = token - start + 1 == saved
            tl.store(state + target * (H * P * S) + place, s, mask & (target >= 0) & is_due)
            if SAVES > 1:
                save += (is_due & (save < last)).to(tl.int32)
                saved, target = tl.load(saves + 2 * save), tl.load(saves + 2 * save + 1).to(tl.int64)
            row += row_step
            at += H * P
        tl.store(state + slot * (H * P * S) + place, s, mask)


def selective_scan(
    values: tuple[Tensor, Tensor],
    state: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    heads: ScanHeads,
    rows: StateRows,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `SelectiveScan` of (xbc, dt) -> [T, num_heads * head_dim].

    state: [slots, num_heads, head_dim, state_dim], contiguous.
    weights: decay, skip and dt_bias, [num_heads] each.
    """
    xbc, dt = values
    require_columns(xbc, dt)
    h = heads
    if out is None:
        out = torch.empty((xbc.shape[0], h.num_heads * h.head_dim), dtype=xbc.dtype, device=xbc.device)
    if xbc.shape[0]:
        _scan[(rows.slots.shape[0], h.num_heads, -(-h.head_dim // _VALUES["BV"]))](
            out, *values, state, *weights, rows.starts, rows.positions, rows.slots, rows.saves, xbc.stride(0),
            dt.stride(0), SAVES=rows.saves.shape[1], H=h.num_heads, P=h.head_dim, G=h.num_groups, S=h.state_dim,
            SP=power_of_two(h.state_dim), **_VALUES,
        )  # fmt: skip
    return out
