"""The verdict on a soak test, from made-up samples."""

from __future__ import annotations

import asyncio
import dataclasses
import io

import httpx
import pytest
from PIL import Image

from benchmarks.soak_mix import Known, Mix, WrongAnswerError, grey_png
from benchmarks.soak_record import Look, Record, slope


def look(
    minute: float, mib: float, process: str = "server", pid: int = 1, age: float | None = None, **counts: int
) -> Look:
    values = {"num_files": 20, "num_threads": 9, "num_children": 1} | counts
    return Look(minute * 60, process, pid, minute * 60 + 5 if age is None else age * 60, mib, **values)


def record(server_rise: float = 0.0, engine_rise: float = 0.0) -> Record:
    soak = Record(seconds=15 * 60)
    for minute in range(1, 16):
        soak.looks.append(look(minute, 100 + server_rise * minute))
        life, since = (1, minute) if minute <= 7 else (2, minute - 7)
        soak.looks.append(look(minute, 300 + 40 * life + engine_rise * since, "engine", pid=10 + life, age=since))
    return soak


def test_flat_memory_is_well_even_if_a_new_engine_is_larger() -> None:
    soak = record()
    assert soak.verdict() == []
    assert soak.slope("engine") == pytest.approx(0)


@pytest.mark.parametrize(("server", "engine", "which"), [(0.7, 0.0, "server"), (0.0, 0.7, "engine")])
def test_memory_that_grows_is_named(server: float, engine: float, which: str) -> None:
    broken = record(server, engine).verdict()
    assert len(broken) == 1
    assert broken[0].startswith(f"{which}: memory grows by 0.70 MiB a minute")


def reloaded(step: float, rise: float = 0.0) -> Record:
    soak = record()
    soak.looks = [
        dataclasses.replace(each, num_reloads=1, resident_mib=each.resident_mib + step + rise * (each.seconds / 60 - 8))
        if each.process == "server" and each.seconds > 8 * 60
        else each
        for each in soak.looks
    ]
    return soak


def test_a_reload_may_raise_memory_by_less_than_a_tokenizer() -> None:
    assert reloaded(9).verdict() == []
    assert reloaded(14).verdict() == ["server: 14 MiB more after a reload; at most 12 are allowed"]


def test_growth_after_a_reload_is_found() -> None:
    assert any(line.startswith("server: memory grows by") for line in reloaded(2, rise=1.0).verdict())


def test_a_leap_is_found_without_a_slope() -> None:
    soak = record()
    soak.looks.append(look(15.1, 130))
    assert any(line.startswith("server: 130 MiB at the end") for line in soak.verdict())


def test_files_and_threads_may_vary_a_little_and_children_not_at_all() -> None:
    soak = record()
    soak.looks += [look(15.2, 100, num_files=22, num_threads=7)]
    assert soak.verdict() == []
    soak.looks += [look(15.3, 100, num_files=23), look(15.4, 100, num_children=2)]
    assert [line.split()[1] for line in soak.verdict()] == ["num_files", "num_children"]


def test_one_look_has_no_slope() -> None:
    assert slope([look(1, 100)]) is None
    assert any("too few looks" in line for line in Record(seconds=60).verdict())


def test_answers_are_counted_by_kind_and_outcome() -> None:
    soak = record()
    soak.answers.update([("short", "ok"), ("short", "ok"), ("n=4", "failed in a crash")])
    soak.broken.append("an answer without its end")
    summary = soak.summary()
    assert summary["requests"] == 3
    assert summary["answers"] == {"n=4": {"failed in a crash": 1}, "short": {"ok": 2}}
    assert summary["broken"] == ["an answer without its end"]


def test_a_slope_of_seconds_is_no_growth() -> None:
    """The shortest form has two looks five seconds apart."""
    soak = Record(seconds=120)
    for process in ("server", "engine"):
        soak.looks += [look(3.6, 117.8, process), look(3.7, 117.9, process)]
        assert soak.slope(process) == pytest.approx(1)
    assert soak.verdict() == []
    soak.looks.append(look(3.8, 120.1))
    assert [line.split()[:3] for line in soak.verdict()] == [["server:", "memory", "grows"]]


def test_an_hour_has_the_narrower_limit() -> None:
    soak = record(server_rise=0.3)
    assert soak.verdict() == []
    for at, sample in enumerate(soak.looks):
        soak.looks[at] = dataclasses.replace(sample, seconds=4 * sample.seconds, age_s=4 * sample.age_s)
    soak.seconds = 3600
    soak.looks = [dataclasses.replace(s, resident_mib=100 + s.seconds / 400) for s in soak.of("server")] + soak.of(
        "engine"
    )
    assert soak.verdict() == ["server: memory grows by 0.15 MiB a minute; at most 0.1 are allowed"]


def test_answers_that_become_slower_are_named() -> None:
    soak = record()
    soak.times = [(second, 1.0 if second < 600 else 1.4) for second in range(900)]
    assert soak.verdict() == []
    soak.times += [(800, 2.0)] * 10
    assert soak.verdict() == ["short chats: p99 went from 1.00 to 2.00 s; at most 1.5 times"]
    soak.times = soak.times[::10]
    assert soak.p99_s() == [None] * 3
    assert soak.verdict() == []


def test_another_answer_than_before_is_wrong() -> None:
    known = Known()
    known.check("a", [1.0])
    known.check("a", [1.0])
    with pytest.raises(WrongAnswerError, match=r"a: \[2.0\] instead of \[1.0\]"):
        known.check("a", [2.0])


@pytest.mark.parametrize("status", [200, 404])
def test_a_stream_without_a_line(status: int) -> None:
    """A request that a crash ended before its cancellation; one that was cancelled says so."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status if request.url.path.endswith("/cancel") else 200)

    async def cancel() -> None:
        async with httpx.AsyncClient(base_url="http://soak", transport=httpx.MockTransport(answer)) as client:
            await Mix(client, 0, Known())._cancelled()

    if status == 404:
        asyncio.run(cancel())
    else:
        with pytest.raises(WrongAnswerError, match="a cancelled request went on"):
            asyncio.run(cancel())


def test_pictures_are_png_files() -> None:
    picture = Image.open(io.BytesIO(grey_png(32, 64)))
    assert (picture.size, picture.getpixel((31, 31))) == ((32, 32), 64)
