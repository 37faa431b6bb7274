"""Figures for a text: perplexity, and the divergence of one model's next-token distribution from another's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Float32, Float64

_ROWS = 32  # rows of logits to process at once, few enough to stay in the CPU caches


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The exponential of the mean negative log-probability (natural logarithm) of the counted tokens.

    standard_error: error of the perplexity, from the spread of the individual tokens (the delta method, as llama.cpp
        prints it).
    """

    perplexity: float
    standard_error: float
    mean_nll: float
    num_tokens: int

    @classmethod
    def of(cls, logprobs: Float32) -> Perplexity:
        """Compute the perplexity.

        logprobs: log-probabilities of the counted tokens, [N] with N > 0.
        """
        nll = -logprobs.astype(np.float64)
        value = float(np.exp(nll.mean()))
        error = float(nll.std(ddof=1) / np.sqrt(len(nll))) if len(nll) > 1 else float("nan")
        return cls(value, value * error, float(nll.mean()), len(nll))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The distance of a model from its reference over the same positions, in nats.

    The KL divergence at each position is KL(reference || model).

    top1: fraction of positions at which both have the same most likely token.
    """

    mean_kl: float
    mean_kl_standard_error: float
    median_kl: float
    p99_kl: float
    max_kl: float
    top1: float
    top1_standard_error: float
    reference_perplexity: float
    mean_nll_difference: float
    mean_nll_difference_standard_error: float
    num_positions: int


@dataclass(frozen=True, slots=True)
class PositionFigures:
    """Figures of individual positions, [N] each, in the order of the text."""

    kl: Float64
    same_top1: NDArray[np.bool_]
    reference_logprobs: Float32
    logprobs: Float32

    def summary(self) -> Divergence:
        count = len(self.kl)
        root = np.sqrt(count)
        difference = self.reference_logprobs.astype(np.float64) - self.logprobs
        spread = [float(values.std(ddof=1) / root) if count > 1 else float("nan") for values in (self.kl, difference)]
        top1 = float(self.same_top1.mean())
        return Divergence(
            mean_kl=float(self.kl.mean()),
            mean_kl_standard_error=spread[0],
            median_kl=float(np.median(self.kl)),
            p99_kl=float(np.quantile(self.kl, 0.99)),
            max_kl=float(self.kl.max()),
            top1=top1,
            top1_standard_error=float(np.sqrt(top1 * (1 - top1) / count)),
            reference_perplexity=float(np.exp(-self.reference_logprobs.astype(np.float64).mean())),
            mean_nll_difference=float(difference.mean()),
            mean_nll_difference_standard_error=spread[1],
            num_positions=count,
        )


def log_softmax(logits: Float32) -> Float32:
    """Return the log-probabilities of [rows, vocab] logits. -inf stays -inf; NaN gives NaN."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    sums: Float64 = np.exp(shifted).sum(axis=1, dtype=np.float64, keepdims=True)
    result: Float32 = shifted - np.log(sums).astype(np.float32)
    return result


def kl_divergence(reference: NDArray[np.floating], logits: Float32) -> Float64:
    """Return KL(reference || model) of each row, [rows], raised to 0 where rounding makes it negative.

    reference: log-probabilities [rows, vocab], possibly rounded to float16; they are normalized to sum to 1 again.
    logits: logits of the model, [rows, vocab]. A token that is impossible under the reference adds nothing.
    """
    result = np.empty(len(logits), np.float64)
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        log_p = log_softmax(reference[rows].astype(np.float32))
        log_q = log_softmax(logits[rows])
        p = np.exp(log_p)
        with np.errstate(invalid="ignore"):
            terms = np.where(p > 0, p * (log_p - log_q), np.float32(0))
        result[rows] = terms.sum(axis=1, dtype=np.float64)
    return np.maximum(result, 0)
