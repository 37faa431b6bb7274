"""The workloads: their requests, and the figures from the answers. No engine runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.measures import MEASURES, WORKLOADS, prompts, tokens, wanted_workloads


class Scripted:
    """Answers as an engine would that takes two seconds for a prompt and four for all steps."""

    age_s = 7.0

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, command: str, **values: Any) -> dict[str, Any]:
        self.asked.append((command, values))
        if command == "shared_prefix":
            return {"result": [3.0, 0.1]}
        if command == "host_time":
            return {"result": 0.00025}
        if command == "memory":
            return {"peak_bytes": 250_000_000}
        return {"first_s": 2.0, "steps_s": 4.0}


def figures(measure: str) -> tuple[dict[str, float], list[tuple[str, dict[str, Any]]]]:
    engine = Scripted()
    (workload,) = wanted_workloads({measure})
    return workload.run(engine, {measure}), engine.asked


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        ("decode", 64 / 4),
        ("prefill-512", 512 / 2),
        ("prefill-4096", 4096 / 2),
        ("decode-4096", 32 / 4),
        ("many-16", 16 * 160 / 6),
        ("many-32", 32 * 160 / 6),
        ("prefix", 30.0),
        ("host-1", 0.25),
        ("host-32", 0.25),
        ("start", 7.0),
        ("memory", 250.0),
    ],
)
def test_a_figure_is_what_its_title_says(measure: str, value: float) -> None:
    assert figures(measure)[0][measure] == pytest.approx(value)


def test_every_measure_has_one_workload() -> None:
    given = [name for workload in WORKLOADS for name in workload.measures]
    assert sorted(given) == sorted(MEASURES)


def test_a_long_prompt_runs_once_for_both_of_its_measures_and_steps_only_if_they_are_wanted() -> None:
    (workload,) = wanted_workloads({"prefill-4096", "decode-4096"})
    assert set(workload.run(Scripted(), {"prefill-4096", "decode-4096"})) == {"prefill-4096", "decode-4096"}
    _, [(_, asked)] = figures("prefill-4096")
    assert (len(asked["prompt"]), asked["count"]) == (4096, 0)


def test_sequences_generate_what_is_counted() -> None:
    _, [(command, asked)] = figures("many-16")
    assert command == "many"
    assert [len(prompt) for prompt in asked["prompts"]] == [128] * 16
    assert asked["count"] == 31  # the first of the 32 comes with the prompt


def test_prompts_are_the_same_each_time_and_share_no_beginning() -> None:
    assert tokens(16) == tokens(16)
    assert prompts(32, 128) == prompts(32, 128)
    assert len({prompt[0] for prompt in prompts(32, 128)}) == 32


def test_the_second_prompt_shares_only_what_it_says() -> None:
    _, [(_, asked)] = figures("prefix")
    same = [a == b for a, b in zip(asked["first"], asked["second"], strict=True)]
    assert all(same[:1000])
    assert not same[1000]


def test_memory_comes_from_the_process_that_has_just_started() -> None:
    (workload,) = wanted_workloads({"start"})
    assert workload.is_fresh
    assert [command for command, _ in figures("start")[1]] == ["decode"]
    assert [command for command, _ in figures("memory")[1]] == ["decode", "decode", "decode", "memory"]


def test_contexts_hold_what_is_asked() -> None:
    for workload in WORKLOADS:
        engine = Scripted()
        workload.run(engine, set(workload.measures))
        for _, asked in engine.asked:
            lengths = [
                len(prompt) for prompt in (asked.get("prompt"), asked.get("first"), *asked.get("prompts", ())) if prompt
            ]
            if lengths:
                assert max(lengths) + asked.get("count", 0) + 1 <= workload.context
            assert len(asked.get("prompts", [None])) <= workload.sequences
