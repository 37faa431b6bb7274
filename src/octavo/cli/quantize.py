"""`octavo quantize` and `octavo convert`: change a model's types or its file format."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from octavo.cli.completion import complete_model
from octavo.cli.quantize_checkpoint import (
    check_folder_destination,
    check_no_checkpoint_options,
    checkpoint_options,
    is_checkpoint_type,
    quantize_to_checkpoint,
)
from octavo.cli.terminal import check_folder, find_model, write, write_json
from octavo.config import parse_bytes, scaled_path
from octavo.engine.loading.progress_bar import ProgressBar, size
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.compress.importance import ImportanceMatrix
    from octavo.compress.quantize import TypeChoice, TypeOptions
    from octavo.compress.source import SourceModel, SourceTensor
    from octavo.loader.checkpoint import Checkpoint
    from octavo.quantization.packed import WeightInfo

float_type = click.option(
    "--dtype",
    type=click.Choice(["f32", "f16", "bf16"]),
    default="f16",
    show_default=True,
    help="type of DST's matrices",
)
"""Option of commands that write float weights."""


@click.command()
@click.argument("source", shell_complete=complete_model, metavar="SRC")
@click.argument("destination", type=click.Path(path_type=Path), metavar="DST")
@click.option("--type", "type_name", help="type or mixture, such as q4_k_m, q8_0, gptq-4bit or awq")
@click.option(
    "--bpw",
    type=click.FloatRange(1, 32),
    metavar="BITS",
    help="instead of --type: find the mixture with the lowest measured loss within this many bits per weight",
)
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="text on which --bpw measures the loss [default: the text of --imatrix]; for gptq, awq and w8a8, "
    "the calibration data: text, or JSON lines of texts or conversations",
)
@click.option(
    "--tensor-type",
    "overrides",
    multiple=True,
    metavar="PATTERN=TYPE",
    help="type for tensors whose GGUF name matches this regular expression; the first match wins",
)
@click.option("--keep", multiple=True, metavar="PATTERN", help="regular expression for tensors to leave unchanged")
@click.option(
    "--imatrix",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE|TEXT",
    help="column importance: a llama-imatrix file, or a text to measure it on",
)
@click.option(
    "--save-imatrix",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="save the importance to this file, in llama.cpp's GGUF format",
)
@click.option(
    "--calibration-chunks",
    type=click.IntRange(1, 10_000),
    default=64,
    show_default=True,
    help="number of 512-token pieces to take from a text",
)
@checkpoint_options
@click.option("--max-part-size", metavar="SIZE", help="write parts of at most this size, such as 4GiB")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="threads; 0: one per core  [default: 0]")
@click.option("--force", is_flag=True, help="replace DST if it exists")
@click.option("--dry-run", is_flag=True, help="only show the types and the size")
@click.option("--json", "as_json", is_flag=True, help="write the report as JSON")
def quantize(**options: Any) -> None:
    """Quantize SRC to DST: a GGUF file or a checkpoint folder.

    SRC is a GGUF file or a safetensors checkpoint with float32, float16 or bfloat16 weights. A GGUF file that is
    already quantized is accepted with a warning. DST appears only when it is complete.

    These types write a checkpoint and need one as SRC: gptq-4bit (or 2, 3, 8 bits), rtn-4bit (rounded to nearest; or
    2, 3, 8 bits), awq, nf4, fp4, int8 (bitsandbytes), fp8, w8a8 and mxfp4 (compressed-tensors). If DST ends with
    .gguf, mxfp4 is the GGUF mixture of that name.
    """
    from octavo.compress.quantize import choose_types, nearest_file_type, parse_mixture
    from octavo.compress.source import open_source

    if (options["type_name"] is None) == (options["bpw"] is None):
        raise UsageError("give either --type or --bpw")
    options["max_part_bytes"] = max_part_bytes = _bytes_of(options["max_part_size"])
    if options["type_name"] is not None and is_checkpoint_type(options["type_name"], options["destination"]):
        path, _ = find_model(options["source"], {})
        quantize_to_checkpoint(path, [_pattern(text) for text in options["keep"]], options)
        return
    check_no_checkpoint_options(options)
    mixture = None if options["type_name"] is None else parse_mixture(options["type_name"])
    text = _calibration_text(options)
    type_options = _type_options(options["overrides"], options["keep"])
    destination: Path = options["destination"]
    path, _ = find_model(options["source"], {})
    with open_source(path) as model:
        check_destination(model.path, destination, options["force"] or options["dry_run"])
        importance = None
        if text is not None:
            importance = _importance(model, options["imatrix"], options["calibration_chunks"], options["save_imatrix"])
            choices = _choices_of_size(model, type_options, options["bpw"], text, importance)
        else:
            assert mixture is not None
            choices = choose_types(model, mixture, type_options, has_importance=options["imatrix"] is not None)
        _warn(choices)
        _warn_growth(choices)
        if not options["dry_run"]:
            if text is None:
                chunks, save = options["calibration_chunks"], options["save_imatrix"]
                importance = _importance(model, options["imatrix"], chunks, save)
            file_type = nearest_file_type(choices) if mixture is None else mixture.file_type
            _quantize(model, choices, Work(destination, file_type, importance, options["threads"], max_part_bytes))
        _report(choices, options["as_json"])


def _calibration_text(options: dict[str, Any]) -> Path | None:
    """Return the text on which --bpw measures losses, or None without --bpw.

    Raises UsageError if the text is missing, or if it is given without --bpw.
    """
    from octavo.compress.importance import is_text

    text: Path | None = options["calibration"]
    if options["bpw"] is None:
        if text is not None:
            raise UsageError("--calibration needs --bpw; without it, give the text to --imatrix")
        return None
    if text is None and options["imatrix"] is not None and is_text(options["imatrix"]):
        return cast(Path, options["imatrix"])
    if text is None:
        raise UsageError("--bpw measures the loss on a text: give --imatrix TEXT or --calibration TEXT")
    return text


def _choices_of_size(
    model: SourceModel, options: TypeOptions, bits: float, text: Path, importance: ImportanceMatrix | None
) -> list[TypeChoice]:
    """Choose the types that meet --bpw. The loss of each tensor is measured first, unless an earlier run has done
    so.
    """
    from octavo import env
    from octavo.compress.quantize import check_size, choose_by_size, free_tensors
    from octavo.compress.sensitivity import Measurements, Sensitivity, calibration_texts, least_bytes
    from octavo.loader.checkpoint import open_checkpoint
    from octavo.quality.figures import kl_divergence

    free = free_tensors(model, options)
    check_size(model, options, bits, {tensor.name: least_bytes(tensor) for tensor in free})
    columns = {} if importance is None else importance.columns()
    with closing(open_checkpoint(model.path)) as checkpoint, ProgressBar(announced=True) as progress:
        texts = calibration_texts(*tokens_of(checkpoint, text))
        known = Measurements(env.cache_dir() / "sensitivities", checkpoint, texts, columns)
        sensitivity = Sensitivity(checkpoint, texts, columns, kl_divergence)
        sensitivity.measure(free, known, lambda done, total: progress.update("measuring tensors", done, total))
        found = sensitivity.options(free, known, lambda done, total: progress.update("trying types", done, total))
    return choose_by_size(model, options, bits, {t.name: o for t, o in zip(free, found, strict=True)})


@click.command()
@click.argument("source", shell_complete=complete_model, metavar="SRC")
@click.argument("destination", type=click.Path(path_type=Path), metavar="DST")
@click.option(
    "--to",
    "form",
    type=click.Choice(["gguf", "safetensors"]),
    default="gguf",
    show_default=True,
    help="output format: a GGUF file, or a folder that transformers reads",
)
@click.option(
    "--dtype",
    type=click.Choice(["f32", "f16", "bf16"]),
    help="type of the matrices, or with --to safetensors of all tensors [default: as in SRC]",
)
@click.option(
    "--max-part-size", metavar="SIZE", help="parts or shards of at most this size, such as 4GiB [shards: 5GB]"
)
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="ADAPTER[:SCALE]",
    help="merge this adapter into the weights: a PEFT folder, or a GGUF file",
)
@click.option("--mmproj", is_flag=True, help="write only the image encoder, as llama.cpp's mmproj file")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="threads; 0: one per core  [default: 0]")
@click.option("--force", is_flag=True, help="replace DST if it exists")
@click.option("--json", "as_json", is_flag=True, help="write the report as JSON")
def convert(**options: Any) -> None:
    """Convert SRC to DST with float weights: GGUF or safetensors.

    DST is a GGUF file or, with --to safetensors, a new folder. It keeps the configuration, vocabulary, chat template
    and sampling defaults of SRC; anything that its format cannot hold is an error. DST appears only when it is
    complete. With --lora each weight becomes W + scale B A, computed in float32 and rounded once.

    A vision model needs two GGUF files: run the command once for the text model, and once with --mmproj for the image
    encoder.
    """
    from octavo.compress.quantize import TypeOptions, choose_types, parse_mixture

    max_part_bytes = _bytes_of(options["max_part_size"])
    destination: Path = options["destination"]
    if options["mmproj"]:
        _check_mmproj_options(destination, options)
    path, _ = find_model(options["source"], {})
    options["adapters"] = [_adapter(text) for text in options["adapters"]]
    if options["form"] == "safetensors":
        _write_folder(path, destination, max_part_bytes, options)
        return
    if options["mmproj"]:
        _write_mmproj(path, destination, options)
        return
    with _opened(path, options["adapters"]) as model:
        check_destination(model.path, destination, options["force"])
        mixture = parse_mixture(options["dtype"] or _float_type(model.path, model.tensors))
        choices = choose_types(model, mixture, TypeOptions())
        _warn(choices)
        _quantize(model, choices, Work(destination, mixture.file_type, None, options["threads"], max_part_bytes))
        _report(choices, options["as_json"])


def _check_mmproj_options(destination: Path, options: dict[str, Any]) -> None:
    from octavo.loader.model_file import is_mmproj

    for option, is_given in (
        ("--to safetensors", options["form"] != "gguf"),
        ("--lora", options["adapters"]),
        ("--max-part-size", options["max_part_size"]),
    ):
        if is_given:
            raise UsageError(f"--mmproj writes the image encoder in one GGUF file; leave out {option}")
    if not is_mmproj(destination.name):
        better = destination.with_name(f"mmproj-{destination.name}")
        raise UsageError(f"{destination}: the name must contain 'mmproj' so that Octavo finds the file; use {better}")


def _write_mmproj(path: Path, destination: Path, options: dict[str, Any]) -> None:
    from octavo.compress.mmproj import choose_float_types, open_mmproj_source
    from octavo.compress.quantize import parse_mixture

    with open_mmproj_source(path) as model:
        check_destination(model.path, destination, options["force"])
        mixture = parse_mixture(options["dtype"] or _float_type(model.path, model.tensors))
        choices = choose_float_types(model, mixture.base)
        _quantize(model, choices, Work(destination, mixture.file_type, None, options["threads"], None))
        _report(choices, options["as_json"])


def _opened(path: Path, adapters: Sequence[tuple[Path, float]]) -> AbstractContextManager[SourceModel]:
    from octavo.compress.source import open_source

    if not adapters:
        return open_source(path)
    from octavo.compress.merge import open_merged

    return open_merged(path, adapters)


def _adapter(text: str) -> tuple[Path, float]:
    """Parse `ADAPTER` or `ADAPTER:SCALE`. A path that exists is never split."""
    path, scale = (text, 1.0) if Path(text).exists() else scaled_path(text)
    return Path(path), scale


def _write_folder(path: Path, destination: Path, max_part_bytes: int | None, options: dict[str, Any]) -> None:
    from octavo.compress.to_safetensors import DEFAULT_SHARD_BYTES, write_checkpoint
    from octavo.loader.checkpoint import open_checkpoint

    with closing(open_checkpoint(path)) as checkpoint:
        check_folder_destination(checkpoint.path.parent, destination, options["force"])
        dtype = options["dtype"]
        if dtype is None and checkpoint.format == "gguf":
            dtype = _float_type(checkpoint.path, checkpoint.stored)
        with ProgressBar(in_bytes=True, announced=True) as progress:
            nbytes = write_checkpoint(
                checkpoint,
                destination,
                None if dtype is None else dtype.upper(),
                max_shard_bytes=max_part_bytes or DEFAULT_SHARD_BYTES,
                threads=options["threads"],
                report=lambda done, total: progress.update(f"writing {destination.name}", done, total),
                adapters=options["adapters"],
            )
    if options["as_json"]:
        write_json({"bytes": nbytes, "folder": str(destination)})
    else:
        write(f"{destination}: {size(nbytes)} of weights\n")


def _float_type(path: Path, tensors: Sequence[WeightInfo] | Sequence[SourceTensor]) -> str:
    """Return the type of most of a model's numbers. Raises UsageError if it is not a float type."""
    from octavo.quantization.packed import DENSE_TYPES

    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.type_name] += math.prod(tensor.shape)
    [(found, _)] = counts.most_common(1)
    if found not in DENSE_TYPES:
        raise UsageError(f"{path} is quantized, mostly as {found}; choose the new type with --dtype")
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """A quantization's output file and options."""

    destination: Path
    file_type: int
    importance: ImportanceMatrix | None
    threads: int
    max_part_bytes: int | None


