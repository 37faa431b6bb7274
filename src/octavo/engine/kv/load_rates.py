"""Decides whether to load or compute a prefix, from the measured speed of the store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_NUM_REMEMBERED = 8
_PATIENCE_S = 5.0  # wait for a load while there is no computing time to compare with
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.25, 30.0
_TRIED_AGAIN_S = 60.0  # a slow store may only have been busy


class LoadRates:
    """The times of the store's last loads, fitted with a straight line of seconds over bytes.

    Before anything is measured, everything is loaded.
    """

    def __init__(self, token_s: Callable[[int], float | None]) -> None:
        """token_s: see `StepTimes.chunk_token_s`."""
        self._token_s = token_s
        self._loads: deque[tuple[int, float]] = deque(maxlen=_NUM_REMEMBERED)
        self._refused_at = 0.0  # when a load was first refused since the last load; 0.0 if none was

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Record a load that took `seconds`, or that had not arrived by then."""
        self._loads.append((num_bytes, seconds))
        self._refused_at = 0.0

    def is_worth(self, num_bytes: int, start: int, num_tokens: int) -> bool:
        """True if num_bytes can probably be loaded faster than the tokens from `start` on can be computed."""
        load_s, compute_s = self.load_s(num_bytes), self._compute_s(start, num_tokens)
        if load_s is None or compute_s is None or load_s < compute_s:
            return True
        now = time.monotonic()
        self._refused_at = self._refused_at or now
        return now - self._refused_at > _TRIED_AGAIN_S

    def patience_s(self, start: int, num_tokens: int) -> float:
        """Return how many seconds to wait for a load: half the time that it takes to compute the tokens.

        This limits the cost of a failed load.
        """
        compute_s = self._compute_s(start, num_tokens)
        return _PATIENCE_S if compute_s is None else min(max(compute_s / 2, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)

    def load_s(self, num_bytes: int) -> float | None:
        """Estimate the seconds to load num_bytes. Return None if nothing was measured."""
        if not self._loads:
            return None
        count = len(self._loads)
        mean_bytes = sum(size for size, _ in self._loads) / count
        mean_s = sum(seconds for _, seconds in self._loads) / count
        spread = sum((size - mean_bytes) ** 2 for size, _ in self._loads)
        slope = sum((size - mean_bytes) * (s - mean_s) for size, s in self._loads) / spread if spread else 0.0
        if not 0 < slope <= mean_s / mean_bytes:  # the sizes do not explain the time, or explain more than is possible
            return mean_s * max(num_bytes / mean_bytes, 1.0)
        return mean_s + slope * (num_bytes - mean_bytes)

    def _compute_s(self, start: int, num_tokens: int) -> float | None:
        token_s = self._token_s(start)
        return None if token_s is None else token_s * num_tokens
