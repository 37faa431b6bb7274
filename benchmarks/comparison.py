"""The figures of several engines side by side: ratios, a table, the same as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from measures import MEASURES, Measure
from report import spread

OURS = "octavo"


@dataclass
class Figures:
    """The figures of one engine with one model."""

    engine: str
    version: str = ""
    weights_bytes: int = 0
    """Size of the file or folder that the engine reads."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """For each measure, one figure per turn, in its unit."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Measures without figures, with the reason."""

    def add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.values.setdefault(name, []).append(value)

    def drop(self, names: Sequence[str], reason: str) -> None:
        """Remove figures and record why: an engine that fails in one turn has none, because turns are compared one by
        one.
        """
        for name in names:
            self.values.pop(name, None)
            self.left_out[name] = reason


def ratio(ours: Sequence[float], theirs: Sequence[float], measure: Measure) -> dict[str, float]:
    """Return Octavo's advantage as a factor: from the medians, and the median, smallest and largest over the turns."""
    pairs = list(zip(ours, theirs, strict=True))
    if measure.better == "less":
        pairs = [(b, a) for a, b in pairs]
    above, below = zip(*pairs, strict=True)
    by_turn = spread([a / b for a, b in pairs])
    return {"of_medians": statistics.median(above) / statistics.median(below), **by_turn}


def engine_json(figures: Figures, ours: Figures | None, bandwidth: Mapping[str, float]) -> dict[str, Any]:
    """One engine: every figure in its unit, with the ratio to Octavo's.

    bandwidth: bytes per second read from memory in the same turns. Decoding one stream reads all weights for each
    token, so the entry has its share of the bandwidth.
    """
    measures: dict[str, Any] = {}
    for name, values in figures.values.items():
        measure = MEASURES[name]
        entry = {"unit": measure.unit, "values": values, **spread(values)}
        if ours is not None and figures is not ours and name in ours.values:
            entry["ratio"] = ratio(ours.values[name], values, measure)
        if name == "decode":
            entry["share_of_bandwidth"] = entry["median"] * figures.weights_bytes / bandwidth["median"]
        measures[name] = entry
    return {
        "engine": figures.engine,
        "version": figures.version,
        "weights_bytes": figures.weights_bytes,
        "measures": measures,
        "left_out": figures.left_out,
    }


def shown(value: Mapping[str, float], digits: int) -> str:
    """Format a median and its range."""
    low, middle, high = (f"{value[key]:.{digits}f}" for key in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low} to {high})"


def shown_ratio(value: Mapping[str, float]) -> str:
    """Format the ratio of medians, and the range of the turns' ratios."""
    return f"**{value['of_medians']:.2f}x** ({value['min']:.2f} to {value['max']:.2f})"


def table_rows(engines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return columns and rows for `report.table`: one row per measure, with each peer's figure and Octavo's
    advantage.
    """
    columns = {"measure": "measure"}
    for engine in engines:
        name = engine["engine"]
        columns[name] = name
        if any("ratio" in entry for entry in engine["measures"].values()):
            columns[f"octavo / {name}"] = f"ratio {name}"
    rows = []
    for key, measure in MEASURES.items():
        row = {"measure": f"{measure.title}, {measure.unit}"}
        for engine in engines:
            entry, name = engine["measures"].get(key), engine["engine"]
            if entry is None:
                continue
            row[name] = shown(entry, measure.digits)
            if "share_of_bandwidth" in entry:
                row[name] += f", {entry['share_of_bandwidth']:.0%} of bandwidth"
            if "ratio" in entry:
                row[f"ratio {name}"] = shown_ratio(entry["ratio"])
        if len(row) > 1:
            rows.append(row)
    return columns, rows
