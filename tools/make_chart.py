#!/usr/bin/env python3
"""Draw docs/plots/speed.svg, the chart in the README, from the figures in docs/figures/performance.json.

    python tools/make_chart.py [--check]

Each bar is Octavo's speed divided by another engine's, with the same file and number of threads. `--check` writes
nothing and exits with 1 if the chart is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "docs" / "plots" / "speed.svg"
TABLE, PEERS = "zen4_peers", {"llama.cpp": "#3b82f6", "vLLM": "#f59e0b"}
NOTES = {"vLLM": " (bfloat16)"}  # vLLM does not read the quantized file
MODELS = ("SmolLM2-135M", "Qwen2.5-1.5B")
WIDTH, LEFT, BAR, GAP = 760, 250, 15, 12
SCALE = (WIDTH - LEFT - 60) / 6.5  # pixels per unit of the ratio

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2937 }
.small { font-size: 11px; fill: #6b7280 }
.title { font-size: 15px; font-weight: 600 }
line { stroke: #9ca3af; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) { text { fill: #e5e7eb } .small { fill: #9ca3af } }
"""


def ratios(record: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Return (model and measure, ratio by engine) for each row of the chart, without engines that have no figure."""
    found, model = [], ""
    for row in record["rows"]:
        cells = dict(zip(record["columns"], row, strict=True))
        model = row[0] or model
        numbers = {peer: re.match(r"\*{0,2}(\d+(?:\.\d+)?)", cells[peer]) for peer in PEERS}
        if model in MODELS and any(numbers.values()):
            label = f"{model}, {cells['measure']}"
            found.append((label, {peer: float(number[1]) for peer, number in numbers.items() if number}))
    return found


def draw(record: dict[str, Any]) -> str:
    """Return the chart as SVG."""
    rows, parts, y = ratios(record), [], 58
    for label, values in rows:
        parts.append(f'<text x="{LEFT - 10}" y="{y + BAR + 4}" text-anchor="end">{escape(label)}</text>')
        for at, (peer, value) in enumerate(values.items()):
            top = y + at * BAR
            width = value * SCALE
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR - 2}" fill="{PEERS[peer]}"/>')
            parts.append(f'<text class="small" x="{LEFT + width + 5:.1f}" y="{top + BAR - 4}">{value:g}</text>')
        y += len(values) * BAR + GAP
    one = LEFT + SCALE
    legend, x = [], LEFT
    for peer, colour in PEERS.items():
        legend.append(f'<rect x="{x}" y="32" width="11" height="11" fill="{colour}"/>')
        legend.append(f'<text x="{x + 16}" y="42">speed / that of {escape(peer)}{NOTES.get(peer, "")}</text>')
        x += 210
    notes = (
        f"{record['machine']}, {record['date']}.",
        "Decode and prefill: one user. Sequences: all tokens per second.",
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 44}" width="{WIDTH}" role="img" '
        f'aria-label="Octavo\'s speed divided by that of llama.cpp and vLLM">\n<style>{STYLE}</style>\n'
        f'<text class="title" x="10" y="20">Octavo on a CPU, beside llama.cpp and vLLM</text>\n'
        + "\n".join([*legend, f'<line x1="{one:.1f}" y1="50" x2="{one:.1f}" y2="{y}"/>', *parts])
        + "".join(
            f'\n<text class="small" x="10" y="{y + 16 * at}">{escape(note)}</text>' for at, note in enumerate(notes, 1)
        )
        + "\n</svg>\n"
    )


def main() -> int:
    chart = draw(json.loads((ROOT / "docs/figures/lab/performance.json").read_text())[TABLE])
    if "--check" in sys.argv[1:]:
        return int(not CHART.exists() or CHART.read_text() != chart)
    CHART.write_text(chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
