"""Joint sampling by the ranks of a group: each rank offers its most likely tokens instead of sending all of its logits.

An offer of a token is one int64 number. Its upper half is the logit, mapped to an integer that sorts the same way; its
lower half is the id, encoded so that smaller ids are larger numbers. The largest numbers of all ranks are therefore the
most likely tokens, and equal logits are ordered by id, as in every sampler. Every rank then draws from the same offers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.sampling import ROW_NAN_LOGITS, ROW_TOKEN_ID_OUT_OF_RANGE
from octavo.backends.torch.sampler import Samples, foreign_rows, processed, sample
from octavo.backends.torch.step_arrays import sent
from octavo.batch import SamplingBatch

MOST_OFFERS = 256  # per rank and row; rows that may draw from more tokens need all logits
_ID_BITS = 32
_LAST_ID = (1 << _ID_BITS) - 1
_SIGN = 0x7FFFFFFF
_NO_NUMBER = -(1 << 62)  # marks a row with a NaN; no offer equals it, because no token has its id


class GatherColumns(Protocol):
    """The signature of `TorchRankGroup.side_by_side`."""

    def __call__(self, x: Tensor, widths: Sequence[int]) -> Tensor: ...


def offers_of(batch: SamplingBatch) -> int | None:
    """Return how many tokens each rank must offer for a row; None means that the options need all logits.

    All logits are needed for log-probabilities, for given tokens, and for rows that draw from any token or from more
    than `MOST_OFFERS`.
    """
    rows = batch.rows
    wanted = np.where(rows["temperature"] > 0, rows["top_k"], 1)
    if (rows["num_logprobs"] >= 0).any() or (rows["target"] >= 0).any() or (wanted <= 0).any():
        return None
    most = int(wanted.max(initial=1))
    return most if most <= MOST_OFFERS else None


def sample_together(
    logits: Tensor, batch: SamplingBatch, widths: Sequence[int], rank: int, gather: GatherColumns, offers: int
) -> Samples:
    """Choose a token for each row, the same on all ranks.

    logits: the columns of this rank [R, part], float32.
    widths: number of columns of each rank.
    offers: result of `offers_of`.
    """
    first, vocab = sum(widths[:rank]), sum(widths)
    changed = processed(logits, _own(batch, first, widths[rank], vocab))
    counts = [min(offers, width) for width in widths]
    best = torch.topk(_numbered(changed, first), counts[rank], dim=1).values
    best = torch.where(logits.isnan().any(dim=1, keepdim=True), _NO_NUMBER, best)
    found = gather(best, counts)
    is_nan = (found == _NO_NUMBER).any(dim=1)
    # By ascending id, the order in which tokens are drawn. An offer contains the complement of the id.
    ids, order = torch.sort(_LAST_ID - (found & _LAST_ID), dim=1)
    upper = torch.gather(found >> _ID_BITS, 1, order)
    bits = torch.where(upper >= 0, upper, upper ^ _SIGN).int()
    kept = bits.view(torch.float32).masked_fill(is_nan[:, None], 0.0)
    drawn = sample(kept, SamplingBatch.plain(batch.rows), 0)
    foreign = sent(foreign_rows(batch, vocab), logits.device)
    errors = torch.where(is_nan, ROW_NAN_LOGITS, drawn.errors)
    errors = torch.where(foreign, ROW_TOKEN_ID_OUT_OF_RANGE, errors)
    tokens = torch.gather(ids, 1, drawn.token_ids.clamp(min=0)[:, None])[:, 0]
    return replace(drawn, token_ids=torch.where(errors == 0, tokens, -1), errors=errors)


def _numbered(logits: Tensor, first: int) -> Tensor:
    """Encode logits [R, part] of the tokens from `first` on as offers."""
    bits = (logits + 0.0).view(torch.int32).long()  # gives both zeros the same sign
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    return (torch.where(bits >= 0, bits, bits ^ _SIGN) << _ID_BITS) | (_LAST_ID - ids)


def _own(batch: SamplingBatch, first: int, part: int, vocab: int) -> SamplingBatch:
    """Return the logit changes for this rank's tokens, numbered from `first`.

    Entries for other tokens get invalid ids.
    """
    mask = None if batch.allowed_mask is None else _columns(batch.allowed_mask, first, part, vocab)
    return replace(batch, history_ids=batch.history_ids - first, bias_ids=batch.bias_ids - first, allowed_mask=mask)


def _columns(mask: NDArray[np.uint32], first: int, part: int, vocab: int) -> NDArray[np.uint32]:
    """Extract the mask bits of `part` tokens, starting at token `first`, as a separate mask."""
    if first % 32 == 0:
        return np.ascontiguousarray(mask[:, first // 32 : -(-(first + part) // 32)])
    bits = np.unpackbits(mask.view(np.uint8), axis=1, count=vocab, bitorder="little")[:, first : first + part]
    padded = np.pad(bits, ((0, 0), (0, -part % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
