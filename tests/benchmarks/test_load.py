"""Loops, percentiles and the verdict on a queue, without any server."""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import pytest

from benchmarks.load import (
    Limits,
    Run,
    Sample,
    Work,
    arrivals,
    closed_loop,
    figures,
    growth,
    open_loop,
    percentile,
    percentiles,
    works,
)
from tests.support.waiting import wait_until_async

LIMITS = Limits(time_to_first_token=1.0, inter_token=0.2)


def sample(intended: float, times: list[float], error: str | None = None) -> Sample:
    return Sample(intended, times, 10, len(times), error, intended)


def queue_depths(utilisation: float, count: int, seed: int) -> list[int]:
    """The queue lengths that requests find on arrival at a server that takes one second for each."""
    free_at, ends, depths = 0.0, [], []
    for at in arrivals(utilisation, count, seed):
        depths.append(sum(end > at for end in ends))
        free_at = max(free_at, at) + 1.0
        ends.append(free_at)
    return depths


def test_percentiles_are_interpolated() -> None:
    values = [float(value) for value in range(101)]
    random.Random(0).shuffle(values)
    assert percentiles(values) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([7.0], 0.99) == 7
    assert percentiles([]) == {}


def test_the_same_seed_gives_the_same_requests_to_every_server() -> None:
    first, second = works(20, 64, 32, 0.5, seed=3), works(20, 64, 32, 0.5, seed=3)
    assert first == second
    assert first != works(20, 64, 32, 0.5, seed=4)
    assert all(32 <= len(item.prompt) <= 96 and 16 <= item.output_len <= 48 for item in first)
    assert len({tuple(item.prompt[:4]) for item in first}) == 20
    assert {(len(item.prompt), item.output_len) for item in works(5, 64, 32, 0.0, seed=0)} == {(64, 32)}


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4.0, 4000, seed=1)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times) == arrivals(4.0, 4000, seed=1)
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)  # of an exponential: as large as the mean


def test_time_waiting_to_be_sent_counts() -> None:
    """Coordinated omission: a client that is late must not make the server look faster."""

    async def send(_item: Work, intended: float) -> Sample:
        sent = time.perf_counter()
        time.sleep(0.05)  # timed: the whole client stands still, so later requests are sent late
        return Sample(intended, [sent + 0.05], 1, 1, None, sent)

    run = asyncio.run(open_loop(send, [Work([1], 1)] * 6, [0.0] * 6))
    first = sorted(item.time_to_first_token for item in run.samples)
    assert first[0] >= 0.05
    assert first[-1] >= 0.3  # it waited for the five before it
    assert run.samples[-1].sent - run.samples[-1].intended >= 0.25


def test_an_open_loop_does_not_wait_for_answers() -> None:
    num_sent = 0

    async def send(_item: Work, intended: float) -> Sample:
        nonlocal num_sent
        num_sent += 1
        sent = time.perf_counter()
        await wait_until_async(lambda: num_sent == 5)  # none is answered before all were sent
        return sample(intended, [sent])

    run = asyncio.run(asyncio.wait_for(open_loop(send, [Work([1], 1)] * 5, [0.0, 0.01, 0.02, 0.03, 0.04]), 20))
    assert run.depths == [0, 1, 2, 3, 4]


def test_a_closed_loop_has_as_many_in_flight_as_users() -> None:
    in_flight = most = 0

    async def send(_item: Work, intended: float) -> Sample:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0)
        in_flight -= 1
        return sample(intended, [time.perf_counter()])

    run = asyncio.run(closed_loop(send, [Work([1], 1)] * 20, users=3))
    assert len(run.samples) == 20
    assert most == 3
    assert run.depths == []


def test_of_a_closed_loop_the_time_counts_in_which_all_users_are_busy() -> None:
    # Two users: the first answer is complete at 2, and at 6 nothing is left to ask while one request goes on.
    samples = [
        sample(0.0, [1.0, 2.0]),
        sample(0.0, [1.0, 3.0]),
        sample(2.0, [2.5, 4.0, 6.0]),
        sample(3.0, [4.0, 5.0, 7.0, 9.0]),
    ]
    result = figures(Run(samples, 9.0, busy=(2.0, 6.0)), LIMITS)
    assert result["output_tokens_per_s"] == (1 + 1 + 2 + 2) / 4.0
    assert result["requests_per_s"] == 2 / 4.0
    assert result["ttft"]["p50"] == pytest.approx(0.75)
    assert (result["requests"], result["output_tokens"], result["seconds"], result["busy_seconds"]) == (4, 11, 9.0, 4.0)


def test_a_closed_loop_says_when_all_users_were_busy() -> None:
    lengths = {0: 0.05, 1: 0.1, 2: 0.1, 3: 0.6}

    async def send(item: Work, intended: float) -> Sample:
        await asyncio.sleep(lengths[item.output_len])  # timed: how long an answer takes
        return sample(intended, [time.perf_counter()])

    start = time.perf_counter()
    run = asyncio.run(closed_loop(send, [Work([1], i) for i in range(4)], users=2))
    assert run.busy is not None
    begin, end = run.busy
    assert 0.05 <= begin - start < end - start
    assert 0.15 <= end - start < run.seconds  # the third answer: the fourth request is under way until 0.7
    assert asyncio.run(closed_loop(send, [Work([1], 0)] * 2, users=2)).busy is None


def test_latencies_of_a_request() -> None:
    one = sample(10.0, [10.5, 10.6, 10.8])
    assert one.time_to_first_token == pytest.approx(0.5)
    assert one.time_per_output_token == pytest.approx(0.15)
    assert one.gaps == pytest.approx([0.1, 0.2])
    assert sample(0.0, [1.0]).time_per_output_token is None


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_that_grows_is_noticed(seed: int) -> None:
    reason = growth(queue_depths(2.0, 60, seed))
    assert reason is not None
    assert reason.startswith("the queue grew")


@pytest.mark.parametrize("seed", range(5))
def test_a_queue_that_only_varies_is_not_taken_for_growing(seed: int) -> None:
    assert growth(queue_depths(0.4, 60, seed)) is None


def test_too_few_arrivals_say_nothing() -> None:
    assert "too few" in (growth([0, 1, 2]) or "")
    assert growth([]) is None  # a closed loop has no queue of its own making


def test_no_mean_of_a_run_whose_queue_grew() -> None:
    samples = [sample(float(at), [at + 0.5, at + 0.6]) for at in range(30)]
    grown = figures(Run(samples, 40.0, list(range(30))), LIMITS)
    assert grown["ttft_mean"] is None
    assert grown["no_mean_because"].startswith("the queue grew: ")
    assert grown["ttft"]["p50"] == pytest.approx(0.5)
    steady = figures(Run(samples, 40.0, [1] * 30), LIMITS)
    assert steady["ttft_mean"] == pytest.approx(0.5)
    assert steady["no_mean_because"] is None


def test_goodput_counts_requests_within_the_limits() -> None:
    samples = [
        sample(0.0, [0.5, 0.6]),
        sample(0.0, [1.5, 1.6]),  # first token too late
        sample(0.0, [0.5, 0.9]),  # gap too long
        sample(0.0, [], "status 503"),
    ]
    result = figures(Run(samples, 2.0), LIMITS)
    assert result["goodput_per_s"] == 0.5
    assert result["goodput_share"] == 0.25
    assert (result["requests"], result["errors"]) == (4, 1)
    assert result["requests_per_s"] == 1.5
    assert result["output_tokens_per_s"] == 3.0
