"""Sampling on the device, row for row as `octavo.backends.sampling` defines it, with the same random draws.

Nothing here waits for the device, because the options that decide which stages run are on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.sampling import ROW_NAN_LOGITS, ROW_NOTHING_ALLOWED, ROW_TOKEN_ID_OUT_OF_RANGE, uniform
from octavo.backends.torch.step_arrays import sent
from octavo.batch import SamplingBatch

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST_X = -87.0


@dataclass(frozen=True, slots=True)
class Samples:
    """The results of sampling, on the device: fields of `StepOutput`, and the reasons why rows have no token."""

    token_ids: Tensor  # [R]
    logprobs: Tensor  # [R]
    ranks: Tensor  # [R]
    top_ids: Tensor  # [R, most likely]
    top_logprobs: Tensor
    errors: Tensor  # [R]


def rows_of(batch: SamplingBatch, rows: slice) -> SamplingBatch:
    """Return the options of some rows."""
    history = slice(batch.history_start[rows.start], batch.history_start[rows.stop])
    bias = slice(batch.bias_start[rows.start], batch.bias_start[rows.stop])
    return SamplingBatch(
        batch.rows[rows],
        batch.history_start[rows.start : rows.stop + 1] - history.start,
        batch.history_ids[history],
        batch.history_counts[history],
        batch.bias_start[rows.start : rows.stop + 1] - bias.start,
        batch.bias_ids[bias],
        batch.bias_values[bias],
        None if batch.allowed_mask is None else batch.allowed_mask[rows],
    )


def joined(parts: list[Samples]) -> Samples:
    """Join the results of rows that were sampled in several calls."""
    names = Samples.__slots__
    return parts[0] if len(parts) == 1 else Samples(*(torch.cat([getattr(part, n) for part in parts]) for n in names))


def sample(logits: Tensor, batch: SamplingBatch, num_top: int, draws: Tensor | None = None) -> Samples:
    """Choose a token for each row of `logits` [R, vocab], float32.

    num_top: maximum number of most likely tokens to report.
    draws: [R], float64, random numbers that replace the ones in the options.
    """
    rows = _Rows(logits, batch)
    raw = logits.clamp(max=_LARGEST)
    errors = rows.errors(raw)
    processed = rows.processed(raw)
    forbidden = (processed.amax(dim=1) == -torch.inf) & ~rows.is_target & (errors == 0)
    errors = torch.where(forbidden, ROW_NOTHING_ALLOWED, errors)
    tokens = torch.where(rows.is_target, rows.targets, rows.chosen(processed, draws))
    is_sound = errors == 0
    tokens = torch.where(is_sound, tokens, -1)
    logprobs, ranks, top_ids, top_logprobs = rows.reported(raw, tokens.clamp(min=0), is_sound, num_top)
    return Samples(tokens, logprobs, ranks, top_ids, top_logprobs, errors)


def processed(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return logits [R, vocab] after bias, mask and penalties; entries whose ids are outside the vocabulary are
    ignored.
    """
    return _Rows(logits, batch).processed(logits.clamp(max=_LARGEST))


def foreign_rows(batch: SamplingBatch, vocab: int) -> NDArray[np.bool_]:
    """Return a mask [R] of the rows with a token id outside the vocabulary."""
    b = batch
    foreign: NDArray[np.bool_] = b.rows["target"] >= vocab
    for starts, ids in ((b.history_start, b.history_ids), (b.bias_start, b.bias_ids)):
        outside = (ids < 0) | (ids >= vocab)
        if outside.any():
            foreign[np.unique(np.searchsorted(starts, np.flatnonzero(outside), side="right") - 1)] = True
    return foreign


