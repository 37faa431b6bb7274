"""Speed, memory and start-up of Octavo beside other engines: same GGUF file, same machine, same minutes.

    python benchmarks/compare.py MODEL.gguf --octavo PYTHON --peer llama.cpp=PYTHON

Runs in a Python with octavo itself, for the ceilings.

Every engine runs in a process of its own and they take turns (A B A B ...), because absolute figures on a
shared machine drift; ratios are medians of the ratios of neighbouring turns. Defined as:

- decode: tokens per second of 64 single-token steps after a prompt of 16 tokens (greedy, end of text ignored);
- prefill: tokens per second of one prompt of 512 tokens from an empty cache, until its last logits are there;
- start: seconds from the start of a process to its first greedy token after a prompt of 16 tokens (file in page cache);
- peak: largest resident set of that process after all of the above, mapped pages of the file included. Allowed
  are 1.15 times the file, the cache of a context of 1,024 tokens, and 200 MB.

The ceiling of decode is read bandwidth (measured in the same turns by `octavo.bench.ceilings`, all threads) divided by
the bytes of weights that one token needs. All other ceilings are measured once, at the start.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from protocol import Peer, PeerError
from report import commit, machine, spread, table

from octavo.backends.cpu.compile import choose_isa
from octavo.bench.ceilings import ReadBandwidth, measure_ceilings

PROMPT, STEPS, PREFILL = 16, 64, 512
CONTEXT = 1024
PAUSE_SECONDS = 0.3  # the spinning threads of the engine whose turn is over go to sleep


@dataclass
class Figures:
    """What was measured of one engine with one model, one entry a turn."""

    version: str = ""
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    cache_bytes: int = 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--octavo", default=sys.executable, metavar="PYTHON", help="a Python with octavo; - for none")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="such as llama.cpp=PYTHON")
    parser.add_argument("--runs", type=int, default=5, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--realtime", action="store_true", help="turns ahead of all other work (needs root)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser.parse_args()


def tokens(count: int) -> list[int]:
    """Token ids that every vocabulary has; speed does not depend on which they are."""
    return np.random.default_rng(0).integers(1000, 30000, count).tolist()


def first_token(name: str, python: str, model: Path, threads: int, log: Path) -> float:
    """Seconds from starting a process to its first token."""
    start = time.perf_counter()
    peer = Peer(name, python, log)
    try:
        peer.ask("load", model=str(model), threads=threads, context=CONTEXT)
        peer.ask("decode", prompt=tokens(PROMPT), count=0)
        return time.perf_counter() - start
    finally:
        peer.close()


def put_ahead(process: int) -> None:
    """Schedules all threads of a process before those of ordinary processes: a busy machine disturbs them less."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(5))


def turn(peer: Peer, figures: Figures) -> None:
    """One measurement of a loaded engine."""
    time.sleep(PAUSE_SECONDS)
    figures.prefill.append(PREFILL / peer.ask("prefill", tokens=tokens(PREFILL))["seconds"])
    figures.decode.append(STEPS / peer.ask("decode", prompt=tokens(PROMPT), count=STEPS)["seconds"])


def started(name: str, python: str, model: Path, threads: int, log: Path) -> tuple[Peer, Figures]:
    """A loaded and warm engine, and how long it takes to start (three times, after one to fill the page cache)."""
    first_token(name, python, model, threads, log)
    figures = Figures(start=[first_token(name, python, model, threads, log) for _ in range(3)])
    peer = Peer(name, python, log)
    figures.version = peer.ask("load", model=str(model), threads=threads, context=CONTEXT)["version"]
    turn(peer, Figures())
    return peer, figures


def start_all(pythons: dict[str, str], model: Path, threads: int) -> list[tuple[Peer, Figures]]:
    """Every engine that works; one line for each that does not."""
    log = Path(tempfile.gettempdir()) / "octavo-compare.log"
    running = []
    for name, python in pythons.items():
        try:
            running.append(started(name, python, model, threads, log))
        except (PeerError, OSError) as error:  # noqa: PERF203
            print(f"{model.name}: {name} skipped: {error}", file=sys.stderr)
    return running


