"""Parts of every report: a Markdown table, the machine, the commit."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from octavo.bench.machine import processor


def table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a Markdown table: column title -> key in each row."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(key, "")) for key in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def bar(name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """Return a row of `bar_table`: a figure and whether it meets its bar. Give one of the limits."""
    is_met = value >= at_least if at_least is not None else value <= (at_most or 0.0)
    wanted = f">= {at_least}" if at_least is not None else f"<= {at_most}"
    return {"what": name, "value": round(value, 3), "bar": wanted, "met": "yes" if is_met else "NO"}


def bar_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format a Markdown table of figures and their bars."""
    return table({"": "what", "value": "value", "bar": "bar", "met": "met"}, rows)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def commit() -> str:
    """Return the checked-out commit, marked if tracked files differ from it."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def measurement(command: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a table of the documentation, measured here and now, as `tools/make_figures.py` reads it."""
    found = machine()
    processor_name = f"{found['processor']}, family {found['family']}"
    return {
        "machine": f"{processor_name} ({', '.join(found['extensions'])}), {found['cores']} cores",
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": command,
        "columns": list(columns),
        "rows": [list(row) for row in rows],
    }


def record(path: Path, name: str, measured: Mapping[str, Any]) -> None:
    """Write a table to a file of docs/figures. The file's other tables stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {name: measured}, indent=2, ensure_ascii=False) + "\n")


def machine() -> dict[str, Any]:
    """Return the processor as the kernel names it, its vector extensions, cores, memory and load."""
    fields = processor()
    flags = set(fields.get("flags", "").split())
    extensions = ("avx2", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    return {
        "processor": fields.get("model name", "unknown"),
        "family": f"{fields.get('cpu family')}/{fields.get('model')}",
        "extensions": [name for name in extensions if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg()[0],
    }


def beginning(model: Path, text: Path | None, tokens: int) -> str:
    """Return the first `tokens` tokens of a text, or of the built-in one."""
    from octavo.quality.evaluation import tokenizer_of
    from octavo.quality.texts import read_text

    whole, tokenizer = read_text(text).text, tokenizer_of(str(model))
    ids = tokenizer.encode(whole, add_special_tokens=False)
    if len(ids) < tokens:
        raise SystemExit(f"the text has {len(ids)} tokens; {tokens} are needed")
    return whole[: len(tokenizer.decode(ids[:tokens]))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, smallest and largest value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
