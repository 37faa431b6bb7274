"""Compare speed, memory and start-up of Octavo with other engines: same model, same machine, same time.

    python benchmarks/compare.py MODEL.gguf --peer llama.cpp=PYTHON [--peer vllm=PYTHON --converted FOLDER] \\
        [--measure decode,prefill-512] [--skip vllm=start,memory] [--runs 5] [--realtime] [--json FILE]

This compares libraries in a process, not servers: token ids in, token ids out, and the ceilings of the machine. Use
`octavo compare --engine` for prompts through servers, and `serve.py` for several concurrent users.

Run it with a Python that has octavo, for the ceilings. Each engine is a separate process (`peers/`), run by the
Python of its environment, with the same number of threads and the same token ids. They take turns at each measure
(A B A B ...). Absolute figures on a shared machine drift, so the ratio counts. `measures.py` defines the measures.
Peers that cannot read GGUF files read the output of `convert.py` for the same file.

The ceiling of decode is read bandwidth (measured in the same turns by `octavo.backends.cpu.ceilings`, all threads)
divided by the bytes of weights that one token needs. All other ceilings are measured once, at the start.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceilings import measure_ceilings
from comparison import OURS, Figures, engine_json, table_rows
from measures import MEASURES, MEMORY_CONTEXT, Workload, wanted_workloads
from protocol import Peer, PeerError
from report import commit, machine, spread, table

from octavo.backends.cpu.ceilings import ReadBandwidth
from octavo.backends.cpu.instruction_set import choose_isa
from octavo.backends.profiling import Ceilings

PAUSE_SECONDS = 0.3  # the spinning threads of the engine whose turn is over go to sleep
CONVERTED = {"transformers": "transformers", "vllm": "transformers", "ctranslate2": "ctranslate2"}  # by `convert.py`
CEILINGS_SHOWN = {"B/s": (1e-9, "GB/s"), "1/s": (1e-9, "G/s"), "s": (1e6, "microseconds")}


@dataclass
class Engine:
    """An engine in the comparison: its start command, its running process, and its figures."""

    name: str
    python: str
    load: dict[str, Any]
    peer: Peer
    figures: Figures
    skipped: frozenset[str]

    def wants(self, workload: Workload, measures: set[str]) -> set[str]:
        """Return the measures of this workload that this engine takes part in."""
        if workload.only not in (None, self.name):
            return set()
        return (measures & set(workload.measures)) - self.skipped - self.figures.left_out.keys()


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _measures(text: str) -> set[str]:
    names = set(text.split(","))
    if unknown := names - MEASURES.keys():
        raise argparse.ArgumentTypeError(f"no measure {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    return names


def _skip(text: str) -> tuple[str, set[str]]:
    name, measures = _pair(text)
    return name, _measures(measures)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.gguf")
    parser.add_argument("--octavo", default=sys.executable, metavar="PYTHON", help="a Python with octavo; - for none")
    parser.add_argument("--peer", action="append", default=[], type=_pair, metavar="NAME=PYTHON", help="one of peers/")
    parser.add_argument("--converted", type=Path, metavar="FOLDER", help="output folder of convert.py")
    parser.add_argument(
        "--measure", type=_measures, default=set(MEASURES), metavar="A,B", help=f"of {', '.join(MEASURES)}"
    )
    parser.add_argument("--skip", action="append", default=[], type=_skip, metavar="NAME=A,B", help="measures to skip")
    parser.add_argument("--runs", type=int, default=5, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--realtime", action="store_true", help="run turns at real-time priority (needs root)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(words)
    if options.runs < 1:
        parser.error(f"--runs is {options.runs}; at least one turn is needed")
    named = {name for name, _ in options.peer} | {OURS}
    for name, _ in options.skip:
        if name not in named:
            parser.error(f"--skip {name}: no such engine takes part")
    return options


def put_ahead(process: int) -> None:
    """Give all threads of a process real-time priority, so that a busy machine disturbs them less."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(5))


