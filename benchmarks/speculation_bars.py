"""Measure the bars of speculation in one run, and record them for the table in docs/speculation.md.

    python benchmarks/speculation_bars.py MODEL.gguf DRAFT.gguf [--llama-cpp PYTHON] [--only MEASUREMENT] [--turns N]
        [--json docs/figures/speculation.json]

MODEL is the 1.5B of Qwen2.5-Coder in Q4_K_M, DRAFT the 0.5B. Each measurement is `octavo bench speculation` in a
separate process: one loaded model answers with and without drafts, in turns, and the gain of a kind of text is the
median of the turns. A run takes about 15 minutes on two cores.

- ngram: all eight kinds, one user, n-grams alone. Geometric mean 1.3, edits of files 2.5, each kind at least 0.98.
- model: the same with DRAFT and n-grams. Code 1.3, chat 1.1; the time to the first token at most 1.03 times as long.
- warm: edits at temperature 0.7 with DRAFT. 1.9.
- users: the eight prompts at once. At most 1 % slower than without drafts.
- avx2: edits with the kernels of AVX2 (OCTAVO_ISA). 1.7.
- peer, with --llama-cpp: `speculation_peers.py` with three kinds of text. 1.2 times the tokens per second of llama.cpp.

Answers must have the same bits with drafts and without. The exit code is 1 if a bar is missed. `--json` writes the
record from which `tools/make_figures.py` makes the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from report import bar, bar_table, commit, machine, measurement, record

from octavo.bench.speculation_texts import EDITS

CODE, CHAT = ("code and tests", "a script"), ("explanation", "plan")
COMMAND = "python benchmarks/speculation_bars.py MODEL.gguf DRAFT.gguf --json docs/figures/speculation.json"
COLUMNS = ["what", "bar", "measured", "by kind of text"]
Report = Mapping[str, Any]


class Measurement(NamedTuple):
    """A run of `octavo bench speculation`, with kinds of text (empty for all) and instruction set (empty for the
    widest).
    """

    options: Mapping[str, object]
    kinds: tuple[str, ...] = ()
    has_draft: bool = False
    isa: str = ""


class Bar(NamedTuple):
    """A figure of a measurement and one limit for it."""

    what: str
    measurement: str
    value: Callable[[Report], float]
    at_least: float | None = None
    at_most: float | None = None


MEASUREMENTS = {
    "ngram": Measurement({"output-len": 128, "turns": 1}),
    "model": Measurement({"output-len": 128, "turns": 1}, has_draft=True),
    "warm": Measurement({"output-len": 200, "turns": 2, "temperature": 0.7}, EDITS, has_draft=True),
    "users": Measurement({"output-len": 128, "turns": 2, "users": 8}),
    "avx2": Measurement({"output-len": 160, "turns": 1}, EDITS, isa="avx2"),
}
PEER_KINDS = (EDITS[0], CODE[0], CHAT[0])


def mean_gain(kinds: tuple[str, ...]) -> Callable[[Report], float]:
    """Return the geometric mean of the gains of these kinds."""
    return lambda report: statistics.geometric_mean([each["gain"] for each in report["kinds"] if each["kind"] in kinds])


def first_token(report: Report) -> float:
    """Return the geometric mean of the times to the first token with drafts relative to those without."""
    return statistics.geometric_mean([each["first_token_ratio"] for each in report["kinds"]])


BARS = (
    Bar("n-grams, edits of a file", "ngram", mean_gain(EDITS), at_least=2.5),
    Bar("n-grams, the worst of eight kinds", "ngram", lambda report: report["worst_gain"], at_least=0.98),
    Bar("n-grams, eight kinds, geometric mean", "ngram", lambda report: report["gain"], at_least=1.3),
    Bar("0.5B drafts, code", "model", mean_gain(CODE), at_least=1.3),
    Bar("0.5B drafts, chat", "model", mean_gain(CHAT), at_least=1.1),
    Bar("0.5B drafts, time to the first token", "model", first_token, at_most=1.03),
    Bar("both, edits at temperature 0.7", "warm", mean_gain(EDITS), at_least=1.9),
    Bar("n-grams, 8 users", "users", lambda report: report["gain"], at_least=0.99),
    Bar("n-grams with AVX2, edits of a file", "avx2", mean_gain(EDITS), at_least=1.7),
    Bar("tokens/s over llama.cpp's with its own speculation", "peer", lambda report: report["mean"], at_least=1.2),
)


def measured(wanted: Measurement, model: str, draft: str, turns: int | None) -> Report:
    """Measure in a new process and return its report. Raises SystemExit if it fails."""
    options = {"num-threads": 2, "max-model-len": 2048, **wanted.options}
    options |= {} if turns is None else {"turns": turns}
    options |= {"draft-model": draft} if wanted.has_draft else {}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    given += [text for kind in wanted.kinds for text in ("--kind", kind)]
    environment = {**os.environ, **({"OCTAVO_ISA": wanted.isa} if wanted.isa else {})}
    command = [sys.executable, "-m", "octavo", "bench", "speculation", model, "--json", *given]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    report: Report = json.loads(done.stdout)
    return report


def of_peer(model: str, draft: str, python: str) -> Report:
    """Return the report of `speculation_peers.py`, with the ratio of each kind as its gain."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peer.json"
        script = Path(__file__).with_name("speculation_peers.py")
        command = [sys.executable, str(script), model, "--draft", draft, "--llama-cpp", python, "--json", str(file)]
        command += ["--turns", "1", "--tokens", "96"]
        command += [text for kind in PEER_KINDS for text in ("--kind", kind)]
        subprocess.run(command, stdout=sys.stderr, check=False)  # its exit code is 1 if a bar is missed
        if not file.exists():
            raise SystemExit(f"{' '.join(command)} has no result")
        report = json.loads(file.read_text())
    return {**report, "kinds": [{"kind": row["kind"], "gain": row["ratio"]} for row in report["rows"]]}