def _quantize(model: SourceModel, choices: list[TypeChoice], work: Work) -> None:
    from octavo.compress.quantize import quantize_model

    with ProgressBar(in_bytes=True, announced=True) as progress:
        quantize_model(
            model,
            work.destination,
            choices,
            work.file_type,
            work.importance,
            threads=work.threads,
            max_part_bytes=work.max_part_bytes,
            report=lambda done, total: progress.update(f"writing {work.destination.name}", done, total),
        )


def _importance(model: SourceModel, path: Path | None, chunks: int, save: Path | None) -> ImportanceMatrix | None:
    """Read or measure the importance, and save it if requested."""
    from octavo.compress.importance import is_text, read_importance, write_importance

    if path is None:
        if save is not None:
            raise UsageError("--save-imatrix needs --imatrix TEXT, from which the importance is measured")
        return None
    matrix = _measured(model, path, chunks) if is_text(path) else read_importance(path)
    if not any(tensor.name in matrix.squares for tensor in model.tensors):
        raise UsageError(f"{path}: none of its names is a tensor of this model; give a file made for this model")
    if save is not None:
        write_importance(save, matrix)
    return matrix


def _measured(model: SourceModel, path: Path, chunks: int) -> ImportanceMatrix:
    from octavo.compress.importance import ImportanceMatrix, split_text
    from octavo.compress.measured_importance import measure
    from octavo.loader.checkpoint import open_checkpoint

    with closing(open_checkpoint(model.path)) as checkpoint, ProgressBar(announced=True) as progress:
        ids, first = tokens_of(checkpoint, path)
        texts = split_text(ids, chunks, first)
        squares = measure(checkpoint, texts, lambda done, total: progress.update("measuring layers", done, total))
    names = {stored: tensor.name for tensor in model.tensors for stored in tensor.stored}
    squares = {names[stored]: found for stored, found in squares.items()}
    return ImportanceMatrix(squares, path.name, path.name, len(texts), len(texts[0]))


