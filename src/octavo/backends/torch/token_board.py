"""The tokens that steps leave on the device, and which draft tokens among them were accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.sampling import uniform
from octavo.backends.torch.step_arrays import HostArrays, sent
from octavo.batch import Batch, Float32, Int32, LateTokens
from octavo.speculative_config import MAX_DRAFTING, MAX_DRAFTS

NUM_GUESSES = MAX_DRAFTS * MAX_DRAFTING  # draft tokens for one step

_SOURCES, _POSITIONS, _WANTED, _SLOTS = 1, 2, 4, 7  # indices into `HostArrays.shapes`


class TokenBoard:
    """The tokens of the previous step, int64, for a step that is submitted while the previous one runs.

    A draft model uses its target's board and leaves its draft tokens there.
    """

    def __init__(self, num_rows: int, num_tokens: int, vocab_size: int, device: torch.device) -> None:
        """num_rows, num_tokens: rows of logits and tokens of the largest step.
        vocab_size: columns of the logits.
        """
        self._num_rows, self._vocab_size = max(num_rows, 1), vocab_size
        self.tokens = torch.zeros(self._num_rows + NUM_GUESSES, dtype=torch.int64, device=device)
        self._computed = torch.zeros(max(num_tokens, 1), dtype=torch.int64, device=device)

    def keep_drawn(self, token_ids: Tensor) -> None:
        """Keep the drawn tokens [R]; -1 marks a row without a token."""
        self.tokens[: len(token_ids)].copy_(token_ids)

    def keep_guesses(self, token_ids: Tensor, first: int) -> None:
        """Keep draft tokens from place `first` on.

        Ids outside the target's vocabulary are clamped to it and thus rejected.
        """
        begin = self._num_rows + first
        self.tokens[begin : begin + len(token_ids)].copy_(token_ids.clamp(0, self._vocab_size - 1))

    def keep_computed(self, token_ids: Tensor) -> None:
        """Keep the tokens [T] of a step that may contain draft tokens."""
        self._computed[: len(token_ids)].copy_(token_ids)

    def placed(self, batch: Batch) -> Batch:
        """Return the batch with `token_sources` converted to places on the board."""
        sources = batch.token_sources
        if sources is None or sources.min(initial=0) >= -1:
            return batch
        places = np.where(sources < -1, self._num_rows - 2 - sources, sources).astype(np.int32)
        return replace(batch, token_sources=places)

    def has_guesses(self, batch: Batch) -> bool:
        """Return True if some tokens of a placed batch are draft tokens from the board."""
        sources = batch.token_sources
        return sources is not None and bool(sources.max(initial=-1) >= self._num_rows)

    def rejected(self, late: LateTokens) -> Tensor:
        """Return the number of each sequence's draft tokens in the previous step that were wrong or followed a wrong
        one [N].
        """
        device = self.tokens.device
        rows, tokens, counts = (x[:, None] for x in sent(np.stack(late[:3]), device).long())
        number = torch.arange(max(int(late.num_drafts.max(initial=0)), 1), device=device)
        drawn = self.tokens[(rows + number).clamp(max=self._num_rows - 1)]
        guesses = self._computed[(tokens + 1 + number).clamp(max=len(self._computed) - 1)]
        is_right = (drawn == guesses) & (number < counts)
        rejected: Tensor = counts[:, 0] - is_right.long().cumprod(dim=1).sum(dim=1)
        return rejected


class HeadStates:
    """The hidden states that a step of the model, or of a draft head itself, leaves for the draft head."""

    def __init__(self, device: torch.device, model: HeadStates | None = None, bias: Float32 | None = None) -> None:
        """model: hidden states of the model that a head drafts for.
        bias: see `octavo.backends.GuessingExecutor`.
        """
        self._device, self._model = device, model
        self._bias = None if bias is None else sent(bias, device)
        self._rows = torch.zeros((0, 0), device=device)

    def keep(self, rows: Tensor, num_tokens: int) -> None:
        """Keep the rows until the next step overwrites them; keep only the last `num_tokens` if there are more."""
        self._rows = rows[max(len(rows) - num_tokens, 0) :]

    def forget(self) -> None:
        """Release the rows, which keep workspace memory alive."""
        self._rows = self._rows.new_zeros((0, 0))

    def inputs(self, batch: Batch, columns: Sequence[int]) -> list[Tensor]:
        """Return the inputs of a step, [rows, columns[i]] each, from its batch or from rows that earlier steps left
        here.
        """
        if batch.hidden_at is None:
            return [sent(x, self._device) for x in batch.inputs]
        assert self._model is not None
        is_own = bool((batch.hidden_at < 0).any())
        places = sent(np.where(batch.hidden_at < 0, -1 - batch.hidden_at, batch.hidden_at), self._device).long()
        rows = (self._rows if is_own else self._model._rows)[places].float()
        if len(columns) == 1:
            return [rows]
        nothing = torch.zeros((len(rows), columns[1 - is_own]), device=self._device)
        if not is_own:
            return [rows, nothing]
        return [nothing, rows if self._bias is None else rows - self._bias]


class LateNumbers:
    """The numbers of a step that depend on the draft tokens of the previous step.

    Create an instance while the board still has the previous step's tokens.
    """

    def __init__(self, board: TokenBoard, batch: Batch, block_size: int) -> None:
        assert batch.late is not None
        self._late, self._batch, self._block_size = batch.late, batch, block_size
        self._rejected = board.rejected(batch.late)
        counts = np.diff(batch.query_start_loc)
        self._owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._most = int(batch.late.num_drafts.max(initial=0))

    def move(self, host: HostArrays, flat: Tensor) -> None:
        """Subtract the rejected draft tokens from the numbers of the step, int32 [length], in place.

        host: the shapes of the numbers; a captured step has more rows than the batch.
        """
        where, of = self._falling(host)
        if self._late.only_outputs:
            places, sequences = sent(np.stack([where, of]), flat.device).long()
            flat[places] -= self._rejected[sequences].int()
            return
        slots_at, owners, choices = self._slots(host)
        sizes = [len(where), len(where), *[len(owners)] * (2 + len(choices))]
        packed = sent(np.concatenate([where, of, slots_at, owners, *choices]), flat.device).long()
        parts = torch.split(packed, sizes)
        flat[parts[0]] -= self._rejected[parts[1]].int()
        flat[parts[2]] = torch.stack(parts[4:]).gather(0, self._rejected[parts[3]][None])[0].int()

    def draws(self) -> Tensor | None:
        """Return the draws of the rows [R], float64, which depend on positions in the answer; None if
        nothing is drawn.
        """
        sampling = self._batch.sampling
        if self._late.only_outputs or sampling is None or not sampling.rows["temperature"].any():
            return None
        seeds, counters = sampling.rows["seed"], sampling.rows["counter"]
        choices = np.stack([uniform(seeds, counters - np.uint64(count)) for count in range(self._most + 1)])
        owners = sent(self._owners[self._batch.logits_indices], self._rejected.device).long()
        return sent(choices, self._rejected.device).gather(0, self._rejected[owners][None])[0]

    def _falling(self, host: HostArrays) -> tuple[Int32, Int32]:
        """Return the places of the numbers that decrease by one for each rejected draft token, and their sequences."""
        batch, owners, offsets = self._batch, self._owners, _offsets(host)
        found: list[tuple[NDArray[Any], NDArray[Any]]] = []
        if self._late.only_outputs:
            found.append((np.arange(len(batch.output_indices)) + offsets[_WANTED], owners[batch.output_indices]))
        else:
            assert batch.token_sources is not None
            drawn, counts = np.flatnonzero(batch.token_sources >= 0), np.diff(batch.query_start_loc)
            found.append((drawn + offsets[_SOURCES], owners[drawn]))
            found.append((np.arange(len(owners)) + offsets[_POSITIONS], owners))
            for equal, count in zip(host.equal, np.unique(counts[counts > 0]).tolist(), strict=True):
                chosen = np.flatnonzero(counts == count)
                found.append((np.arange(count * len(chosen)) + offsets[equal[1]], np.repeat(chosen, count)))
                found += [(np.arange(len(chosen)) + offsets[end_at], chosen) for _, _, end_at in equal[3]]
        places, sequences = (np.concatenate(arrays).astype(np.int32) for arrays in zip(*found, strict=True))
        return places, sequences

    def _slots(self, host: HostArrays) -> tuple[Int32, Int32, list[Int32]]:
        """Return the places of slots, their sequences, and the slots for 0, 1 ... rejected draft tokens."""
        batch, owners, size = self._batch, self._owners, self._block_size
        num_groups, width = host.shapes[_SLOTS]
        places = _offsets(host)[_SLOTS] + width * np.arange(num_groups)[:, None] + np.arange(len(owners))
        choices = []
        for count in range(self._most + 1):
            block, offset = np.divmod(np.maximum(batch.positions - count, 0), size)
            slots = batch.block_tables[:num_groups, owners, block] * size + offset
            choices.append(slots.reshape(-1).astype(np.int32))
        return places.reshape(-1).astype(np.int32), np.tile(owners, num_groups), choices


def _offsets(host: HostArrays) -> NDArray[np.intp]:
    return np.cumsum([0, *(math.prod(shape) for shape in host.shapes)])
