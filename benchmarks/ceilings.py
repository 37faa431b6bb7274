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
from pathlib import Path
from typing import Any

from report import commit, machine, table

from octavo.backends.cpu.ceilings import measure_ceilings
from octavo.backends.cpu.compile import choose_isa
from octavo.backends.cpu.threads import plan_threads
from octavo.backends.profiling import Ceiling, Ceilings

COLUMNS = {"what": "what", "instruction set": "isa", "threads": "threads", "at most": "value"}
SCALES = {"B/s": (1e-9, "GB/s"), "1/s": (1e-9, "G/s"), "s": (1e6, "microseconds")}


def shown(figure: Ceiling) -> dict[str, Any]:
    """A line of the table."""
    factor, unit = SCALES[figure.unit]
    value = "not on this machine" if figure.value is None else f"{figure.value * factor:.3g} {unit}"
    return {"what": figure.name, "isa": figure.isa, "threads": figure.threads, "value": value}


def as_json(ceilings: Ceilings) -> dict[str, Any]:
    """The figures in SI units, with the machine and the commit."""
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
