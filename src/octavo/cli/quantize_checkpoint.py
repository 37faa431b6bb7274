"""`octavo quantize` for the types of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from octavo.cli.terminal import check_folder, write, write_json
from octavo.engine.loading.progress_bar import ProgressBar, size
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.backends.layers import Tokens
    from octavo.compress.checkpoints.methods import QuantizationMethod
    from octavo.compress.checkpoints.quantization_plan import QuantizationPlan
    from octavo.loader.checkpoint import Checkpoint

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ONLY_GGUF = {
    "overrides": "--tensor-type",
    "imatrix": "--imatrix",
    "save_imatrix": "--save-imatrix",
    "threads": "--threads",
}
_OPTIONS = {
    "group_size": "--group-size",
    "act_order": "--act-order",
    "asymmetric": "--asymmetric",
    "damping": "--damping",
    "smoothing": "--smoothing",
}


def checkpoint_options(command: _Command) -> _Command:
    """Add the options for types of Hugging Face checkpoints to a command."""
    decorators = [
        click.option(
            "--group-size",
            type=click.Choice(["32", "64", "128", "-1"]),
            help="gptq, rtn, awq: columns per scale; -1 means the whole row  [default: 128 if it fits]",
        ),
        click.option("--act-order", is_flag=True, help="gptq: quantize the most important columns first (desc_act)"),
        click.option("--asymmetric", is_flag=True, help="gptq, rtn: use a zero point for each group"),
        click.option(
            "--damping",
            type=click.FloatRange(0, 1, min_open=True),
            help="gptq: damping of the Gram matrix, as a share of its mean  [default: 1]",
        ),
        click.option(
            "--smoothing",
            type=click.FloatRange(0, 1),
            help="w8a8: how much of the activations' range to move to the weights; 0: none  [default: 0.5]",
        ),
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def is_checkpoint_type(name: str, destination: Path) -> bool:
    """Return True for a type of Hugging Face checkpoints. `mxfp4` is also a GGUF type, so the destination decides.

    Raises UsageError for a name without its bits, such as `gptq`, and for an unknown name.
    """
    from octavo.compress.mixtures import MIXTURES, find_mixture

    if destination.suffix == ".gguf" and find_mixture(name) is not None:
        return False
    from octavo.compress.checkpoints.methods import TYPES

    if name.lower() in ("gptq", "rtn"):
        found = ", ".join(known for known in TYPES if known.startswith(name.lower()))
        raise UsageError(f"type {name!r}: add the number of bits: {found}", param="type")
    if name.lower() not in TYPES and find_mixture(name) is None:
        known = f"{', '.join(MIXTURES)}; for checkpoints {', '.join(TYPES)}"
        raise UsageError(f"type {name!r} is unknown; choose one of {known}", param="type")
    return name.lower() in TYPES


def check_no_checkpoint_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that GGUF types do not support."""
    for name, flag in _OPTIONS.items():
        if options[name] is not None and options[name] is not False:  # zero counts as a given value
            asked = "--bpw" if options["type_name"] is None else f"--type {options['type_name']}"
            raise UsageError(
                f"{flag} does not apply to {asked} and a GGUF file; it is for gptq, rtn, awq or w8a8 checkpoints",
                param=name,
            )


def quantize_to_checkpoint(path: Path, keep: list[re.Pattern[str]], options: Mapping[str, Any]) -> None:
    """Write the folder or, with `--dry-run`, describe it. `options` must also contain `max_shard_bytes`."""
    from octavo.compress.checkpoints.methods import choose_method
    from octavo.compress.checkpoints.quantization_plan import plan_quantization
    from octavo.loader.checkpoint import open_checkpoint

    for name, flag in _ONLY_GGUF.items():
        if options[name]:
            raise UsageError(
                f"{flag} is for GGUF types; --type {options['type_name']} writes a checkpoint, which takes --keep, "
                "--calibration and --group-size: leave it out",
                param=name,
            )
    destination: Path = options["destination"]
    with closing(open_checkpoint(path)) as checkpoint:
        check_folder_destination(checkpoint.path.parent, destination, options["force"] or options["dry_run"])
        plan = plan_quantization(checkpoint, keep)
        widths = [plan.shape(name)[1] for name in plan.names]
        type_name = options["type_name"].lower()
        method = choose_method(type_name, _choices(options), widths, _model_dtype(checkpoint, plan.names[0]))
        for name in plan.names:
            method.check(name, plan.shape(name))
        if options["dry_run"]:
            _report(plan, method, None, options["as_json"])
            return
        _run(plan, method, _texts(method, checkpoint, options), options)