@contextlib.contextmanager
def ahead(processes: Sequence[int], wanted: bool) -> Iterator[None]:
    """Run this process and others, with all threads and processes that they start, at real-time priority."""
    if not wanted:
        yield
        return
    for process in (os.getpid(), *processes):
        put_ahead(process)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def source(name: str, model: Path, converted: Path | None) -> Path:
    """Return the model that this engine reads. Raises PeerError if it is missing."""
    if name not in CONVERTED:
        return model.resolve()
    if converted is None:
        raise PeerError("reads no GGUF; run convert.py and give --converted")
    path = (converted / model.stem / CONVERTED[name]).resolve()
    if not path.exists():
        raise PeerError(f"{path} is missing; run convert.py")
    return path


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of the weights in a directory; its other files are small."""
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())


class Comparison:
    """A comparison of all engines on one model."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        self._model, self._options = model, options
        self._workloads = wanted_workloads(options.measure)
        self._log = Path(tempfile.gettempdir()) / "octavo-compare.log"
        self._room = {
            "context": max(workload.context for workload in self._workloads),
            "sequences": max(workload.sequences for workload in self._workloads),
        }
        self._engines: list[Engine] = []
        self.absent: dict[str, str] = {}
        self.allowed_memory: int | None = None

    def run(self) -> tuple[list[Figures], dict[str, float]]:
        """Return the figures of every working engine, and the spread of the read bandwidth."""
        bandwidth = ReadBandwidth(self._options.threads)
        passes = []
        try:
            self._start_all()
            with ahead([engine.peer.process_id for engine in self._engines], self._options.realtime):
                self._warm_up()
                for _ in range(self._options.runs):
                    time.sleep(PAUSE_SECONDS)
                    passes.append(bandwidth.measure())
                    self._turn()
            self._note_allowed_memory()
        finally:
            for engine in self._engines:
                engine.peer.close()
        return [engine.figures for engine in self._engines], spread(passes)

    def _start_all(self) -> None:
        pythons = {} if self._options.octavo == "-" else {OURS: self._options.octavo}
        for name, python in (pythons | dict(self._options.peer)).items():
            try:
                self._engines.append(self._started(name, python))
            except (PeerError, OSError) as error:  # noqa: PERF203
                self.absent[name] = str(error)
                print(f"{self._model.name}: {name} left out: {error}", file=sys.stderr)

    def _warm_up(self) -> None:
        for engine in self._engines:
            for workload in self._workloads:
                if workload.warm_up is not None and engine.wants(workload, self._options.measure):
                    self._try(engine, workload, lambda peer, workload=workload: workload.warm_up(peer))

    def _started(self, name: str, python: str) -> Engine:
        path = source(name, self._model, self._options.converted)
        load = {"model": str(path), "threads": self._options.threads}
        peer = Peer(name, python, self._log)
        try:
            version = peer.ask("load", **load, **self._room)["version"]
        except PeerError:
            peer.close()
            raise
        skipped = frozenset().union(*(names for skipping, names in self._options.skip if skipping == name))
        return Engine(name, python, load, peer, Figures(name, version, size_of(path)), skipped)

    def _turn(self) -> None:
        """Run every measure once with every engine, one engine after another within each measure."""
        for workload in self._workloads:
            for engine in self._engines:
                wanted = engine.wants(workload, self._options.measure)
                if not wanted:
                    continue
                time.sleep(PAUSE_SECONDS)
                figures = self._try(engine, workload, lambda peer, run=workload.run, wanted=wanted: run(peer, wanted))
                engine.figures.add({name: value for name, value in (figures or {}).items() if name in wanted})

    def _try(self, engine: Engine, workload: Workload, work: Any) -> Any:
        """Return the result of `work` on the engine's process, or on a new one.

        None if it failed; it is not tried again.
        """
        peer = engine.peer
        try:
            if workload.is_fresh:
                peer = Peer(engine.name, engine.python, self._log)
                peer.ask("load", **engine.load, context=workload.context, sequences=workload.sequences)
            return work(peer)
        except PeerError as error:
            engine.figures.drop(workload.measures, str(error))
            print(f"{self._model.name}: {', '.join(workload.measures)} left out: {error}", file=sys.stderr)
            return None
        finally:
            if peer is not engine.peer:
                peer.close()

    def _note_allowed_memory(self) -> None:
        """Set the memory allowance: 1.15 times the file, the cache of its context, and 200 MB."""
        for engine in self._engines:
            if "memory" in engine.figures.values and engine.name == OURS:
                cache = engine.peer.ask("cache_bytes", tokens=MEMORY_CONTEXT)["result"]
                self.allowed_memory = int(1.15 * self._model.stat().st_size) + cache + 200_000_000


def model_json(comparison: Comparison, model: Path) -> dict[str, Any]:
    """Return everything about one model."""
    engines, bandwidth = comparison.run()
    ours = next((figures for figures in engines if figures.engine == OURS), None)
    return {
        "model": model.name,
        "file_bytes": model.stat().st_size,
        "allowed_memory_bytes": comparison.allowed_memory,
        "bandwidth": bandwidth,
        "engines": [engine_json(figures, ours, bandwidth) for figures in engines],
        "absent": comparison.absent,
    }


def show_ceilings(ceilings: Ceilings) -> str:
    """Format the ceilings in one line."""
    parts = []
    for figure in ceilings.figures:
        if figure.value is not None:
            factor, unit = CEILINGS_SHOWN[figure.unit]
            parts.append(f"{figure.name} {figure.value * factor:.3g} {unit} ({figure.isa}, {figure.threads})")
    return "Ceilings of this run (instruction set, threads): " + "; ".join(parts)


def show(result: dict[str, Any]) -> str:
    """Format one model's table, with the facts around it."""
    columns, rows = table_rows(result["engines"])
    low, middle, high = (f"{result['bandwidth'][key] / 1e9:.1f}" for key in ("min", "median", "max"))
    lines = [f"## {result['model']}", "", table(columns, rows), ""]
    lines += [f"- {engine['engine']}: {engine['version']}" for engine in result["engines"]]
    for engine in result["engines"]:
        lines += [f"- {engine['engine']}, {name}: no figure: {why}" for name, why in engine["left_out"].items()]
    lines += [f"- {name}: did not start: {why}" for name, why in result["absent"].items()]
    lines.append(f"- read bandwidth in the same turns: {middle} GB/s ({low} to {high})")
    if result["allowed_memory_bytes"]:
        lines.append(f"- allowed memory: {result['allowed_memory_bytes'] / 1e6:.0f} MB")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = arguments()
    header: dict[str, Any] = {"commit": commit(), "machine": machine(), "threads": options.threads}
    header |= {"runs": options.runs, "realtime": options.realtime}
    with ahead([], options.realtime):
        ceilings = measure_ceilings(choose_isa(), options.threads)
    print(json.dumps(header))
    print(show_ceilings(ceilings))
    results = []
    for model in options.models:
        results.append(model_json(Comparison(model, options), model))
        print(show(results[-1]), flush=True)
        if options.json:  # after each model: what a long run has is kept if it is interrupted
            report = {**header, "ceilings": dataclasses.asdict(ceilings), "results": results}
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if any(result["engines"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