def compare(
    model: Path, pythons: dict[str, str], options: argparse.Namespace
) -> tuple[dict[str, Figures], dict[str, float]]:
    """The figures of every engine that works, and the spread of the read bandwidth."""
    bandwidth = ReadBandwidth(options.threads)
    passes = []
    running = start_all(pythons, model, options.threads)
    try:
        if options.realtime:
            for process in (os.getpid(), *(peer.process_id for peer, _ in running)):
                put_ahead(process)
        for _ in range(options.runs):
            time.sleep(PAUSE_SECONDS)
            passes.append(bandwidth.measure())
            for peer, figures in running:
                turn(peer, figures)
        for peer, figures in running:
            memory = peer.ask("memory", tokens=CONTEXT)
            figures.peak_bytes, figures.cache_bytes = memory["peak_bytes"], memory["cache_bytes"]
    finally:
        if options.realtime:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        for peer, _ in running:
            peer.close()
    return {peer.name: figures for peer, figures in running}, spread(passes)


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """How many times faster, turn by turn."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def rows(model: Path, results: dict[str, Figures], bandwidth: dict[str, float]) -> list[dict[str, Any]]:
    """One line of the report for each engine."""
    size = model.stat().st_size
    ours = results.get("octavo")
    lines = []
    for name, figures in results.items():
        line = {
            "model": model.name,
            "engine": name,
            "version": figures.version,
            "decode": spread(figures.decode),
            "prefill": spread(figures.prefill),
            "start": spread(figures.start),
            "peak_bytes": figures.peak_bytes,
            "allowed_bytes": int(1.15 * size) + figures.cache_bytes + 200_000_000,
            "file_bytes": size,
            "bandwidth": bandwidth,
            "decode_share_of_bandwidth": statistics.median(figures.decode) * size / bandwidth["median"],
        }
        if ours is not None and figures is not ours:
            line["decode_ratio"] = ratio(ours.decode, figures.decode)
            line["prefill_ratio"] = ratio(ours.prefill, figures.prefill)
        lines.append(line)
    return lines


def shown(line: dict[str, Any]) -> dict[str, Any]:
    """The same line, for people."""

    def cell(key: str, digits: int) -> str:
        value = line.get(key)
        if value is None:
            return ""
        return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} to {value['max']:.{digits}f})"

    return {
        "model": line["model"],
        "engine": line["engine"],
        "decode": cell("decode", 1),
        "prefill": cell("prefill", 0),
        "octavo / it, decode": cell("decode_ratio", 2),
        "octavo / it, prefill": cell("prefill_ratio", 2),
        "file read per second / bandwidth": f"{line['decode_share_of_bandwidth']:.0%}",
        "start, s": cell("start", 2),
        "peak (allowed), MB": f"{line['peak_bytes'] / 1e6:.0f} ({line['allowed_bytes'] / 1e6:.0f})",
    }


def main() -> int:
    options = arguments()
    pythons = {} if options.octavo == "-" else {"octavo": options.octavo}
    pythons |= dict(pair.split("=", 1) for pair in options.peer)
    if "llama.cpp" not in pythons:
        print("llama.cpp skipped: no --peer llama.cpp=PYTHON was given", file=sys.stderr)
    header: dict[str, Any] = {"commit": commit(), "machine": machine(), "threads": options.threads}
    header |= {"runs": options.runs, "realtime": options.realtime}
    ceilings = dataclasses.asdict(measure_ceilings(choose_isa(), options.threads))
    lines: list[dict[str, Any]] = []
    for model in options.models:
        lines += rows(model, *compare(model, pythons, options))
    print(json.dumps(header))
    people = [shown(line) for line in lines]
    print(table({key: key for key in people[0]} if people else {}, people))
    for line in {line["model"]: line for line in lines}.values():
        low, high = line["bandwidth"]["min"] / 1e9, line["bandwidth"]["max"] / 1e9
        print(f"{line['model']}: read bandwidth {line['bandwidth']['median'] / 1e9:.1f} GB/s ({low:.1f} to {high:.1f})")
    if options.json:
        options.json.write_text(json.dumps({**header, "ceilings": ceilings, "results": lines}, indent=2) + "\n")
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