class _Rows:
    """The options of R rows as tensors on the device of their logits."""

    def __init__(self, logits: Tensor, batch: SamplingBatch) -> None:
        self._device, self._vocab, self._batch, self._host = logits.device, logits.shape[1], batch, batch.rows
        self.targets = self._column("target", np.int64)
        self.is_target = self.targets >= 0

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return sent(array, self._device)

    def _column(self, name: str, dtype: type[np.generic]) -> Tensor:
        return self._tensor(self._host[name].astype(dtype))

    def errors(self, raw: Tensor) -> Tensor:
        """Return the reasons [R] why rows will have no token, if they are known before anything is chosen."""
        nothing = torch.where(raw.amax(dim=1) > -torch.inf, 0, ROW_NOTHING_ALLOWED)
        errors = torch.where(raw.isnan().any(dim=1), ROW_NAN_LOGITS, nothing)
        foreign = self._tensor(foreign_rows(self._batch, self._vocab))
        return torch.where(foreign, ROW_TOKEN_ID_OUT_OF_RANGE, errors)

    def processed(self, raw: Tensor) -> Tensor:
        """Apply stages 1 and 2: bias, mask, penalties."""
        b, logits = self._batch, raw.clone()
        if len(b.bias_ids):
            rows, ids, kept = self._entries(b.bias_start, b.bias_ids)
            logits.index_put_((rows, ids), self._tensor(b.bias_values[kept]), accumulate=True)
        if b.allowed_mask is not None:
            words = self._tensor(b.allowed_mask.view(np.int32))
            ids = torch.arange(self._vocab, device=self._device)
            allowed = (words[:, ids >> 5] >> (ids & 31)) & 1
            logits.masked_fill_(allowed == 0, -torch.inf)
        if len(b.history_ids):
            rows, ids, kept = self._entries(b.history_start, b.history_ids)
            repetition, frequency, presence = (
                self._column(f"{name}_penalty", np.float32)[rows] for name in ("repetition", "frequency", "presence")
            )
            counts, seen = self._tensor(b.history_counts[kept].astype(np.float32)), logits[rows, ids]
            seen = torch.where(seen > 0, seen / repetition, seen * repetition) - frequency * counts
            logits[rows, ids] = seen - torch.where(counts > 0, presence, 0.0)
        return logits.clamp_(max=_LARGEST)

    def _entries(self, starts: NDArray[np.int32], ids: NDArray[np.int32]) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
        """Return the rows and ids of compressed rows, without ids outside the vocabulary, and a mask of the entries
        that were kept.
        """
        rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        kept = (ids >= 0) & (ids < self._vocab)
        return self._tensor(rows[kept]), self._tensor(ids[kept].astype(np.int64)), kept

    def chosen(self, logits: Tensor, draws: Tensor | None = None) -> Tensor:
        """Apply stages 3 to 5. Return the tokens [R]."""
        greedy = logits.argmax(dim=1)
        options = self._host
        if not (options["temperature"] > 0).any():
            return greedy
        temperature = self._column("temperature", np.float32)
        divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
        x = (logits - logits.amax(dim=1, keepdim=True)) / divisor
        alive = x >= _SMALLEST_X
        if (options["min_p"] > 0).any():
            with np.errstate(divide="ignore"):
                floor = np.log(np.minimum(options["min_p"].astype(np.float64), 1.0)).astype(np.float32)
            alive &= x >= self._tensor(np.where(options["min_p"] > 0, floor, -np.inf).astype(np.float32))[:, None]
        if (options["top_k"] > 0).any():
            k = self._tensor(np.where(options["top_k"] > 0, options["top_k"], self._vocab).astype(np.int64))
            alive = _first(alive, _by_likelihood(logits, alive), k)
        if (options["typical_p"] < 1).any():
            alive = self._filtered(x, alive, "typical_p", _by_typicality(x, alive))
        if (options["top_p"] < 1).any():
            alive = self._filtered(x, alive, "top_p", _by_likelihood(logits, alive))
        cumulative = _mass(x, alive).cumsum(dim=1)
        if draws is None:
            draws = self._tensor(uniform(options["seed"], options["counter"]))
        passed = (cumulative <= (draws * cumulative[:, -1])[:, None]).sum(dim=1)
        ids = torch.arange(self._vocab, device=self._device)
        last = torch.where(alive, ids, 0).amax(dim=1)
        return torch.where(temperature > 0, torch.minimum(passed, last), greedy)

    def _filtered(self, x: Tensor, alive: Tensor, name: str, order: Tensor) -> Tensor:
        """Keep the shortest prefix of the order that reaches the filter's share of the total weight, in rows with this
        filter.
        """
        share = self._host[name].astype(np.float64)
        cumulative = _mass(x, alive).gather(1, order).cumsum(dim=1)
        count = (cumulative < self._tensor(share)[:, None] * cumulative[:, -1:]).sum(dim=1) + 1
        return torch.where(self._tensor(share < 1)[:, None], _first(alive, order, count), alive)

    def reported(
        self, raw: Tensor, tokens: Tensor, is_sound: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log-probabilities and ranks of the tokens [R], then the most likely tokens and their log-probabilities
        [R, num_top].
        """
        wanted = self._host["num_logprobs"]
        count, device = len(wanted), self._device
        nan = torch.full((count,), torch.nan, device=device)
        nothing = torch.zeros((count,), dtype=torch.int64, device=device)
        if not (wanted >= 0).any():
            return nan, nothing, nothing[:, None].expand(-1, num_top) - 1, nan[:, None].expand(-1, num_top)
        wide = raw.double()
        logprobs = wide - torch.logsumexp(wide, dim=1, keepdim=True)
        own = raw.gather(1, tokens[:, None])
        ids = torch.arange(self._vocab, device=device)
        ranks = 1 + (raw > own).sum(dim=1) + ((raw == own) & (ids < tokens[:, None])).sum(dim=1)
        limits = self._tensor(wanted.astype(np.int64))
        is_wanted = is_sound & (limits >= 0)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].float()
        shown = min(num_top, self._vocab)
        top = torch.sort(raw, dim=1, descending=True, stable=True).indices[:, :shown] if num_top else ids[None, :0]
        top = top.expand(count, -1)
        is_shown = is_wanted[:, None] & (torch.arange(shown, device=device) < limits[:, None])
        top_logprobs = torch.where(is_shown, logprobs.gather(1, top).float(), torch.nan)
        top_ids, pad = torch.where(is_shown, top, -1), (0, num_top - shown)
        return (
            torch.where(is_wanted, chosen, nan),
            torch.where(is_wanted, ranks, 0),
            torch.nn.functional.pad(top_ids, pad, value=-1),
            torch.nn.functional.pad(top_logprobs, pad, value=torch.nan),
        )


def _by_likelihood(logits: Tensor, alive: Tensor) -> Tensor:
    """Sort each row's ids: the survivors by descending logit, equal ones by ascending id, then all others."""
    ranked = logits.masked_fill(~alive, -torch.inf)
    return torch.sort(ranked, dim=1, descending=True, stable=True).indices


def _by_typicality(x: Tensor, alive: Tensor) -> Tensor:
    """Sort each row's ids: the survivors by the distance of their surprise from the entropy, then all others."""
    mass = _mass(x, alive)
    mean = (torch.where(alive, x.double(), 0.0) * mass).sum(dim=1) / mass.sum(dim=1)
    distance = (x - mean.float()[:, None]).abs().masked_fill(~alive, torch.inf)
    return torch.sort(distance, dim=1, stable=True).indices


def _mass(x: Tensor, alive: Tensor) -> Tensor:
    """Return the weight of each survivor in float64, zero for others."""
    return torch.where(alive, torch.exp(x.double()), 0.0)


def _first(alive: Tensor, order: Tensor, count: Tensor) -> Tensor:
    """Return a mask of the survivors among the first `count` [R] ids of an order."""
    place = torch.arange(alive.shape[1], device=alive.device)
    is_first = torch.zeros_like(alive).scatter(1, order, place < count[:, None])
    return alive & is_first
