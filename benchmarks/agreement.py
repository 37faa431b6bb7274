"""Agreement of one engine's next-token distributions with the reference's: the definitions, in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """Return the log-probabilities of [rows, vocabulary] logits."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


@dataclass
class Agreement:
    """The figures of every position, [positions] each."""

    kl: NDArray[np.float64]
    """KL(reference || engine) in nats."""
    same_greedy: NDArray[np.bool_]
    """Whether both prefer the same token."""
    reference_nll: NDArray[np.float64]
    """Negative log-probability that the reference gives to the next token of the text."""
    nll: NDArray[np.float64]
    """Negative log-probability that the engine gives to it."""

    @classmethod
    def of_rows(cls, reference: Floats, logits: Floats, targets: NDArray[np.int64]) -> Agreement:
        """Compare the logits [rows, vocabulary] of both for the same rows.

        targets: the tokens that follow, [rows].
        """
        kl, same, reference_nll, nll = [], [], [], []
        for start in range(0, len(logits), 64):
            rows = slice(start, start + 64)
            p, q = log_softmax(reference[rows]), log_softmax(logits[rows])
            at = targets[rows, None]
            kl.append((np.exp(p) * (p - q)).sum(axis=1))
            same.append(p.argmax(axis=1) == q.argmax(axis=1))
            reference_nll.append(-np.take_along_axis(p, at, axis=1)[:, 0])
            nll.append(-np.take_along_axis(q, at, axis=1)[:, 0])
        return cls(*(np.concatenate(part) for part in (kl, same, reference_nll, nll)))

    @classmethod
    def joined(cls, parts: list[Agreement]) -> Agreement:
        names = ("kl", "same_greedy", "reference_nll", "nll")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def summary(self) -> dict[str, float]:
        """Return the figures of the report. The paired standard error applies to the difference of mean NLL."""
        difference = self.nll - self.reference_nll
        count = len(self.kl)
        return {
            "positions": count,
            "greedy_agreement": float(self.same_greedy.mean()),
            "mean_kl": float(self.kl.mean()),
            "mean_kl_standard_error": float(self.kl.std() / np.sqrt(count)),
            "median_kl": float(np.median(self.kl)),
            "p99_kl": float(np.quantile(self.kl, 0.99)),
            "perplexity": float(np.exp(self.nll.mean())),
            "reference_perplexity": float(np.exp(self.reference_nll.mean())),
            "mean_nll_difference": float(difference.mean()),
            "mean_nll_difference_standard_error": float(difference.std() / np.sqrt(count)),
        }


@dataclass
class Reference:
    """The files of a reference run: windows of tokens, and the logits after each token."""

    tokens: NDArray[np.int32]
    """[windows, length + 1]; the last column is only predicted."""
    logits: Floats
    """[windows, length, vocabulary], memory-mapped."""

    @classmethod
    def open(cls, folder: Path) -> Reference:
        return cls(np.load(folder / "tokens.npy"), np.load(folder / "logits.npy", mmap_mode="r"))

    def agreement(self, window: int, logits: Floats) -> Agreement:
        """Return the figures of one window's logits [length, vocabulary]."""
        return Agreement.of_rows(self.logits[window], logits, self.tokens[window, 1:].astype(np.int64))
