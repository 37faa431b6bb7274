"""The peak rates of this machine: reads, multiply-adds, barriers and wake-ups, by our own threads and instructions.

    python benchmarks/ceilings.py [--threads 2] [--isa avx2] [--json FILE]

`octavo bench --profile` compares each operation with these figures, and `compare.py` the speed of decoding. The best of
many short rounds counts, because other programs can only slow a round down. The table names instructions that the
machine lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from report import commit, machine, table

from octavo.backends.cpu import _native
from octavo.backends.cpu.ceilings import (
    CACHE_BYTES,
    ROUNDS,
    Loop,
    arithmetic_figures,
    best_rate,
    bf16_figure,
    has_level,
    memory_figures,
)
from octavo.backends.cpu.instruction_set import choose_isa
from octavo.backends.cpu.threads import plan_threads
from octavo.backends.profiling import Ceiling, Ceilings

COLUMNS = {"what": "what", "instruction set": "isa", "threads": "threads", "at most": "value"}
SCALES = {"B/s": (1e-9, "GB/s"), "1/s": (1e-9, "G/s"), "s": (1e6, "microseconds")}
_ASLEEP_S = 0.005  # longer than any worker spins between steps


def measure_ceilings(isa: str, threads: int) -> Ceilings:
    """Measure all figures for one thread and for `threads`; takes about 3 seconds.

    isa: instruction set of the kernels. Integer and float rates are measured for every instruction set of the machine.
    """
    levels = _native.known_isas()
    counts = sorted({1, threads})
    figures = [figure for count in counts for figure in memory_figures(isa, count)]
    figures += [figure for count in counts for figure in _tile_figures(count)]
    figures += [figure for count in counts for level in levels for figure in arithmetic_figures(level, count)]
    if threads > 1:
        figures += [
            Ceiling("barrier", "", threads, 1 / best_rate("ceiling_barrier", isa, threads), "s"),
            Ceiling("wake-up of a sleeping worker", "", threads, _wake_up(isa, threads), "s"),
        ]
    return Ceilings(isa, threads, tuple(figures))


def _tile_figures(threads: int) -> Iterator[Ceiling]:
    is_here = has_level("amx")
    for name, size in CACHE_BYTES.items():
        memory = np.ones((threads, size // 4), np.float32)
        rate = best_rate("ceiling_tile_read", "amx", threads, memory) if is_here else None
        yield Ceiling(f"read from {name} into tiles", "amx", threads, rate, "B/s")
    yield bf16_figure(threads)


def _wake_up(isa: str, threads: int) -> float:
    """Return how many seconds longer an empty run takes after a pause, when the workers sleep, than right after a
    run.
    """
    loop = Loop("ceiling_barrier", isa, threads)
    awake, asleep = [], []
    for _ in range(ROUNDS):
        time.sleep(_ASLEEP_S)
        asleep.append(loop(0, [])[1])
        awake.append(min(loop(0, [])[1] for _ in range(5)))
    return max(statistics.median(asleep) - statistics.median(awake), 0.0)


def shown(figure: Ceiling) -> dict[str, Any]:
    """Return a line of the table."""
    factor, unit = SCALES[figure.unit]
    value = "not on this machine" if figure.value is None else f"{figure.value * factor:.3g} {unit}"
    return {"what": figure.name, "isa": figure.isa, "threads": figure.threads, "value": value}


def as_json(ceilings: Ceilings) -> dict[str, Any]:
    """Return the figures in SI units, with the machine and the commit."""
    return {"commit": commit(), "machine": machine(), **dataclasses.asdict(ceilings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="default: the engine's own number")
    parser.add_argument("--isa", default=None, help="instruction set; default: the widest of the machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    ceilings = measure_ceilings(choose_isa(options.isa), plan_threads(options.threads).count)
    report = as_json(ceilings)
    print(json.dumps({"commit": report["commit"], "machine": report["machine"], "isa": ceilings.isa}))
    print(table(COLUMNS, [shown(figure) for figure in ceilings.figures]))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
