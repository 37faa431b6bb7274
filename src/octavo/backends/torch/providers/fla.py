"""`fla-core`: chunked forms of the gated delta rule and of the selective scan, for many tokens of a sequence.

If a state has to be saved within a step, one call ends at that token, and another call continues from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.providers.problems import Place, StateProblem, missing, unfit
from octavo.backends.torch.step_arrays import StepArrays, sent
from octavo.graph.ops.recurrence import GatedDeltaRule, SelectiveScan

LEAST_TOKENS = 64  # in the longest sequence of a step; with fewer, computing token by token is just as fast
_MOST_COLUMNS = 256


def absent(place: Place) -> str | None:
    """Return the reason why the library cannot be used here at all, or None if it can."""
    return missing("fla", "fla-core") or unfit(place)


def can(problem: StateProblem) -> str | None:
    """Return the reason why the library cannot compute this operation, or None if it can."""
    if reason := absent(problem.place):
        return reason
    if max(problem.key_dim, problem.value_dim) > _MOST_COLUMNS:
        return f"states of {problem.key_dim} x {problem.value_dim}, at most {_MOST_COLUMNS} x {_MOST_COLUMNS}"
    return None


def advanced(
    op: GatedDeltaRule | SelectiveScan,
    values: Sequence[Tensor],
    state: Tensor,
    weights: Sequence[Tensor | None],
    arrays: StepArrays,
) -> Tensor:
    """Compute an operation's output [T, columns].

    state: [slots, ...]; the states of the step's sequences are replaced.
    """
    found = _delta_rule(op, values, weights) if isinstance(op, GatedDeltaRule) else _scan(op, values, weights)
    call, tokens, is_turned = found
    slots, is_fresh = arrays.state_slots, arrays.is_fresh
    assert slots is not None
    assert is_fresh is not None
    current = torch.where(is_fresh.ne(0).reshape(-1, 1, 1, 1), 0.0, state[slots.long()])
    current = current.transpose(-1, -2).contiguous() if is_turned else current
    stretches = _stretches(arrays.rows.starts, arrays.rows.saves, slots.device)
    out = torch.empty_like(tokens[2])
    for stretch in stretches:
        out[stretch.rows], current[stretch.sequences] = _called(call, tokens, current, stretch)
        for number, sequence in stretch.saved:
            assert arrays.saved_slots is not None
            kept = current[sequence].transpose(-1, -2) if is_turned else current[sequence]
            state[arrays.saved_slots[number, sequence].long()] = kept.to(state.dtype)
    state[slots.long()] = (current.transpose(-1, -2) if is_turned else current).to(state.dtype)
    mixed = out.flatten(1)
    return mixed if isinstance(op, GatedDeltaRule) else _with_skip(op, mixed, values[0], weights)


class _Stretch:
    """Tokens of some sequences, up to a position where states are saved or to the end of the step.

    rows: rows of all these tokens.
    sequences: sequences that they belong to.
    ends: where the tokens of each sequence end, preceded by 0.
    saved: pairs of an index into `StepRows.saves` and a sequence.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], saves: Sequence[Sequence[int]], starts: Sequence[int],
                 device: torch.device) -> None:  # fmt: skip
        """spans: (sequence, first token, end), in tokens of the step."""
        self.rows = sent(np.concatenate([np.arange(begin, end) for _, begin, end in spans]), device)
        self.sequences = sent(np.array([sequence for sequence, _, _ in spans]), device)
        self.ends = sent(np.cumsum([0, *(end - begin for _, begin, end in spans)]), device)
        self.saved = [
            (number, sequence)
            for sequence, _, end in spans
            for number, counts in enumerate(saves)
            if counts[sequence] and starts[sequence] + counts[sequence] == end
        ]