def tokens_of(checkpoint: Checkpoint, path: Path) -> tuple[list[int], int | None]:
    """Return the tokens of a text, and the token with which texts of this model begin, if any.

    Raises UsageError if the text is not UTF-8.
    """
    from octavo.quality.texts import read_utf8
    from octavo.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    return tokenizer.encode(read_utf8(path)), tokenizer.prefix_ids[0] if tokenizer.prefix_ids else None


def _type_options(overrides: tuple[str, ...], keep: tuple[str, ...]) -> TypeOptions:
    from octavo.compress.quantize import TypeOptions, parse_type

    found = []
    for text in overrides:
        pattern, equals, type_name = text.rpartition("=")
        if not equals or not pattern:
            raise UsageError(f"--tensor-type {text!r}: write PATTERN=TYPE, such as 'ffn_down=q6_k'")
        found.append((_pattern(pattern), parse_type(type_name)))
    return TypeOptions(found, [_pattern(text) for text in keep])


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageError(f"pattern {text!r} is not a regular expression: {error}") from error


def _bytes_of(text: str | None) -> int | None:
    return None if text is None else parse_bytes("--max-part-size", text)


def check_destination(source: Path, destination: Path, may_replace: bool) -> None:
    if destination.suffix != ".gguf":
        raise UsageError(f"{destination}: the name must end with .gguf")
    check_folder(destination)
    if destination.exists():
        if os.path.samefile(source, destination):
            raise UsageError(f"{destination}: this is the source; choose another name")
        if not may_replace:
            raise UsageError(f"{destination}: already exists; --force replaces it")


