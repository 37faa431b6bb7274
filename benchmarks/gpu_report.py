"""The page `docs/lab/performance_gpu.md`: targets and figures from one JSON record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpu_limits import LIMITS
from report import table

NOT_RUN = "not yet run on a GPU"


@dataclass(frozen=True, slots=True)
class Target:
    """The accepted figure and the goal.

    kind: whether they are fractions of the ceiling or values in the figure's unit.
    """

    title: str
    case: str
    figure: str
    must: float
    aim: float
    kind: Literal["fraction", "more", "less"] = "fraction"
    unit: str = ""


_CHOICES, _BLOCKS = "decode attention, choices", "blocks of 16, parts of 512"
_LONG, _MODES = "bf16 over this, batch 32, context 8192", "bf16: graphs and overlap"
_FILTERS = "filters, rows 32"
_BESIDE = "bf16: beside streams"
TARGETS = [
    Target("decode attention, 32 sequences of 4,096", _CHOICES, f"batch 32, context 4096, {_BLOCKS}", 0.75, 0.88),
    Target("decode attention, 1 sequence of 8,192", _CHOICES, f"batch 1, context 8192, {_BLOCKS}", 0.60, 0.75),
    Target("rotation and cache write, 32 rows", "rows", "heads and cache, rows 32", 4, 2.5, "less", "microseconds"),
    Target("norm, 32 rows", "rows", "norm, rows 32", 4, 2.5, "less", "microseconds"),
    Target("norm, 8,192 rows", "rows", "norm, rows 8192", 0.80, 0.90),
    Target("gate, 8,192 rows", "rows", "gate, rows 8192", 0.80, 0.90),
    Target("4 bits, gate and up, 1 row", "products, I4_128_Z", "gate and up, rows 1", 0.60, 0.80),
    Target("4 bits, a layer, 1 row", "products, I4_128_Z", "layer, rows 1", 0.50, 0.65),
    Target("4 bits, a layer, 8 rows", "products, I4_128_Z", "layer, rows 8", 0.50, 0.70),
    Target("4 bits against bf16, 32 rows", "products, I4_128_Z", "plain over this, rows 32", 1.0, 1.8, "more", "x"),
    Target("4 bits against bf16, 128 rows", "products, I4_128_Z", "plain over this, rows 128", 0.6, 0.85, "more", "x"),
    Target("Q4_K, a layer, 1 row", "products, Q4_K", "layer, rows 1", 0.50, 0.65),
    Target("NF4, a layer, 1 row", "products, NF4_64", "layer, rows 1", 0.45, 0.65),
    Target("bf16 against the library, 1 row", "products, plain", "library over own, rows 1", 1.0, 1.08, "more", "x"),
    Target("int8 rows and weights, 1,024 rows", "products of codes, I8_ROW", "gate and up, rows 1024", 0.55, 0.70),
    Target("E4M3 rows and weights, 1,024 rows", "products of codes, F8_E4M3_ROW", "gate and up, rows 1024", 0.55, 0.70),
    Target("E4M3 in blocks, 1,024 rows", "products of codes, F8_E4M3_128X128", "gate and up, rows 1024", 0.55, 0.70),
    Target("experts in bf16, 32 rows", "products, experts", "plain, rows 32", 0.50, 0.70),
    Target("weights of 4 bits written out", "weights written out", "I4_128_Z", 0.75, 0.88),
    Target("prefill attention, 4,096 tokens", "prefill attention", "4096 tokens", 300, 420, "more", "TFLOP/s"),
    Target("sampling, greedy, 32 rows", "sampling", "greedy, rows 32", 35, 25, "less", "microseconds"),
    Target("sampling, filters, 32 rows", "sampling", _FILTERS, 60, 40, "less", "microseconds"),
    Target("fp8 cache against bf16, 32 sequences of 8,192", "decode attention, fp8", _LONG, 1.5, 1.8, "more", "x"),
    Target("int8 cache against bf16, 32 sequences of 8,192", "decode attention, int8", _LONG, 1.5, 1.8, "more", "x"),
    Target("bf16, batch 1", "bf16: decode", "batch 1", 200, 235, "more", "tokens/s"),
    Target("bf16, batch 32", "bf16: decode", "batch 32", 4600, 5500, "more", "tokens/s"),
    Target("bf16, batch 256", "bf16: decode", "batch 256", 12000, 14500, "more", "tokens/s"),
    Target("4 bits, batch 1", "I4_128_Z: decode", "batch 1", 500, 550, "more", "tokens/s"),
    Target("4 bits, batch 32", "I4_128_Z: decode", "batch 32", 7500, 8500, "more", "tokens/s"),
    Target("fp8, batch 1", "F8_E4M3_128X128: decode", "batch 1", 300, 400, "more", "tokens/s"),
    Target("bf16, a prompt of 2,048", "bf16: prompts", "prompt of 2048", 36000, 43000, "more", "tokens/s"),
    Target("Q4_K against bf16, 8 rows", "products, Q4_K", "plain over this, rows 8", 1.3, 1.8, "more", "x"),
    Target("Q6_K against bf16, 8 rows", "products, Q6_K", "plain over this, rows 8", 1.3, 1.8, "more", "x"),
    Target("a prompt of 512 in pieces, over launched", _BESIDE, "prompt of 512, launched over in pieces", 2.0, 2.5,
           "more", "x"),
    Target("31 streams with a prompt of 512", _BESIDE, "longest gap of 31 streams beside it, over a usual step",
           1.3, 1.2, "less", "x"),
    Target("graphs, batch 1", _MODES, "default over eager, batch 1", 1.5, 2.0, "more", "x"),
    Target("all layers streamed, a prompt of 8,192", "stream", "prompt of 8192, over the longer part", 1.10, 1.05,
           "less", "x"),
    Target("two steps in flight, batch 32", _MODES, "default over no overlap, batch 32", 1.05, 1.10, "more", "x"),
]  # fmt: skip

_HEAD = """# Performance on a GPU

