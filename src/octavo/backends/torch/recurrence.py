"""Operations whose state persists across steps, in plain torch: all sequences advance together, token by token.

The states of a step are read once, [sequences, *shape], and replaced at its end; nothing is written in place, so that
gradients flow through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from octavo.backends.torch.step import TorchStep
from octavo.graph.cache import StateCache

# (one token of some sequences, their states) -> (their outputs, the states after it).
AdvanceTokens = Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]


def short_conv(step: TorchStep, cache: StateCache, x: Tensor, taps: Tensor) -> Tensor:
    """Convolve x [tokens, cols] with taps [cols, taps], the oldest row's tap first.

    See `octavo.graph.ops.ShortConv`.
    """
    (state,) = step.read_states(cache)  # [sequences, taps - 1, cols]
    sequences, reach, cols = state.shape
    # The rows that a token sees are in this step or in its sequence's state. One table holds both.
    table = torch.cat([state.reshape(-1, cols).to(x.dtype), x])
    starts, saves = step.rows.first_rows, step.rows.save_counts
    offset = torch.arange(len(x), device=x.device) - starts[step.rows.sequences]
    age = torch.arange(reach + 1, device=x.device)
    place = offset[:, None] + age  # within the window over state and step
    seen = _window_rows(place, step.rows.sequences[:, None], starts, reach, sequences)
    out = torch.einsum("tjc,cj->tc", table[seen], taps.to(x.dtype))

    def after(counts: Tensor) -> Tensor:
        place = counts[:, None] + age[:-1]
        every = torch.arange(sequences, device=x.device)[:, None]
        return table[_window_rows(place, every, starts, reach, sequences)]

    counts = starts[1:] - starts[:-1]
    step.write_states(cache, after(counts), [] if saves is None else [after(each) for each in saves])
    return out


def _window_rows(place: Tensor, sequence: Tensor, starts: Tensor, reach: int, sequences: int) -> Tensor:
    """Return the table rows at these places in each sequence's window.

    The table contains the rows of all states, followed by the rows of the step.
    """
    in_state = sequence * reach + place
    in_step = sequences * reach + starts[sequence] + place - reach
    return torch.where(place < reach, in_state, in_step)


def delta_rule(step: TorchStep, cache: StateCache, tokens: Sequence[Tensor]) -> Tensor:
    """Compute `octavo.graph.ops.GatedDeltaRule`.

    tokens: q, k, v [tokens, heads, dim], gates, amounts [tokens, heads].
    """

    def advance(token: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, gate, amount = token
        state = state * gate[..., None, None]
        missing = v - torch.einsum("nhk,nhkv->nhv", k, state)
        state = state + k[..., None] * (amount[..., None] * missing)[..., None, :]
        return torch.einsum("nhk,nhkv->nhv", q, state), state

    return _recur(step, cache, tokens, advance)


def selective_scan(step: TorchStep, cache: StateCache, tokens: Sequence[Tensor]) -> Tensor:
    """Compute `octavo.graph.ops.SelectiveScan` without its skip term.

    tokens: x times its step [tokens, heads, head_dim], b, c [tokens, heads, state_dim], gates [tokens, heads].
    """

    def advance(token: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, b, c, gate = token
        state = state * gate[..., None, None] + x[..., None] * b[..., None, :]
        return torch.einsum("nhps,nhs->nhp", state, c), state

    return _recur(step, cache, tokens, advance)


def channel_scan(step: TorchStep, cache: StateCache, tokens: Sequence[Tensor], decay: Tensor) -> Tensor:
    """Compute `octavo.graph.ops.ChannelScan` without its skip term.

    tokens: x times its step [tokens, cols], b, c [tokens, state_dim], steps [tokens, cols].
    decay: [state_dim, cols].
    """

    def advance(token: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, b, c, size = token
        state = state * torch.exp(decay * size[:, None]) + b[..., None] * x[:, None]
        return torch.einsum("ns,nsc->nc", c, state), state

    return _recur(step, cache, tokens, advance)


def diagonal_delta_rule(step: TorchStep, cache: StateCache, tokens: Sequence[Tensor], reads_decayed: bool) -> Tensor:
    """Compute `octavo.graph.ops.DiagonalDeltaRule`.

    tokens: q, k, v, read, erase, gates [tokens, heads, dim], amounts [tokens, heads].
    """

    def advance(token: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, read, erase, gate, amount = token
        seen = torch.einsum("nhk,nhkv->nhv", read * gate if reads_decayed else read, state)
        added = k[..., None] * v[..., None, :] - erase[..., None] * seen[..., None, :]
        state = state * gate[..., None] + amount[..., None, None] * added
        return torch.einsum("nhk,nhkv->nhv", q, state), state

    return _recur(step, cache, tokens, advance)


def gated_sum(step: TorchStep, cache: StateCache, tokens: Sequence[Tensor]) -> Tensor:
    """Compute a sum over tokens that is multiplied by a gate before each addition.

    tokens: the addends and the gates, [tokens, cols].
    """

    def advance(token: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        added, gate = token
        state = state * gate[:, None] + added[:, None]
        return state[:, 0], state

    return _recur(step, cache, tokens, advance)


def _recur(step: TorchStep, cache: StateCache, tokens: Sequence[Tensor], advance: AdvanceTokens) -> Tensor:
    """Return the outputs of all tokens [tokens, columns].

    The first tokens of all sequences are computed together, then the second tokens, and so on.
    """
    (states,) = step.read_states(cache)
    states = states.to(tokens[0].dtype)
    saves, device = step.rows.saves, states.device
    saved = [states] * len(saves)
    starts = step.rows.starts
    counts = [end - begin for begin, end in pairwise(starts)]
    if counts and set(counts) == {1}:
        out, states = advance(tokens, states)
        step.write_states(cache, states, [states] * len(saves))
        return out.flatten(1)
    outputs, order = [], []
    for t in range(max(counts, default=0)):
        active = [n for n, count in enumerate(counts) if count > t]
        rows = [starts[n] + t for n in active]
        is_all = len(active) == len(counts)
        index = torch.tensor(active, device=device)
        at = torch.tensor(rows, device=device)
        out, after = advance([token[at] for token in tokens], states if is_all else states[index])
        states = after if is_all else states.index_copy(0, index, after)
        outputs.append(out.flatten(1))
        order += rows
        for number, ends in enumerate(saves):
            ending = [n for n, count in enumerate(ends) if count == t + 1]
            if ending:
                chosen = torch.tensor(ending, device=device)
                saved[number] = saved[number].index_copy(0, chosen, states[chosen])
    step.write_states(cache, states, saved)
    out = torch.cat(outputs)
    return out if order == [*range(len(order))] else out[torch.argsort(torch.tensor(order, device=device))]
