"""`octavo quantize` and `octavo convert`: a model as a GGUF file, of smaller types or of floats."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.completion import complete_model
from octavo.cli.terminal import check_folder, find_model, write, write_json
from octavo.engine.progress import ProgressBar, size
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.compress.importance import ImportanceMatrix
    from octavo.compress.quantize import TypeChoice, TypeOptions
    from octavo.compress.source import SourceModel


@click.command()
@click.argument("source", shell_complete=complete_model, metavar="SRC")
@click.argument("destination", type=click.Path(path_type=Path), metavar="DST")
@click.option("--type", "type_name", required=True, help="type or mixture, such as q4_k_m, q8_0, iq4_xs or f16")
@click.option(
    "--tensor-type",
    "overrides",
    multiple=True,
    metavar="PATTERN=TYPE",
    help="another type for tensors in whose GGUF name this regular expression is found; the first match counts",
)
@click.option("--keep", multiple=True, metavar="PATTERN", help="tensors that stay as they are; a regular expression")
@click.option(
    "--imatrix",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE|TEXT",
    help="importance of columns: a file of llama-imatrix, or a text on which it is measured",
)
@click.option(
    "--save-imatrix",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="keep the importance for the next time, in llama.cpp's GGUF form",
)
@click.option(
    "--calibration-chunks",
    type=click.IntRange(1, 10_000),
    default=64,
    show_default=True,
    help="pieces of 512 tokens that are taken of a text",
)
@click.option("--max-part-size", metavar="SIZE", help="write parts of at most this size, such as 4GiB")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="0: one for each core  [default: 0]")
@click.option("--force", is_flag=True, help="replace DST if it exists")
@click.option("--dry-run", is_flag=True, help="only show the types and the size")
@click.option("--json", "as_json", is_flag=True, help="write the report as JSON")
def quantize(**options: Any) -> None:
    """Write SRC as the GGUF file DST with smaller types.

    SRC has float32, float16 or bfloat16 weights: a GGUF file, or a safetensors checkpoint, which is converted on the
    way. A GGUF file that is quantized already is accepted with a warning. The file appears under its name when it is
    complete.
    """
    from octavo.compress.quantize import choose_types, parse_mixture
    from octavo.compress.source import open_source

    mixture = parse_mixture(options["type_name"])
    type_options = _type_options(options["overrides"], options["keep"])
    max_part_bytes = _bytes_of(options["max_part_size"])
    destination: Path = options["destination"]
    path, _ = find_model(options["source"], {})
    with open_source(path) as model:
        _check_destination(model.path, destination, options["force"] or options["dry_run"])
        choices = choose_types(model, mixture, type_options, has_importance=options["imatrix"] is not None)
        _warn(choices)
        if not options["dry_run"]:
            importance = _importance(model, options["imatrix"], options["calibration_chunks"], options["save_imatrix"])
            work = Work(destination, mixture.file_type, importance, options["threads"], max_part_bytes)
            _quantize(model, choices, work)
        _report(choices, options["as_json"])


@click.command()
@click.argument("source", shell_complete=complete_model, metavar="SRC")
@click.argument("destination", type=click.Path(path_type=Path), metavar="DST")
@click.option("--to", "form", type=click.Choice(["gguf"]), default="gguf", show_default=True, help="form of the result")
@click.option("--dtype", type=click.Choice(["f32", "f16", "bf16"]), help="type of the matrices [default: as in SRC]")
@click.option("--max-part-size", metavar="SIZE", help="write parts of at most this size, such as 4GiB")
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="0: one for each core  [default: 0]")
@click.option("--force", is_flag=True, help="replace DST if it exists")
@click.option("--json", "as_json", is_flag=True, help="write the report as JSON")
def convert(**options: Any) -> None:
    """Write SRC, a safetensors checkpoint or a GGUF file, as the GGUF file DST with float weights.

    The result has the configuration, vocabulary, chat template and sampling of SRC. It is checked before anything is
    written: what a GGUF file cannot say is an error. The file appears under its name when it is complete.
    """
    from octavo.compress.quantize import TypeOptions, choose_types, parse_mixture
    from octavo.compress.source import open_source

    max_part_bytes = _bytes_of(options["max_part_size"])
    destination: Path = options["destination"]
    path, _ = find_model(options["source"], {})
    with open_source(path) as model:
        _check_destination(model.path, destination, options["force"])
        mixture = parse_mixture(options["dtype"] or _stored_type(model))
        choices = choose_types(model, mixture, TypeOptions())
        _warn(choices)
        _quantize(model, choices, Work(destination, mixture.file_type, None, options["threads"], max_part_bytes))
        _report(choices, options["as_json"])


def _stored_type(model: SourceModel) -> str:
    """The type of most numbers of the model. Raises UsageError if that is no float type."""
    from octavo.quantization.packed import DENSE_TYPES

    counts: Counter[str] = Counter()
    for tensor in model.tensors:
        counts[tensor.type_name] += math.prod(tensor.shape)
    [(found, _)] = counts.most_common(1)
    if found not in DENSE_TYPES:
        raise UsageError(f"{model.path} is quantized, mostly as {found}; choose its new type with --dtype")
    return found


@dataclass(frozen=True, slots=True)
class Work:
    """The file that is written, and the options of writing."""

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
    """Read or measured; and written, if asked for."""
    from octavo.compress.importance import is_text, read_importance, write_importance

    if path is None:
        if save is not None:
            raise UsageError("--save-imatrix needs --imatrix TEXT, from which the importance is measured")
        return None
    matrix = _measured(model, path, chunks) if is_text(path) else read_importance(path)
    if not any(tensor.name in matrix.squares for tensor in model.tensors):
        raise UsageError(f"{path}: it names no tensor of this model; it belongs to another one")
    if save is not None:
        write_importance(save, matrix)
    return matrix


def _measured(model: SourceModel, path: Path, chunks: int) -> ImportanceMatrix:
    from octavo.compress.importance import ImportanceMatrix, measure, split_text
    from octavo.loader.checkpoint import open_checkpoint
    from octavo.tokenizer import load_tokenizer

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; give a text or a file of llama-imatrix") from error
    with closing(open_checkpoint(model.path)) as checkpoint, ProgressBar(announced=True) as progress:
        tokenizer = load_tokenizer(checkpoint)
        ids = tokenizer.encode(text)
        texts = split_text(ids, chunks, tokenizer.prefix_ids[0] if tokenizer.prefix_ids else None)
        squares = measure(checkpoint, texts, lambda done, total: progress.update("measuring layers", done, total))
    names = {stored: tensor.name for tensor in model.tensors for stored in tensor.stored}
    squares = {names[stored]: found for stored, found in squares.items()}
    return ImportanceMatrix(squares, path.name, path.name, len(texts), len(texts[0]))


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
        raise UsageError(f"pattern {text!r} is no regular expression: {error}") from error


def _bytes_of(text: str | None) -> int | None:
    """`4GiB`, `500MB`, `4G`."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise UsageError(f"--max-part-size {text!r}: write a size such as 4GiB or 500MB")
    base = 1000 if found[0].upper().endswith("B") and not found[3] else 1024
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def _check_destination(source: Path, destination: Path, may_replace: bool) -> None:
    if destination.suffix != ".gguf":
        raise UsageError(f"{destination}: the name of the result must end with .gguf")
    check_folder(destination)
    if destination.exists():
        if os.path.samefile(source, destination):
            raise UsageError(f"{destination}: this is the source; write to another name")
        if not may_replace:
            raise UsageError(f"{destination}: exists already; --force replaces it")


def _warn(choices: list[TypeChoice]) -> None:
    from octavo.quantization.packed import DENSE_TYPES

    again = [c for c in choices if c.tensor.type_name not in {*DENSE_TYPES, c.type_name}]
    if again:
        click.echo(
            f"octavo: warning: {len(again)} tensors are quantized already, {again[0].tensor.name} as "
            f"{again[0].tensor.type_name}; quantizing the float model gives a better result",
            err=True,
        )
    if misfits := [c for c in choices if "does not fit" in c.note]:
        first = misfits[0]
        click.echo(
            f"octavo: {len(misfits)} tensors have widths that their type does not allow; "
            f"{first.tensor.name}: {first.note}, so it is {first.type_name}",
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
