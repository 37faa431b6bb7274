"""Load patterns and the statistics of a run: closed and open loops, percentiles, goodput, growth of the queue.

This module is independent of HTTP: a loop gets a function that sends one request and records the times of its tokens.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# The queue grew if its depth rose from third to third of the arrivals, at last by more than both of these.
_GROWTH_REQUESTS = 2.0
_GROWTH_SHARE = 0.25
_MIN_ARRIVALS = 12


@dataclass(frozen=True, slots=True)
class Work:
    """One request: token ids of its prompt, and the length of its answer."""

    prompt: list[int]
    output_len: int


@dataclass(slots=True)
class Sample:
    """The outcome of one request. Times are seconds of one clock.

    intended: the time at which the request should have been sent. In an open loop that is the schedule's time, however
    late the client was: time spent waiting to be sent is time that the user waited (coordinated omission).
    """

    intended: float
    times: list[float] = field(default_factory=list)  # when each event with text came
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str | None = None
    sent: float = 0.0

    @property
    def time_to_first_token(self) -> float:
        return self.times[0] - self.intended

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds from the first to the last token, divided by the number of tokens after the first; None for a single
        token.
        """
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    def num_tokens_within(self, begin: float, end: float) -> float:
        """Return the tokens that arrived in [begin, end), assuming equally many in every event."""
        within = sum(begin <= at < end for at in self.times)
        return self.num_tokens * within / len(self.times) if self.times else 0.0

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies as seen by the reader of the stream."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits, in seconds, that a request must meet to count in the goodput."""

    time_to_first_token: float
    inter_token: float

    def kept(self, sample: Sample) -> bool:
        """Return True if the first token was in time, and 99 % of the gaps between tokens were short enough."""
        if sample.error is not None or sample.time_to_first_token > self.time_to_first_token:
            return False
        return not sample.gaps or percentile(sample.gaps, 0.99) <= self.inter_token


@dataclass(frozen=True, slots=True)
class Run:
    """All samples of one run.

    depths: number of requests in flight at each arrival, in order (open loop only). busy: from the first complete
    answer to the time at which a user has no request left (closed loop only). Within it, the number of requests in
    flight is the number of users; before it all prompts arrive at once, and after it the load fades.
    """

    samples: list[Sample]
    seconds: float
    depths: list[int] = field(default_factory=list)
    busy: tuple[float, float] | None = None


Send = Callable[[Work, float], Awaitable[Sample]]


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of at least one value, interpolated between neighbours."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median, 90th and 99th percentile; empty if there are no values."""
    if not values:
        return {}
    return {"p50": percentile(values, 0.5), "p90": percentile(values, 0.9), "p99": percentile(values, 0.99)}


def works(count: int, input_len: int, output_len: int, vary: float, seed: int) -> list[Work]:
    """Random requests, the same for the same seed. vary: lengths are uniform within this share around the given ones.

    Ids between 1000 and 30000 are ordinary tokens of every measured vocabulary; no two prompts have the same beginning.
    """
    rng = random.Random(seed)

    def around(length: int) -> int:
        return max(1, round(length * rng.uniform(1 - vary, 1 + vary)))

    return [
        Work([rng.randrange(1000, 30000) for _ in range(around(input_len))], around(output_len)) for _ in range(count)
    ]


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return the send times, in seconds from the start, of a Poisson process of `rate` requests per second."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


async def closed_loop(send: Send, items: Sequence[Work], users: int) -> Run:
    """Run `users` at the same time; each sends its next request when the last one has been answered."""
    left = iter(items)
    answered: list[float] = []
    dry: list[float] = []

    async def user() -> list[Sample]:
        samples = []
        for item in left:
            samples.append(await send(item, time.perf_counter()))
            answered.append(time.perf_counter())
        dry.append(time.perf_counter())
        return samples

    start = time.perf_counter()
    samples = [sample for own in await asyncio.gather(*(user() for _ in range(users))) for sample in own]
    busy = (answered[0], dry[0]) if len(items) > users else None
    return Run(samples, time.perf_counter() - start, busy=busy)


async def open_loop(send: Send, items: Sequence[Work], schedule: Sequence[float]) -> Run:
    """Send each request at its time, regardless of earlier ones. Returns when all have been answered."""
    start = time.perf_counter()
    in_flight = 0
    depths = []

    async def one(item: Work, intended: float) -> Sample:
        nonlocal in_flight
        in_flight += 1
        try:
            return await send(item, intended)
        finally:
            in_flight -= 1

    tasks = []
    for item, at in zip(items, schedule, strict=True):
        delay = start + at - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        depths.append(in_flight)
        tasks.append(asyncio.create_task(one(item, start + at)))
        await asyncio.sleep(0)  # it is sent before the next one, even if both are late
    samples = await asyncio.gather(*tasks)
    return Run(list(samples), time.perf_counter() - start, depths)


def growth(depths: Sequence[int]) -> str | None:
    """Return evidence that the queue grew without bound, or None if it did not.

    A mean over such a run measures the length of the run, not the speed of the server.
    """
    if len(depths) < _MIN_ARRIVALS:
        return f"only {len(depths)} arrivals: too few to see whether the queue grew" if depths else None
    third = len(depths) // 3
    first, middle, last = (statistics.mean(part) for part in (depths[:third], depths[third:-third], depths[-third:]))
    if first < middle < last and last - middle > max(_GROWTH_REQUESTS, _GROWTH_SHARE * middle):
        return f"the queue grew: {first:.1f}, {middle:.1f}, {last:.1f} requests in flight in the thirds of the run"
    return None


def figures(run: Run, limits: Limits) -> dict[str, Any]:
    """The figures of a run: seconds, tokens per second, requests per second. Means only where they are meaningful.

    In a closed loop only the time in which all users are busy counts: tokens that arrive and requests sent within it.
    """
    begin, end = run.busy or (-math.inf, math.inf)
    seconds = end - begin if run.busy else run.seconds
    good = [sample for sample in run.samples if sample.error is None]
    sent = [sample for sample in run.samples if begin <= sample.intended < end]
    timed = [sample for sample in sent if sample.error is None]
    first = [sample.time_to_first_token for sample in timed]
    grown = growth(run.depths)
    kept = sum(map(limits.kept, sent))
    return {
        "requests": len(run.samples),
        "errors": len(run.samples) - len(good),
        "seconds": run.seconds,
        "busy_seconds": seconds,
        "prompt_tokens": sum(sample.num_prompt_tokens for sample in good),
        "output_tokens": sum(sample.num_tokens for sample in good),
        "output_tokens_per_s": sum(sample.num_tokens_within(begin, end) for sample in good) / seconds,
        "requests_per_s": sum(begin <= sample.times[-1] < end for sample in good) / seconds,
        "goodput_per_s": kept / seconds,
        "goodput_share": kept / len(sent) if sent else None,
        "ttft": percentiles(first),
        "tpot": percentiles([value for sample in timed if (value := sample.time_per_output_token) is not None]),
        "itl": percentiles([gap for sample in timed for gap in sample.gaps]),
        "ttft_mean": statistics.mean(first) if first and grown is None else None,
        "no_mean_because": grown,
        "send_delay": percentiles([sample.sent - sample.intended for sample in timed]),
    }
