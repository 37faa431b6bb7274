"""The runner of lines: how many at once, in which order, and what it does without room."""

from __future__ import annotations

import asyncio
import io
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from octavo.batches.journal import Journal
from octavo.batches.lines import BatchLine, LineError, LineResult, read_lines
from octavo.batches.runner import BatchRunner, Call, LineAnswer, line_answer, next_window

OK = LineAnswer(200, b"{}", "req")


def line(number: int, prompt: str = "x") -> BatchLine:
    return BatchLine(number, f"id-{number}", "/v1/completions", {"prompt": prompt})


def run(call: Call, lines: Iterable[BatchLine | LineError], width: int = 4, **options: Any) -> list[LineResult]:
    found: list[LineResult] = []
    asyncio.run(BatchRunner(call, lambda: width, found.append, **options).run(lines))
    return found


def test_as_many_at_once_as_there_is_room_for() -> None:
    running, most = 0, 0

    async def call(_: BatchLine) -> LineAnswer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return OK

    results = run(call, [line(number) for number in range(20)])
    assert sorted(result.number for result in results) == list(range(20))
    assert most == 4


def test_an_indented_answer_is_one_line_of_the_output() -> None:
    answer = line_answer(200, {"x-request-id": "r"}, b'{\r\n  "text": "a\\nb"\n}\n')
    assert json.loads(answer.body) == {"text": "a\nb"}
    assert LineResult(1, "a", answer.status, answer.request_id, answer.body).record().splitlines()[1:] == []
    assert json.loads(line_answer(502, {}, b"<html>\n</html>").body) == "<html>\n</html>"


def test_lines_with_the_same_beginning_come_together() -> None:
    prompts = ["b 1", "a 1", "b 2", "a 2"]
    window = next_window(map(line, range(4), prompts))
    assert [each.body["prompt"] for each in window if isinstance(each, BatchLine)] == ["a 1", "a 2", "b 1", "b 2"]


def test_a_line_without_room_tries_again_and_an_engine_that_ends_only_a_few_times() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    answers = iter([LineAnswer(503, b"{}", retry_after_s=7.0), LineAnswer(429, b"{}"), OK])

    async def busy(_: BatchLine) -> LineAnswer:
        return next(answers)

    assert [result.status for result in run(busy, [line(1)], sleep=sleep)] == [200]
    assert slept == [7.0, 14.0]
    calls = 0

    async def dying(_: BatchLine) -> LineAnswer:
        nonlocal calls
        calls += 1
        return LineAnswer(500, b"{}", is_fault=True)

    assert [result.status for result in run(dying, [line(1)], sleep=sleep)] == [500]
    assert calls == 4


def test_a_server_that_is_gone_for_long_gives_an_error() -> None:

    async def call(_: BatchLine) -> LineAnswer:
        raise ConnectionError("refused")

    (result,) = run(call, [line(1)], patience_s=-1.0)
    assert (result.code, result.message, result.is_failed) == ("server_unreachable", "refused", True)


def test_a_wrong_line_is_a_result_and_a_fault_of_ours_is_raised() -> None:
    async def call(_: BatchLine) -> LineAnswer:
        raise ZeroDivisionError

    (result,) = run(call, [LineError(2, "b", "invalid_request", "is wrong")])
    assert (result.number, result.message) == (2, "line 2: is wrong")
    with pytest.raises(ZeroDivisionError):
        run(call, [line(1)])


def test_ten_thousand_lines_take_little_memory(tmp_path: Path) -> None:
    data = io.BytesIO(b"".join(b'{"prompt": "%d %s"}\n' % (number, b"x" * 100) for number in range(10_000)))

    async def call(_: BatchLine) -> LineAnswer:
        return LineAnswer(200, json.dumps({"text": "y" * 400}).encode(), "req")

    async def work() -> None:
        with Journal(tmp_path / "out", None) as journal:
            await BatchRunner(call, lambda: 64, journal.put).run(read_lines(data))
            assert journal.num_completed == 10_000

    tracemalloc.start()
    try:
        asyncio.run(work())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