def _warn(choices: list[TypeChoice]) -> None:
    from octavo.quantization.packed import DENSE_TYPES

    again = [c for c in choices if c.tensor.type_name not in {*DENSE_TYPES, c.type_name}]
    if again:
        first = again[0]
        advice = (
            "their floats are only as exact as the quantized weights: use the float model if there is one"
            if first.type_name in DENSE_TYPES
            else "quantizing the float model gives a better result"
        )
        click.echo(
            f"octavo: warning: {len(again)} tensors are already quantized, {first.tensor.name} as "
            f"{first.tensor.type_name}; {advice}",
            err=True,
        )
    if misfits := [c for c in choices if "does not fit" in c.note]:
        first = misfits[0]
        click.echo(
            f"octavo: {len(misfits)} tensors have a width that their type does not support; "
            f"{first.tensor.name}: {first.note}, so it is {first.type_name}",
            err=True,
        )


def _warn_growth(choices: list[TypeChoice]) -> None:
    from octavo.quantization.ggml import stored_bytes

    before = sum(stored_bytes(choice.tensor.type_name, choice.tensor.shape) for choice in choices)
    if (after := sum(choice.nbytes for choice in choices)) > before:
        click.echo(
            f"octavo: warning: the result is larger than SRC, {size(after)} instead of {size(before)}: choose a type "
            "with fewer bits",
            err=True,
        )


def _report(choices: list[TypeChoice], as_json: bool) -> None:
    from octavo.compress.quantize import bits_per_weight

    counts = Counter(choice.type_name for choice in choices)
    nbytes = sum(choice.nbytes for choice in choices)
    bits = bits_per_weight(choices)
    if as_json:
        types = {c.tensor.name: c.type_name for c in choices}
        write_json({"bytes": nbytes, "bits_per_weight": round(bits, 4), "tensors": types})
    else:
        found = ", ".join(f"{count} {type_name}" for type_name, count in counts.most_common())
        write(f"{size(nbytes)}, {bits:.2f} bits per weight; tensors: {found}\n")
