"""`octavo bench`: how fast a model is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from octavo.cli.options import Options, with_engine_options
from octavo.cli.run import DEFAULT_MODEL
from octavo.cli.terminal import find_model, size, write, write_facts, write_json

if TYPE_CHECKING:
    from octavo.bench import LatencyReport, ProfileReport, StepProfile, ThroughputReport


class _Commands(TyperGroup):
    """`octavo bench --profile MODEL` is the command profile."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # ctx: typer's own copy of click or click's
        return super().parse_args(ctx, ["profile", *args[1:]] if args[:1] == ["--profile"] else args)


bench = typer.Typer(
    cls=_Commands, help="Measure how fast a model is on this machine.", no_args_is_help=True, rich_markup_mode=None
)

Model = Annotated[str, typer.Argument(help="path, hub id or short name")]
InputLen = Annotated[int, typer.Option(help="tokens of each prompt", min=1)]
OutputLen = Annotated[int, typer.Option(help="tokens of each answer", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="as JSON")]

_WARMUP = 1
# What the header of a step's table says of its ceilings, in units of 10^9 a second.
_CEILINGS = {
    "read from memory": "{:.1f} GB/s from memory",
    "read from L2": "{:.0f} GB/s from L2",
    "int8 multiply-adds": "{:.0f} G int8 multiply-adds/s",
    "float multiply-adds": "{:.0f} G float multiply-adds/s",
}
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


@bench.command()
@with_engine_options
def profile(
    *,
    model: Model = DEFAULT_MODEL,
    rows: Annotated[list[int], typer.Option(help="sequences of a decode step; may be given several times", min=1)] = [  # noqa: B006
        1,
        8,
        16,
    ],
    prefill: Annotated[list[int], typer.Option(help="tokens of a prompt; may be given several times", min=1)] = [512],  # noqa: B006
    context: Annotated[int, typer.Option(help="tokens of each sequence in a decode step", min=1)] = 128,
    iterations: Annotated[int, typer.Option(help="steps of each kind; the fastest quarter counts", min=1)] = 40,
    as_json: AsJson = False,
    engine_options: Options,
) -> None:
    """Show where the time of a step goes, beside what this machine can do at best. Also: octavo bench --profile."""
    from octavo.bench import profile as measure
    from octavo.engine.progress import ProgressBar

    path = str(find_model(model))
    with ProgressBar(len(rows) + len(prefill), "kinds of steps") as bar:
        report = measure(
            path, rows, prefill, context, iterations, progress=lambda _done, _total: bar.advance(), **engine_options
        )
    if as_json:
        write_json(asdict(report))
    else:
        _write_profile(report)


def _write_profile(report: ProfileReport) -> None:
    ceilings = report.steps[0].ceilings
    write_facts(
        {
            "model": f"{report.model} ({report.architecture}, {size(report.weight_bytes)})",
            "kernels": f"{ceilings.isa}, {ceilings.threads} threads",
        }
    )
    for step in report.steps:
        write("\n" + "\n".join(_step_lines(step)) + "\n")
    write(
        "\nms: of one step, mean of the fastest quarter of the steps. ceiling: the least time that bytes and FLOPs\n"
        "need by the measured ceilings, divided by the time. lost: time beyond that. wait: share of the threads' time\n"
        "spent waiting for the slowest.\n"
    )


def _step_lines(step: StepProfile) -> list[str]:
    """A table of one step, the operation with the most to gain first."""
    ceilings = step.ceilings
    rates = {name: ceilings.value(name) / 1e9 for name in _CEILINGS}
    lines = [
        f"{step.name}, context {step.context}; at most " + ", ".join(_CEILINGS.values()).format(*rates.values()),
        f"{'operation':<36}{'count':>6}{'ms':>9}{'MB':>9}{'MFLOP':>10}{'ceiling':>9}{'lost ms':>9}{'wait':>6}",
    ]
    for operation in step.by_kind():
        seconds = operation.seconds
        wait = operation.waiting_seconds / (ceilings.threads * seconds) if seconds else 0.0
        lines.append(
            f"{operation.label:<36}{operation.count:>6}{1e3 * seconds:>9.3f}{operation.bytes_moved / 1e6:>9.2f}"
            f"{operation.flops / 1e6:>10.1f}{operation.fraction_of_ceiling:>9.0%}"
            f"{1e3 * (seconds - operation.least_seconds):>9.3f}{wait:>6.0%}"
        )
    total, wall = step.operation_seconds, step.seconds
    lines.append(f"{'all operations':<42}{1e3 * total:>9.3f}")
    lines.append(f"{'wall time of the step':<42}{1e3 * wall:>9.3f}   operations are {total / wall:.1%} of it")
    return lines


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