def judged(reports: Mapping[str, Report]) -> Iterator[tuple[Bar, dict[str, Any]]]:
    """Yield the bars of these measurements, each with its row of `bar_table`. Different bits always fail."""
    for each in BARS:
        if (report := reports.get(each.measurement)) is not None:
            row = bar(each.what, each.value(report), at_least=each.at_least, at_most=each.at_most)
            yield each, row if report.get("are_equal", True) else {**row, "met": "NO: other answers"}


def limit_of(each: Bar) -> str:
    """Return the limit in words."""
    return f"at least {each.at_least}" if each.at_most is None else f"at most {each.at_most}"


def table_of(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Return the table of the documentation, as `tools/make_figures.py` reads it."""
    rows, shown = [], set()
    for each, row in judged(reports):
        is_new = each.measurement not in shown
        shown.add(each.measurement)
        kinds = ", ".join(f"{k['kind']} {k['gain']:.2f}" for k in reports[each.measurement]["kinds"]) if is_new else ""
        rows.append([each.what, limit_of(each), f"{row['value']:.2f}", kinds])
    return measurement(COMMAND, COLUMNS, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("draft", help="a GGUF file of a small model with the same vocabulary")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python with llama-cpp-python or xllamacpp")
    parser.add_argument("--only", action="append", choices=[*MEASUREMENTS, "peer"], help="may be given several times")
    parser.add_argument("--turns", type=int, help="that count, of every measurement but the peer's")
    parser.add_argument("--json", metavar="FILE", help="write the record of the table there")
    given = parser.parse_args()
    if given.json and given.only:
        parser.error("--json wants all measurements, and --only some of them")
    if given.only and "peer" in given.only and not given.llama_cpp:
        parser.error("--only peer needs --llama-cpp")
    reports: dict[str, Report] = {}
    for name, wanted in MEASUREMENTS.items():
        if not given.only or name in given.only:
            reports[name] = measured(wanted, given.model, given.draft, given.turns)
    if given.llama_cpp and (not given.only or "peer" in given.only):
        reports["peer"] = of_peer(given.model, given.draft, given.llama_cpp)
    rows = [row for _, row in judged(reports)]
    print(f"{machine()}, commit {commit()}\n{bar_table(rows)}")
    if given.json:
        record(Path(given.json), "bars", table_of(reports))
    return int(any(row["met"] != "yes" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
