"""Shapes of load, and what is said of a run: closed and open loops, percentiles, goodput, whether the queue grew.

Nothing here knows of HTTP: a loop gets a function that sends one request and says when its tokens came.
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
    """What became of one request. Times are seconds of one clock.

    intended: when the request should have been sent. In an open loop that is the schedule's time, however late the
    client was: time that a request spent waiting to be sent is time that its user waited (coordinated omission).
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
        """Between first and last token, divided by the tokens after the first. None of an answer of one token."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    def num_tokens_within(self, begin: float, end: float) -> float:
        """Tokens that came in [begin, end), all events taken for equally long."""
        within = sum(begin <= at < end for at in self.times)
        return self.num_tokens * within / len(self.times) if self.times else 0.0

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies, as a reader of the stream sees them."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to be counted in the goodput, in seconds."""

    time_to_first_token: float
    inter_token: float

    def kept(self, sample: Sample) -> bool:
        """First token in time, and 99 % of the gaps between tokens short enough."""
        if sample.error is not None or sample.time_to_first_token > self.time_to_first_token:
            return False
        return not sample.gaps or percentile(sample.gaps, 0.99) <= self.inter_token


@dataclass(frozen=True, slots=True)
class Run:
    """All samples of one run.

    depths: requests in flight that each arrival found, in order (open loop only). busy: from the first answer that is
    complete to the moment at which a user finds nothing left to ask (closed loop only); in between there are always as
    many requests in flight as users, before it all prompts come at once, and after it the load fades.
    """

    samples: list[Sample]
    seconds: float
    depths: list[int] = field(default_factory=list)
    busy: tuple[float, float] | None = None


Send = Callable[[Work, float], Awaitable[Sample]]


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolated between neighbours. Of at least one value."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile; empty if there is no value."""
    if not values:
        return {}
    return {"p50": percentile(values, 0.5), "p90": percentile(values, 0.9), "p99": percentile(values, 0.99)}


def works(count: int, input_len: int, output_len: int, vary: float, seed: int) -> list[Work]:
    """Random requests, the same for the same seed. vary: lengths are uniform within this share around the given ones.

    Ids between 1000 and 30000 are ordinary tokens of every vocabulary that is measured; no two prompts begin alike.
    """
    rng = random.Random(seed)

    def around(length: int) -> int:
        return max(1, round(length * rng.uniform(1 - vary, 1 + vary)))

    return [
        Work([rng.randrange(1000, 30000) for _ in range(around(input_len))], around(output_len)) for _ in range(count)
    ]


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which the requests of a Poisson process of `rate` a second are sent, in order."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


async def closed_loop(send: Send, items: Sequence[Work], users: int) -> Run:
    """`users` at once, each of whom sends the next request when the last one is answered."""
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
    """Each request at its time, whatever became of those before. Ends when all are answered."""
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
    """Why the queue must be taken to have grown without bound; None if it did not.

    A mean over such a run says how long the run was, not how fast the server is.
    """
    if len(depths) < _MIN_ARRIVALS:
        return f"only {len(depths)} arrivals: too few to see whether the queue grew" if depths else None
    third = len(depths) // 3
    first, middle, last = (statistics.mean(part) for part in (depths[:third], depths[third:-third], depths[-third:]))
    if first < middle < last and last - middle > max(_GROWTH_REQUESTS, _GROWTH_SHARE * middle):
        return f"the queue grew: {first:.1f}, {middle:.1f}, {last:.1f} requests in flight in the thirds of the run"
    return None


def figures(run: Run, limits: Limits) -> dict[str, Any]:
    """The run in figures: seconds, tokens per second, requests per second. Means only where they mean something.

    Of a closed loop the time in which all users were busy counts: tokens that came then, requests sent then.
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