def _choices(options: Mapping[str, Any]) -> Any:
    from octavo.compress.checkpoints.methods import Choices

    return Choices(
        group_size=int(options["group_size"]) if options["group_size"] else None,
        symmetric=False if options["asymmetric"] else None,
        act_order=options["act_order"] or None,
        damping=options["damping"],
        strength=options["smoothing"],
    )


def _model_dtype(checkpoint: Checkpoint, tensor: str) -> str:
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    return names[checkpoint.file.tensors[tensor].type_name]


def _texts(method: QuantizationMethod, checkpoint: Checkpoint, options: Mapping[str, Any]) -> list[Tokens]:
    from octavo.compress.checkpoints.calibration import read_calibration

    path: Path | None = options["calibration"]
    if not method.needs_inputs:
        if path is not None:
            raise UsageError(
                f"--calibration does not apply to --type {options['type_name']}; leave it out", param="calibration"
            )
        return []
    if path is None:
        raise UsageError(
            f"--type {options['type_name']} needs --calibration FILE: a few pages of text like the model will see",
            param="calibration",
        )
    return read_calibration(path, checkpoint, options["calibration_chunks"])


def _run(plan: QuantizationPlan, method: QuantizationMethod, texts: list[Tokens], options: Mapping[str, Any]) -> None:
    from octavo.compress.checkpoints.write import quantize_checkpoint

    destination: Path = options["destination"]
    tokens, widest = sum(map(len, texts)), max(plan.shape(name)[1] for name in plan.names)
    if method.kind == "gptq" and tokens < widest:
        click.echo(
            f"octavo: warning: the calibration text has {tokens:,} tokens, fewer than the {widest:,} columns of the "
            "widest matrix, so the result overfits that text: give more text, or raise --calibration-chunks",
            err=True,
        )
    if destination.with_name(f"{destination.name}.partial").exists():
        click.echo(f"octavo: {destination}.partial: looking for layers finished by an earlier run", err=True)
    with ProgressBar(announced=True) as progress:
        result = quantize_checkpoint(
            plan,
            method,
            texts,
            destination,
            max_shard_bytes=options["max_part_bytes"],
            report=lambda done, total: progress.update("quantizing layers", done, total),
        )
    if result.resumed:
        click.echo(f"octavo: {result.resumed} of {len(plan.layers)} layers were finished by an earlier run", err=True)
    if result.unseen:
        click.echo(
            f"octavo: warning: no token of the calibration text reached {len(result.unseen)} matrices of experts, such "
            f"as {result.unseen[0]}; they were rounded to nearest: give more text",
            err=True,
        )
    _report(plan, method, result.nbytes, options["as_json"])


def check_folder_destination(source: Path, destination: Path, may_replace: bool) -> None:
    """Raise UsageError unless a model's folder can be written there.

    source: folder of the source model
    """
    if destination.suffix in (".gguf", ".safetensors"):
        raise UsageError(f"{destination}: the result is a folder; give it a name without {destination.suffix}")
    check_folder(destination)
    if not destination.exists():
        return
    if destination.resolve() == source.resolve():
        raise UsageError(f"{destination}: this is the source; choose another name")
    if not may_replace:
        raise UsageError(f"{destination}: already exists; --force replaces it")
    if not destination.is_dir() or destination.is_symlink() or not (destination / "config.json").is_file():
        raise UsageError(f"{destination}: --force only replaces a model's folder, one with a config.json")


def _report(plan: QuantizationPlan, method: QuantizationMethod, nbytes: int | None, as_json: bool) -> None:
    numbers = sum(plan.shape(name)[0] * plan.shape(name)[1] for name in plan.names)
    group = method.form.group or "row"
    if as_json:
        found = {"matrices": len(plan.names), "numbers": numbers, "bits": method.form.bits, "left": list(plan.left)}
        write_json(found | ({} if nbytes is None else {"bytes": nbytes}))
        return
    text = f"{len(plan.names)} matrices, {numbers:,} numbers of {method.form.bits} bits"
    if method.kind in ("gptq", "rtn", "awq"):
        text += f", groups of {group}" if method.form.group else ", a scale for each row"
    write(text + (f"; {size(nbytes)} in total\n" if nbytes is not None else "\n"))
