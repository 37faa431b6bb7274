"""`octavo bench`: how fast a model is on this machine."""

from __future__ import annotations

import typer

bench = typer.Typer(help="Measure how fast a model is on this machine.", no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def _bench() -> None:
    """Measure how fast a model is on this machine."""