The shapes are those of Llama 3.1 8B; the weights are random. Percentages are relative to the bandwidth or the matrix
rate measured in the same run. Each kernel's result is compared with float32 before it is timed, and a wrong one has no
figure. The kernels for states are compared only in the tests; notes name other exceptions.

    python benchmarks/gpu.py --minutes 9 --json gpu.json

runs for at most nine minutes and updates the JSON after every case. The same command continues where the last one
stopped, also after a crash; a case that did not finish is not tried again on the same commit. `--only "bf16: decode"`
repeats the cases with these words in their name, and `--minutes 0` only writes this page from the JSON. All cases take
about 30 minutes. `--smoke` runs every case at tiny sizes on the CPU. `benchmarks/gpu_tiles.py` times possible tiles of
the kernels. `benchmarks/gpu_session.py` runs everything in at most nine minutes: these cases, the real models in a
folder, the libraries of the extra `gpu-fast` if they are installed, and `compare.py` with 1 to 16 threads of the
machine's processor.

Since these commits, prompts run in captured pieces, caches of eight bits are converted differently, and filters count
instead of sorting. None of that has run on a GPU yet.

A case whose title names a commit was measured at that commit, and its kernels have not changed since.
"""


def page(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown.

    record: the JSON of `gpu.py`, empty if there is none.
    """
    cases: Mapping[str, Any] = record.get("cases", {})
    parts = [_HEAD, _state(record)]
    if failed := [(name, case) for name, case in cases.items() if case["state"] != "done"]:
        parts += [
            "## Not measured\n",
            *(f"- {name}: {case['state']}. {case.get('error', '')}" for name, case in failed),
            "",
        ]
    parts += ["## Targets\n", table(_COLUMNS, [_row(target, cases) for target in TARGETS]), ""]
    if missed := _missed(cases):
        parts += [f"The farthest from its target: {missed}.\n"]
    if limits := _limits(cases):
        parts += ["## What the hardware allows\n", _ALLOWED, table(_LIMIT_COLUMNS, limits), ""]
    parts += ["## Who wins where\n", _winners(cases), ""]
    groups = dict.fromkeys(case["group"] for case in cases.values())
    for group in groups:
        parts.append(f"## {group.capitalize()}\n")
        for name, case in cases.items():
            if case["group"] == group and case["figures"]:
                figures = [_figure(figure) for figure in case["figures"]]
                note = [f"{case['note']}\n"] if "note" in case else []
                parts += [_title(name, case, record), *note, table(_FIGURES, figures), ""]
    return "\n".join(parts)


