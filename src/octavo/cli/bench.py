"""`octavo bench`: measure the speed of a model on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.options import DEFAULT_MODEL, Options, with_engine_options
from octavo.cli.terminal import (
    find_model,
    show_help_without_command,
    write,
    write_facts,
    write_json,
    write_note,
    write_table,
)
from octavo.engine.loading.progress_bar import size

if TYPE_CHECKING:
    from octavo.bench import LatencyReport, ProfileReport, SpeculationReport, StepProfile, ThroughputReport


class _Commands(click.Group):
    """Commands of `octavo bench`; `octavo bench --profile MODEL` runs `profile`."""

    command_class = HeadedCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["profile", *args[1:]] if args[:1] == ["--profile"] else args)


_Command = TypeVar("_Command", bound=Callable[..., None])


def _number(flag: str, default: int | tuple[int, ...], text: str) -> Callable[[_Command], _Command]:
    return click.option(
        flag,
        type=click.IntRange(min=1),
        default=default,
        multiple=isinstance(default, tuple),
        show_default=True,
        help=text,
    )


_model = click.argument("model", shell_complete=complete_model, default=DEFAULT_MODEL)
_as_json = click.option("--json", "as_json", is_flag=True, help="write JSON")
# Upper bounds in the header of a step's table, in units of 10^9/s.
_BANDWIDTHS = {"read from memory": "{:.1f} GB/s from memory", "read from L2": "{:.0f} GB/s from L2"}


@click.group(cls=_Commands, invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure the speed of a model on this machine."""
    show_help_without_command(context)


@bench.command()
@_model
@_number("--input-len", 32, "tokens of each prompt")
@_number("--output-len", 128, "tokens of each answer")
@_number("--batch-size", 1, "concurrent requests")
@_number("--iterations", 10, "measured runs")
@_as_json
@with_engine_options
def latency(*, model: str, as_json: bool, engine_options: Options, **load: int) -> None:
    """Measure the latency of one batch of requests."""
    from octavo.bench import latency as measure

    _write(_measured(measure, model, engine_options, load), as_json)


@bench.command()
@_model
@_number("--input-len", 128, "tokens of each prompt")
@_number("--output-len", 128, "tokens of each answer")
@_number("--num-prompts", 64, "requests submitted at once")
@_number("--iterations", 3, "measured runs")
@_as_json
@with_engine_options
def throughput(*, model: str, as_json: bool, engine_options: Options, **load: int) -> None:
    """Measure the throughput of many requests submitted at once."""
    from octavo.bench import throughput as measure

    _write(_measured(measure, model, engine_options, load), as_json)


@bench.command()
@_model
@_number("--rows", (1, 8, 16), "sequences per decode step; may be repeated")
@_number("--prefill", (512,), "tokens of a prompt; may be repeated")
@_number("--context", 128, "context tokens per sequence in a decode step")
@_number("--iterations", 40, "steps of each kind; the fastest quarter is averaged")
@_as_json
@with_engine_options
def profile(*, model: str, as_json: bool, engine_options: Options, **load: Any) -> None:
    """Show each operation's time in a step, and the shortest possible.

    The shortest possible time is calculated from the measured bandwidth and speed of this machine. `octavo bench
    --profile` is the same command.
    """
    from octavo.bench import profile as measure

    report = _measured(measure, model, engine_options, load)
    if as_json:
        write_json(asdict(report))
    else:
        _write_profile(report)


@bench.command()
@_model
@_number("--turns", 3, "measured rounds, each without and with drafts")
@_number("--output-len", 300, "maximum tokens per answer")
@_number("--users", 1, "concurrent prompts; 8 runs all kinds at once")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="temperature of the answers"
)
@click.option("--kind", "kinds", multiple=True, help="kind of text to measure [default: all eight]; may be repeated")
@_as_json
@with_engine_options
def speculation(*, model: str, as_json: bool, engine_options: Options, **load: Any) -> None:
    """Measure how much drafts speed up generation for each kind of text.

    Also checks that answers stay the same.
    """
    from octavo.bench import speculation as measure

    report = _measured(measure, model, engine_options, load)
    if as_json:
        write_json(asdict(report))
    else:
        _write_speculation(report)


