"""The record of a soak test and its criteria of failure: idle processes, counts of answers, growth of memory."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MAX_SLOPE_MIB = 0.1  # a minute, of each process
MAX_SHORT_SLOPE_MIB = 0.5  # in runs of less than an hour, over which noise is a larger part
MAX_P99_GROWTH = 1.5  # of the last third of the time over the first
MIN_TIMES = 200  # of a third: of fewer the 99th percentile is the largest
# By each reload: the allocator keeps room for the tokenizer. Of SmolLM2's 14 MiB it kept 9 once, then 0 to 3.
MAX_RELOAD_MIB = 12.0
NOISE_MIB = 1.0  # what a process at rest goes up and down: over a few seconds any slope comes of it
MAX_GROWTH = 1.15  # of the last look, over the one a quarter into the run, in the same life of a process
# Around the first look. The web server's pool of worker threads comes and goes with the load.
MAX_DRIFT = {"num_files": 2, "num_threads": 8, "num_children": 0}
_WARMUP_S = 60.0  # of a process: its cache fills


@dataclass(frozen=True, slots=True)
class Look:
    """A sample of one idle process. Seconds count from the start of the soak; `age_s` from the start of the process."""

    seconds: float
    process: str  # server or engine
    pid: int
    age_s: float
    resident_mib: float
    num_files: int
    num_threads: int
    num_children: int
    num_reloads: int = 0  # of the model, before it


@dataclass(slots=True)
class Record:
    """The whole record.

    answers: (kind, outcome) -> count.
    broken: descriptions of failures.
    """

    seconds: float
    looks: list[Look] = field(default_factory=list)
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    num_checks: int = 0
    times: list[tuple[float, float]] = field(default_factory=list)  # of short chats: when each began, how long it took

    def of(self, process: str) -> list[Look]:
        return [look for look in self.looks if look.process == process]

    def slope(self, process: str) -> float | None:
        """Return MiB per minute over the last two thirds, excluding warm-ups; None with too few samples."""
        return slope(self._warm(process))

    @property
    def max_slope(self) -> float:
        return MAX_SLOPE_MIB if self.seconds >= 3600 else MAX_SHORT_SLOPE_MIB

    def p99_s(self) -> list[float | None]:
        """Return the 99th percentile of the times in each third; None for a third with too few."""
        thirds: list[list[float]] = [[], [], []]
        for began, took in self.times:
            thirds[min(int(3 * began / self.seconds), 2)].append(took)
        return [statistics.quantiles(third, n=100)[98] if len(third) >= MIN_TIMES else None for third in thirds]

    def _warm(self, process: str) -> list[Look]:
        return [look for look in self.of(process) if look.seconds >= self.seconds / 3 and look.age_s > _WARMUP_S]

    def verdict(self) -> list[str]:
        """Return a description of every broken limit; empty if there is none."""
        found = list(self.broken)
        for process in ("server", "engine"):
            looks = self.of(process)
            rise = self.slope(process)
            if rise is None:
                found.append(f"{process}: too few looks to see whether its memory grows")
            elif rise > self.max_slope and rise * _minutes(self._warm(process)) > NOISE_MIB:
                found.append(
                    f"{process}: memory grows by {rise:.2f} MiB a minute; at most {self.max_slope} are allowed"
                )
            found += _growth(process, looks, self.seconds / 4) + _steps(process, looks)
            for name, allowed in MAX_DRIFT.items():
                values = [getattr(look, name) for look in looks]
                if values and max(abs(value - values[0]) for value in values) > allowed:
                    found.append(f"{process}: {name} went from {values[0]} to between {min(values)} and {max(values)}")
        first, _, last = self.p99_s()
        if first is not None and last is not None and last > MAX_P99_GROWTH * first:
            found.append(f"short chats: p99 went from {first:.2f} to {last:.2f} s; at most {MAX_P99_GROWTH} times")
        return found

    def summary(self) -> dict[str, Any]:
        """Return the record in JSON-compatible types."""
        kinds = {kind for kind, _ in self.answers}
        return {
            "seconds": self.seconds,
            "requests": sum(self.answers.values()),
            "answers": {
                kind: {outcome: count for (of, outcome), count in sorted(self.answers.items()) if of == kind}
                for kind in sorted(kinds)
            },
            "checks": self.num_checks,
            "recoveries_s": self.recoveries_s,
            "slope_mib_per_minute": {name: self.slope(name) for name in ("server", "engine")},
            "short_p99_s_by_third": self.p99_s(),
            "broken": self.verdict(),
        }


def slope(looks: Sequence[Look]) -> float | None:
    """Return the least-squares slope in MiB per minute, shared by all process lives, with a separate level for each."""
    above = below = 0.0
    for life in _lives(looks):
        middle = statistics.mean(look.seconds for look in life)
        level = statistics.mean(look.resident_mib for look in life)
        above += sum((look.seconds - middle) * (look.resident_mib - level) for look in life)
        below += sum((look.seconds - middle) ** 2 for look in life)
    return None if below == 0 else above / below * 60


def _lives(looks: Sequence[Look]) -> list[list[Look]]:
    """Return the samples of each process, split at a reload."""
    lives: dict[tuple[int, int], list[Look]] = {}
    for look in looks:
        lives.setdefault((look.pid, look.num_reloads), []).append(look)
    return list(lives.values())


def _minutes(looks: Sequence[Look]) -> float:
    """Return the total minutes over which the processes were observed."""
    return sum(life[-1].seconds - life[0].seconds for life in _lives(looks)) / 60


def _steps(process: str, looks: Sequence[Look]) -> list[str]:
    """Compare the samples before and after each reload."""
    found = []
    for before, after in pairwise(looks):
        step = after.resident_mib - before.resident_mib
        if after.pid == before.pid and after.num_reloads > before.num_reloads and step > MAX_RELOAD_MIB:
            found.append(f"{process}: {step:.0f} MiB more after a reload; at most {MAX_RELOAD_MIB:g} are allowed")
    return found


def _growth(process: str, looks: Sequence[Look], quarter_s: float) -> list[str]:
    """Compare the last sample with the first sample of the same process that is warm and a quarter into the run."""
    if not looks:
        return []
    last = looks[-1]
    same = [look for look in looks if look.pid == last.pid and look.seconds >= quarter_s and look.age_s > _WARMUP_S]
    if same and last.resident_mib > MAX_GROWTH * same[0].resident_mib:
        return [f"{process}: {last.resident_mib:.0f} MiB at the end, {same[0].resident_mib:.0f} when it was warm"]
    return []