def _title(name: str, case: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return the heading of a case, with its commit if it differs from the page's."""
    is_other = case["commit"] != record.get("machine", {}).get("commit", case["commit"])
    return f"### {name}" + (f" ({case['commit']})\n" if is_other else "\n")


def write(record: Mapping[str, Any], path: Path) -> None:
    path.write_text(page(record), encoding="utf-8")


_ALLOWED = """Targets that are not met, and the least time of their bytes at 4.8 TB/s or of their operations at 989
TFLOP/s (bfloat16; twice that in fp8), by the data sheet of an H200 (`benchmarks/gpu_limits.py`).
"""
_LIMIT_COLUMNS = {"what": "title", "measured": "found", "limit": "limit", "arithmetic": "arithmetic", "note": "note"}
_COLUMNS = {"what": "title", "measured": "found", "must": "must", "aim": "aim", "met": "met"}
_FIGURES = {"figure": "name", "value": "value", "unit": "unit", "of the ceiling": "fraction"}


def _winners(cases: Mapping[str, Any]) -> str:
    """Return the table of problems with the fastest of our kernels and the libraries, from the provider cases."""
    times: dict[str, dict[str, float]] = {}
    for case in cases.values():
        for figure in case["figures"] if case["group"] == "providers" else ():
            problem, _, contender = figure["name"].partition(": ")
            if figure["unit"] != "not here":
                times.setdefault(problem, {})[contender] = figure["value"]
    if not times:
        return f"Libraries compared with our kernels: {NOT_RUN}.\n"
    rows = []
    for problem, found in times.items():
        best = min(found, key=found.__getitem__)
        all_times = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        rows.append({"problem": problem, "winner": best, "times": f"{all_times} microseconds"})
    return table({"problem": "problem", "winner": "winner", "times": "times"}, rows)


def _state(record: Mapping[str, Any]) -> str:
    machine = record.get("machine")
    if not machine:
        return f"**State: {NOT_RUN}.** The targets are there, the figures are not.\n"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "commit", "date"))
    return f"{machine['device']}, {machine['memory_gb']:.0f} GB, {versions}.\n"


def _limits(cases: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each target that is not met and whose limit is known."""
    rows = []
    for target in TARGETS:
        found, limit = _found(target, cases), LIMITS.get(target.title)
        if found is None or limit is None or _score(target, found) >= 1:
            continue
        value = _figure_of(target, cases)["value"]
        rows.append(
            {
                "title": target.title,
                "found": f"{_short(value)} {limit.unit}",
                "limit": f"{_short(limit.value)} {limit.unit}",
                "arithmetic": limit.arithmetic,
                "note": limit.note,
            }
        )
    return rows


def _figure_of(target: Target, cases: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figure of a target; empty if it was not measured."""
    figures: Sequence[Mapping[str, Any]] = cases.get(target.case, {}).get("figures", [])
    return next((f for f in figures if f["name"] == target.figure), {})


def _found(target: Target, cases: Mapping[str, Any]) -> float | None:
    found: float | None = _figure_of(target, cases).get("fraction" if target.kind == "fraction" else "value")
    return found


def _score(target: Target, found: float) -> float:
    """Return 1 if the target is exactly met, more if it is exceeded."""
    return target.must / found if target.kind == "less" else found / target.must


def _row(target: Target, cases: Mapping[str, Any]) -> dict[str, str]:
    found = _found(target, cases)
    ceiling = {"less": "at most ", "more": "", "fraction": ""}[target.kind]
    met = ""
    if found is not None:
        aim = found <= target.aim if target.kind == "less" else found >= target.aim
        met = "aim" if aim else "must" if _score(target, found) >= 1 else "no"
    return {
        "title": target.title,
        "found": NOT_RUN if found is None else _number(found, target),
        "must": ceiling + _number(target.must, target),
        "aim": ceiling + _number(target.aim, target),
        "met": met,
    }


def _number(value: float, target: Target) -> str:
    if target.kind == "fraction":
        return f"{value:.0%}"
    return f"{_short(value)} {target.unit}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _missed(cases: Mapping[str, Any]) -> str:
    scores = [(_score(t, found), t.title) for t in TARGETS if (found := _found(t, cases)) is not None]
    worst, title = min(scores, default=(1.0, ""))
    return f"{title}, at {worst:.0%} of it" if worst < 1 else ""


def _figure(figure: Mapping[str, Any]) -> dict[str, str]:
    fraction = figure["fraction"]
    return {
        "name": figure["name"],
        "value": _short(figure["value"]),
        "unit": figure["unit"],
        "fraction": "" if fraction is None else f"{fraction:.0%}",
    }
