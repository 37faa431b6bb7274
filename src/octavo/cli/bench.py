"""`octavo bench`: how fast a model is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from octavo.cli.options import Options, with_engine_options
from octavo.cli.run import DEFAULT_MODEL
from octavo.cli.terminal import find_model, size, write, write_facts, write_json

if TYPE_CHECKING:
    from octavo.bench import LatencyReport, ThroughputReport

bench = typer.Typer(help="Measure how fast a model is on this machine.", no_args_is_help=True, rich_markup_mode=None)

Model = Annotated[str, typer.Argument(help="path, hub id or short name")]
InputLen = Annotated[int, typer.Option(help="tokens of each prompt", min=1)]
OutputLen = Annotated[int, typer.Option(help="tokens of each answer", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="as JSON")]

_WARMUP = 1
_Report = TypeVar("_Report")


@bench.command()
@with_engine_options
def latency(
    *,
    model: Model = DEFAULT_MODEL,
    input_len: InputLen = 32,
    output_len: OutputLen = 128,
    batch_size: Annotated[int, typer.Option(help="requests at the same time", min=1)] = 1,
    iterations: Annotated[int, typer.Option(help="runs that count", min=1)] = 10,
    as_json: AsJson = False,
    engine_options: Options,
) -> None:
    """Measure how long one batch of requests takes."""
    from octavo.bench import latency as measure

    load = {"input_len": input_len, "output_len": output_len, "batch_size": batch_size}
    _write(_run(measure, model, iterations, {**load, **engine_options}), as_json)


@bench.command()
@with_engine_options
def throughput(
    *,
    model: Model = DEFAULT_MODEL,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    num_prompts: Annotated[int, typer.Option(help="requests handed in at once", min=1)] = 64,
    iterations: Annotated[int, typer.Option(help="runs that count", min=1)] = 3,
    as_json: AsJson = False,
    engine_options: Options,
) -> None:
    """Measure how much a model does when there is always more to do."""
    from octavo.bench import throughput as measure

    load = {"input_len": input_len, "output_len": output_len, "num_prompts": num_prompts}
    _write(_run(measure, model, iterations, {**load, **engine_options}), as_json)


def _run(measure: Callable[..., _Report], model: str, iterations: int, options: Options) -> _Report:
    """The report of a benchmark, with a bar over its runs."""
    from octavo.engine.progress import ProgressBar

    path = str(find_model(model))
    with ProgressBar(_WARMUP + iterations, "runs") as bar:
        return measure(
            path, iterations=iterations, warmup=_WARMUP, progress=lambda _done, _total: bar.advance(), **options
        )


def _write(report: LatencyReport | ThroughputReport, as_json: bool) -> None:
    from octavo.bench import DEFINITIONS

    figures: dict[str, Any] = asdict(report)
    definitions = {name: text for name, text in DEFINITIONS.items() if name in figures or name in ("spread", "load")}
    if as_json:
        write_json({**figures, "definitions": definitions})
        return
    machine = figures.pop("machine")
    threads, isa = machine["num_threads"], machine["isa"]
    write_facts(
        {
            "model": f"{machine['model']} ({machine['architecture']}, {size(machine['weight_bytes'])})",
            "machine": f"{machine['processor']}, {machine['num_cpus']} CPUs, {machine['system']}",
            "octavo": f"{machine['octavo']}, backend {machine['backend']}"
            + (f", {isa}" if isa else "")
            + (f", {threads} threads" if threads else ""),
        }
    )
    write("\n" + f"{'figure':<25}{'median':>12}{'low':>12}{'high':>12}\n")
    for name, value in figures.items():
        if isinstance(value, dict):
            write(f"{name:<25}{value['median']:>12.4g}{value['low']:>12.4g}{value['high']:>12.4g}\n")
        elif value is not None:
            write(f"{name:<25}{value:>12.4g}\n")
    write("\n" + "".join(f"{name}: {text}\n" for name, text in definitions.items()))