def _write_speculation(report: SpeculationReport) -> None:
    machine, users = report.machine, "1 user" if report.users == 1 else f"{report.users} users"
    write_facts(
        {
            "model": f"{machine.model} ({machine.architecture}, {size(machine.weight_bytes)})",
            "machine": f"{machine.processor}, {machine.num_cpus} CPUs, {machine.isa or machine.backend}",
            "load": f"{users}, temperature {report.temperature:g}, {report.turns} turns",
        }
    )
    rows = [
        {
            "kind of text": each.kind,
            "tokens": f"{each.num_tokens}",
            "right": "-" if each.accepted_share is None else f"{each.accepted_share:.0%}",
            "a step": f"{each.tokens_per_step:.2f}",
            "off": f"{each.plain_tokens_per_s:.1f}",
            "on": f"{each.tokens_per_s:.1f}",
            "gain": f"{each.gain:.2f}",
            "first": f"{each.first_token_ratio:.2f}",
        }
        for each in report.kinds
    ]
    write("\n")
    write_table(rows, right=("tokens", "right", "a step", "off", "on", "gain", "first"))
    bits = "the same, bit for bit" if report.are_equal else "NOT the same"
    edits = "" if report.edit_gain is None else f"edits {report.edit_gain:.2f}, "
    write_note(
        f"\n{edits}all {report.gain:.2f} (geometric means), worst {report.worst_gain:.2f}\n"
        f"answers with drafts are {bits}\n\n"
        "right: share of correct drafts. a step: tokens per step. off, on: tokens/s after the first token, without and "
        "with drafts. gain: median over the turns. first: time to the first token, with drafts relative to without."
    )


_Report = TypeVar("_Report")


def _measured(measure: Callable[..., _Report], model: str, options: Options, load: dict[str, Any]) -> _Report:
    path, options = find_model(model, options)
    return measure(str(path), show_progress=True, **load, **options)


def _write_profile(report: ProfileReport) -> None:
    ceilings = report.steps[0].ceilings
    write_facts(
        {
            "model": f"{report.model} ({report.architecture}, {size(report.weight_bytes)})",
            "kernels": f"{ceilings.isa}, {ceilings.threads} threads",
        }
    )
    for step in report.steps:
        _write_step(step)
    write_note(
        "\nms: time per step, mean of the fastest quarter of the steps. ceiling: the least possible time for these "
        "bytes and FLOPs at the measured ceilings, divided by the actual time. lost: time above the least possible. "
        "wait: share of the threads' time spent waiting for the slowest thread."
    )


def _write_step(step: StepProfile) -> None:
    """Write the table of one step, sorted by time lost."""
    ceilings = step.ceilings
    limits = [text.format(ceilings.value(name) / 1e9) for name, text in _BANDWIDTHS.items()]
    products = (ceilings.product_rate, "float multiply-adds")
    limits += [f"{ceilings.value(name) / 1e9:.0f} G {name}/s" for name in products]
    write_note(f"\n{step.name}, context {step.context}; ceilings:  " + ", ".join(limits))
    rows = []
    for operation in step.by_kind():
        seconds = operation.seconds
        wait = operation.waiting_seconds / (ceilings.threads * seconds) if seconds else 0.0
        rows.append(
            {
                "operation": operation.label,
                "count": f"{operation.count}",
                "ms": f"{1e3 * seconds:.3f}",
                "MB": f"{operation.bytes_moved / 1e6:.2f}",
                "MFLOP": f"{operation.flops / 1e6:.1f}",
                "ceiling": f"{operation.fraction_of_ceiling:.0%}",
                "lost ms": f"{1e3 * (seconds - operation.least_seconds):.3f}",
                "wait": f"{wait:.0%}",
            }
        )
    total, wall = step.operation_seconds, step.seconds
    rows.append(dict.fromkeys(rows[0], "") | {"operation": "all operations", "ms": f"{1e3 * total:.3f}"})
    rows.append(dict.fromkeys(rows[0], "") | {"operation": "wall time of the step", "ms": f"{1e3 * wall:.3f}"})
    write_table(rows, right=[name for name in rows[0] if name != "operation"])
    write(f"operations take {total / wall:.1%} of it\n")


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
    rows = []
    for name, value in figures.items():
        spread = value if isinstance(value, dict) else {"median": value}
        if value is not None:
            numbers = {key: f"{spread[key]:.4g}" if key in spread else "" for key in ("median", "low", "high")}
            rows.append({"figure": name, **numbers})
    write("\n")
    write_table(rows, right=("median", "low", "high"))
    write_note("\n" + "\n".join(f"{name}: {text}" for name, text in definitions.items()))