@lru_cache(maxsize=2)  # the same for all layers of a step
def _stretches(starts: tuple[int, ...], saves: tuple[tuple[int, ...], ...], device: torch.device) -> list[_Stretch]:
    """Return the stretches of a step in the order of the calls.

    starts, saves: fields of `StepRows`.
    """
    cuts = []
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        inner = {begin + counts[sequence] for counts in saves if counts[sequence]}
        places = sorted({begin, end} | inner)
        cuts.append([(sequence, *pair) for pair in pairwise(places)])
    most = max(map(len, cuts), default=0)
    turns = [[of[turn] for of in cuts if len(of) > turn] for turn in range(most)]
    return [_Stretch(spans, saves, starts, device) for spans in turns]


def _called(call: Any, tokens: Sequence[Tensor], current: Tensor, stretch: _Stretch) -> tuple[Tensor, Tensor]:
    """Return the outputs of a stretch [tokens, heads, dim], and the states after it."""
    parts = [x[stretch.rows][None] for x in tokens]
    found, after = call(*parts, current[stretch.sequences].float(), stretch.ends)
    return found[0], after


def _delta_rule(
    op: GatedDeltaRule, values: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> tuple[Any, tuple[Tensor, ...], bool]:
    """Return the library call, its inputs for all tokens (q, k, v, gates, amounts), and whether its states are
    transposed.
    """
    qkv, beta, alpha = values
    decay, dt_bias = weights
    assert decay is not None
    assert dt_bias is not None
    h = op.heads
    width, heads = h.num_k_heads * h.key_dim, torch.arange(h.num_v_heads, device=qkv.device)
    key_of = heads % h.num_k_heads if h.is_tiled else heads // (h.num_v_heads // h.num_k_heads)

    def unit(part: Tensor) -> Tensor:
        y = part.float().reshape(-1, h.num_k_heads, h.key_dim)
        return (y * torch.rsqrt(y.square().sum(dim=-1, keepdim=True) + op.eps))[:, key_of].to(qkv.dtype)

    q, k = unit(qkv[:, :width]), unit(qkv[:, width : 2 * width])
    v = qkv[:, 2 * width :].reshape(-1, h.num_v_heads, h.value_dim)
    gates = decay * functional.softplus(alpha.float() + dt_bias, threshold=60.0)
    chunked = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, states: Tensor, ends: Tensor) -> Any:
        return chunked(
            q, k, v, g, b, scale=1 / math.sqrt(h.key_dim), initial_state=states, output_final_state=True,
            cu_seqlens=ends,
        )  # fmt: skip

    return call, (q, k, v, gates, torch.sigmoid(beta.float()).to(qkv.dtype)), False


def _scan(
    op: SelectiveScan, values: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> tuple[Any, tuple[Tensor, ...], bool]:
    """Return the library call, its inputs for all tokens (c, b, step * x, gates), and whether its states are
    transposed.
    """
    xbc, dt = values
    decay, _, dt_bias = weights
    assert decay is not None
    assert dt_bias is not None
    h = op.heads
    cols, width = h.num_heads * h.head_dim, h.num_groups * h.state_dim
    x, b, c = torch.split(xbc, [cols, width, width], dim=1)
    share = h.num_heads // h.num_groups
    b, c = (y.reshape(-1, h.num_groups, h.state_dim).repeat_interleave(share, dim=1) for y in (b, c))
    steps = functional.softplus(dt.float() + dt_bias, threshold=60.0)
    scaled = (steps[..., None] * x.reshape(-1, h.num_heads, h.head_dim)).to(xbc.dtype)
    chunked = import_module("fla.ops.simple_gla").chunk_simple_gla

    def call(c: Tensor, b: Tensor, v: Tensor, g: Tensor, states: Tensor, ends: Tensor) -> Any:
        return chunked(c, b, v, g=g, scale=1.0, initial_state=states, output_final_state=True, cu_seqlens=ends)

    return call, (c, b, scaled, decay * steps), True


def _with_skip(op: SelectiveScan, scanned: Tensor, xbc: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    skip = weights[1]
    assert skip is not None
    h = op.heads
    x = xbc[:, : h.num_heads * h.head_dim].reshape(-1, h.num_heads, h.head_dim)
    return (scanned.float() + (skip[:, None] * x.float()).flatten(1)).to(xbc.dtype)
