"""`octavo plan --simulate`: compare ways to divide a model among many machines."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.terminal import write_json
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import size
from octavo.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.bench.simulation import Division, Load, Machines
    from octavo.loader.checkpoint import Checkpoint

HELP = (
    "compare ways to divide the model among simulated machines; NAME is nodes (such as 2+8), sockets, bandwidth, "
    "compute or memory (of a socket), latency or link (between machines), local_latency or local_link (between "
    "sockets), or efficiency; NUMBER is in bytes, seconds or operations per second"
)
_NODES = (2, 4, 8, 16, 32, 64)
_SHOWN = 4  # choices shown per number of machines
MOST_CANDIDATES = 256  # per rank and row of logits


def write_simulation(
    checkpoint: Checkpoint,
    config: EngineConfig,
    text: str,
    context: int,
    users: int,
    *,
    whole_experts: bool,
    as_json: bool,
) -> None:
    """Simulate the divisions of a model and write a table of the results.

    text: value of --simulate
    context: tokens per user
    whole_experts: give each rank whole experts of a mixture
    """
    from octavo.bench.simulation import Load, simulate
    from octavo.engine.loading.devices import backend_name
    from octavo.loader.generation_config import sampling_defaults

    sampling = sampling_defaults(checkpoint, config.generation_config).overridden(config.sampling_overrides)
    try:
        several = replace(config, tensor_parallel_size=max(config.tensor_parallel_size, 2))
    except UsageError as error:
        raise UsageError(f"--simulate divides the model among several ranks: {error}") from None
    on_torch = backend_name(several).startswith("torch")
    whole_logits = needs_all_logits(sampling.numbers, on_torch=on_torch)
    load = Load(context, users, whole_experts, whole_logits)
    nodes, machines = machines_of(text)
    choices = simulate(checkpoint, config, machines, nodes, load)
    assumptions = _assumptions(load, sampling.source)
    if as_json:
        found = [asdict(each) for each in choices]
        write_json({"machines": asdict(machines), "load": asdict(load), "assumptions": assumptions, "choices": found})
        return
    click.echo(
        f"{machines.sockets} sockets a machine, {size(int(machines.memory))} each, {machines.bandwidth / 1e9:.4g} GB/s "
        f"and {machines.compute / 1e9:.4g} G operations/s at {machines.efficiency:.0%}; link "
        f"{machines.link / 1e9:.4g} GB/s, {machines.latency * 1e6:.4g} us; {users} users of {context:,} tokens"
    )
    for assumption in assumptions:
        click.echo(assumption)
    click.echo("nodes  tensor  pipeline  replicas  memory per rank  one user   all users  first token")
    for count in nodes:
        for each in [each for each in choices if each.nodes == count][:_SHOWN]:
            click.echo(_row(each))


def needs_all_logits(sampling: Mapping[str, int | float], *, on_torch: bool = False) -> bool:
    """Return True if the ranks must exchange all logits, because sampling needs more than their best candidates.

    The rules match csrc/sample_plan.h and, on torch, `octavo.backends.torch.rank_sampling.offers_of`, where only
    `top_k` limits the candidates.
    """
    temperature, top_k, top_p, min_p, typical_p = (
        sampling.get(name, neutral)
        for name, neutral in (("temperature", 1), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("typical_p", 1))
    )
    if temperature <= 0 or 0 < top_k <= MOST_CANDIDATES:
        return False
    if on_torch or min_p > 0:
        return on_torch
    return not (top_p < 1 and top_k <= 0 and typical_p >= 1)


def _assumptions(load: Load, sampling: str) -> list[str]:
    how = (
        "from all logits, which the ranks of a stage gather"
        if load.whole_logits
        else "from the best candidates of each rank, whose exchange is not counted"
    )
    found = [
        "Computed, not measured: a step takes as long as its bytes or operations, plus its exchanges. Scheduling, "
        "sampling, uneven request lengths and other traffic are ignored: the real speed is lower.",
        f"The ranks of a machine are its sockets. Tokens are sampled {how} (sampling options: {sampling}).",
    ]
    if load.whole_experts:
        found.append(
            "Whole experts on each rank. Assumes that tokens choose experts evenly and independently, and the ranks of "
            "a stage wait for the busiest one. Real texts choose less evenly: the real speed is lower."
        )
    return found


def _row(each: Division) -> str:
    notes = ("" if each.fits else "  does not fit") + ("" if each.runs else "  tensor parallel between machines")
    return (
        f"{each.nodes:5}{each.tensor_parallel:8}{each.pipeline_parallel:10}{each.replicas:10}"
        f"{size(each.rank_bytes):>18}{each.tokens_per_s_of_one:7.3g} /s{each.tokens_per_s:9.4g} /s"
        f"{each.first_token_s:11.3g} s{notes}"
    )


def machines_of(text: str) -> tuple[list[int], Machines]:
    """Parse `nodes=2+8,link=3e9` to the numbers of machines and the figures that describe them.

    Raises UsageError naming an invalid part.
    """
    from octavo.bench.simulation import Machines

    known = {field.name for field in fields(Machines)}
    given: dict[str, float] = {}
    nodes = list(_NODES)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name != "nodes" and name not in known:
            raise UsageError(f"--simulate: {name!r} is not one of nodes, {', '.join(sorted(known))}")
        try:
            if name == "nodes":
                nodes = [int(each) for each in value.split("+")]
            else:
                given[name] = float(value)
        except ValueError:
            raise UsageError(f"--simulate: {part!r} is not NAME=NUMBER") from None
    if not nodes or min([*nodes, *given.values()]) <= 0 or max(nodes) > 1024:
        raise UsageError(f"--simulate: {text!r} has a figure that is not positive, or more than 1024 nodes")
    missing = ", ".join(name for name in ("bandwidth", "compute", "memory") if name not in given)
    if missing:
        raise UsageError(
            f"--simulate needs {missing} of a socket; `python benchmarks/ceilings.py` measures a machine's rates"
        )
    options: dict[str, Any] = {**given, "sockets": int(given.get("sockets", 1))}
    return nodes, Machines(**options)
