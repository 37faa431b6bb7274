"""An HTML page that shows the answers of several engines side by side. All text in it is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from octavo.bench import Spread
from octavo.quality.engine_comparison import EngineFigures

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; margin-bottom: 2rem; }
th, td { border: 1px solid #bbb; padding: .4rem .6rem; text-align: left; vertical-align: top; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; }
caption { text-align: left; font-weight: bold; white-space: pre-wrap; padding: .4rem 0; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; } }
"""


def answers_page(prompts: Sequence[str], engines: Sequence[EngineFigures]) -> str:
    """Return the page as HTML without scripts; it loads nothing from elsewhere."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("engine", "model", "TTFT, s", "TPOT, ms", "tokens/s"))
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(cell)}</td>"
            for cell in (
                engine.name,
                engine.model,
                shown(engine.ttft_s, 3),
                shown(engine.tpot_s, 1, 1e3),
                shown(engine.tokens_per_s, 1),
            )
        )
        + "</tr>"
        for engine in engines
    )
    names = "".join(f"<th>{escape(engine.name)}</th>" for engine in engines)
    answers = "".join(
        f"<table><caption>{escape(prompt)}</caption><tr>{names}</tr><tr>"
        + "".join(f'<td class="text">{escape(engine.answers[place])}</td>' for engine in engines)
        + "</tr></table>\n"
        for place, prompt in enumerate(prompts)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Answers of engines</title>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<style>{_STYLE}</style></head><body>\n<h1>Answers of engines</h1>\n"
        f"<table><tr>{head}</tr>{rows}</table>\n{answers}</body></html>\n"
    )


def shown(spread: Spread, digits: int, scale: float = 1.0) -> str:
    """Format as `1.23 (1.10 to 1.45)`."""
    low, high = f"{spread.low * scale:.{digits}f}", f"{spread.high * scale:.{digits}f}"
    middle = f"{spread.median * scale:.{digits}f}"
    return middle if low == high else f"{middle} ({low} to {high})"
