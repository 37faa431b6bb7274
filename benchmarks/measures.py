"""The figures of `compare.py`: each one's meaning and unit, and the workload that gives it.

Every engine runs the same workloads with the same token ids, greedily and past any end of text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

PROMPT, STEPS = 16, 64
SHORT_PREFILL, LONG_PREFILL, LONG_STEPS = 512, 4096, 32
MANY_PROMPT, MANY_STEPS = 128, 32
SHARED, OWN = 1000, 16
HOST_STEPS = 64
MEMORY_CONTEXT = 1024
WARM_PROMPT, WARM_STEPS = 16, 4


@dataclass(frozen=True)
class Measure:
    """One figure, in `unit`.

    better: the direction in which it improves.
    """

    title: str
    unit: str
    better: Literal["more", "less"] = "more"
    digits: int = 1


MEASURES = {
    "decode": Measure(f"decode, {PROMPT} in / {STEPS} out", "tokens/s"),
    "decode-4096": Measure(f"decode at a context of {LONG_PREFILL:,}", "tokens/s"),
    "prefill-512": Measure(f"prefill of {SHORT_PREFILL}", "tokens/s", digits=0),
    "prefill-4096": Measure(f"prefill of {LONG_PREFILL:,}", "tokens/s", digits=0),
    "many-16": Measure(f"16 sequences, {MANY_PROMPT} in / {MANY_STEPS} out, all tokens", "tokens/s", digits=0),
    "many-32": Measure(f"32 sequences, {MANY_PROMPT} in / {MANY_STEPS} out, all tokens", "tokens/s", digits=0),
    "prefix": Measure(f"prefix cache: first token {SHARED:,} shared tokens later, times sooner", "x"),
    "start": Measure("process start to first token", "s", "less", 2),
    "host-1": Measure("host time per decode step, 1 sequence", "ms", "less", 3),
    "host-32": Measure("host time per decode step, 32 sequences", "ms", "less", 3),
    "memory": Measure("largest resident set, mapped pages included", "MB", "less", 0),
}


class Asked(Protocol):
    """A loaded engine, like `protocol.Peer`."""

    @property
    def age_s(self) -> float: ...

    def ask(self, command: str, **values: object) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Workload:
    """A workload, and the figures that it produces."""

    measures: tuple[str, ...]
    run: Callable[[Asked, Collection[str]], dict[str, float]]
    """Takes an engine and the wanted measures; returns their figures."""
    context: int
    """Tokens that one sequence needs."""
    sequences: int = 1
    warm_up: Callable[[Asked], object] | None = None
    """A short run that does what would otherwise slow down the first run."""
    is_fresh: bool = False
    """Needs a process that has only loaded the model."""
    only: str | None = None
    """The only engine that is measured."""


def tokens(count: int, seed: int = 0) -> list[int]:
    """Return token ids that every vocabulary has; the speed does not depend on their values."""
    numbers = random.Random(seed)
    return [numbers.randrange(1000, 30000) for _ in range(count)]


def prompts(count: int, length: int) -> list[list[int]]:
    """Return different prompts, so that no engine can share work between them."""
    return [tokens(length, seed) for seed in range(1, count + 1)]


def _decode(engine: Asked, _wanted: Collection[str]) -> dict[str, float]:
    return {"decode": STEPS / engine.ask("decode", prompt=tokens(PROMPT), count=STEPS)["steps_s"]}


def _prefill(engine: Asked, _wanted: Collection[str]) -> dict[str, float]:
    return {"prefill-512": SHORT_PREFILL / engine.ask("decode", prompt=tokens(SHORT_PREFILL), count=0)["first_s"]}


def _long(engine: Asked, wanted: Collection[str]) -> dict[str, float]:
    """Measure a long prompt, which also serves as context for the other measure."""
    count = LONG_STEPS if "decode-4096" in wanted else 0
    answer = engine.ask("decode", prompt=tokens(LONG_PREFILL), count=count)
    figures = {"prefill-4096": LONG_PREFILL / answer["first_s"]}
    if count:
        figures["decode-4096"] = count / answer["steps_s"]
    return figures


def _many(sequences: int) -> Workload:
    name = f"many-{sequences}"

    def run(engine: Asked, _wanted: Collection[str]) -> dict[str, float]:
        # The first token of each comes with its prompt, so `count` further ones make MANY_STEPS.
        answer = engine.ask("many", prompts=prompts(sequences, MANY_PROMPT), count=MANY_STEPS - 1)
        return {name: sequences * (MANY_PROMPT + MANY_STEPS) / (answer["first_s"] + answer["steps_s"])}

    def warm_up(engine: Asked) -> object:
        return engine.ask("many", prompts=prompts(sequences, WARM_PROMPT), count=WARM_STEPS)

    return Workload((name,), run, MANY_PROMPT + MANY_STEPS, sequences, warm_up)


def _prefix(engine: Asked, _wanted: Collection[str]) -> dict[str, float]:
    shared = tokens(SHARED)
    first, second = engine.ask(
        "shared_prefix", first=shared + tokens(OWN, seed=1), second=shared + tokens(OWN, seed=2)
    )["result"]
    return {"prefix": first / second}


def _host(sequences: int) -> Workload:
    name = f"host-{sequences}"

    def run(engine: Asked, _wanted: Collection[str]) -> dict[str, float]:
        seconds = engine.ask("host_time", prompts=prompts(sequences, PROMPT), count=HOST_STEPS)["result"]
        return {name: seconds * 1e3}

    return Workload((name,), run, PROMPT + HOST_STEPS + 2, sequences, only="octavo")


def _start(engine: Asked, wanted: Collection[str]) -> dict[str, float]:
    """Measure the start of a process, which then also gives its peak memory."""
    engine.ask("decode", prompt=tokens(PROMPT), count=0)
    figures = {"start": engine.age_s}
    if "memory" in wanted:
        engine.ask("decode", prompt=tokens(SHORT_PREFILL), count=0)
        engine.ask("decode", prompt=tokens(PROMPT), count=STEPS)
        figures["memory"] = engine.ask("memory")["peak_bytes"] / 1e6
    return figures


def _warm_decode(engine: Asked) -> object:
    return engine.ask("decode", prompt=tokens(PROMPT), count=WARM_STEPS)


def _warm_prefill(engine: Asked) -> object:
    return engine.ask("decode", prompt=tokens(SHORT_PREFILL), count=0)


WORKLOADS = (
    Workload(("decode",), _decode, PROMPT + STEPS + 1, warm_up=_warm_decode),
    Workload(("prefill-512",), _prefill, SHORT_PREFILL + 1, warm_up=_warm_prefill),
    Workload(("prefill-4096", "decode-4096"), _long, LONG_PREFILL + LONG_STEPS + 1),
    _many(16),
    _many(32),
    Workload(("prefix",), _prefix, SHARED + OWN + 1, only="octavo"),
    _host(1),
    _host(32),
    Workload(("start", "memory"), _start, MEMORY_CONTEXT, is_fresh=True),
)


def wanted_workloads(measures: Collection[str]) -> list[Workload]:
    """Return the workloads that produce any of the measures, in the order in which they run."""
    return [workload for workload in WORKLOADS if any(name in measures for name in workload.measures)]
