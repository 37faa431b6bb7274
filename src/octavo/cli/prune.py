"""`octavo prune`: remove the least important parts of a model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from octavo.cli.completion import complete_model
from octavo.cli.model_report import NAMES, check_windows, prepare_report, report_models, short_name, with_report_options
from octavo.cli.options import first_given
from octavo.cli.quantize import check_destination, float_type, tokens_of
from octavo.cli.terminal import find_model, write
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.compress.prune import PruneOptions

_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command()
@click.argument("source", shell_complete=complete_model, metavar="SRC")
@click.argument("destination", type=click.Path(path_type=Path), metavar="DST")
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    metavar="TEXT",
    help="text on which the importance of the parts is measured",
)
@click.option("--layers", type=click.IntRange(0), default=0, metavar="N", help="remove N layers, by block influence")
@click.option("--heads", type=_SHARE, metavar="SHARE", help="remove this share of each layer's head groups")
@click.option("--ffn", type=_SHARE, metavar="SHARE", help="remove this share of each layer's feed-forward columns")
@click.option(
    "--sparsity", metavar="SHARE|2:4", help="set this share of each row to zero, or two of every four weights"
)
@click.option(
    "--method",
    type=click.Choice(["wanda", "sparsegpt"]),
    default="wanda",
    show_default=True,
    help="method for --sparsity; sparsegpt adjusts the remaining weights, and takes longer",
)
@float_type
@click.option(
    "--calibration-chunks",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="number of 512-token pieces to take from the text",
)
@click.option("--threads", type=click.IntRange(0, 1024), default=0, help="threads; 0: one per core  [default: 0]")
@click.option("--force", is_flag=True, help="replace DST if it exists")
@click.option(
    "--report",
    is_flag=True,
    help="afterwards compare SRC and DST like `octavo compare`; the options below apply to this report",
)
@with_report_options
def prune(**options: Any) -> None:
    """Remove the least important parts of SRC; DST is a GGUF file.

    The result is an ordinary model with fewer layers, heads or columns, or with zeros among its weights; you can
    quantize it like any other. --report shows the loss in quality; `octavo distill SRC DST` recovers some of it.
    """
    from octavo.compress.importance import split_text
    from octavo.compress.prune import prune as pruned
    from octavo.compress.quantize import TypeOptions, choose_types, parse_mixture, quantize_model
    from octavo.compress.source import as_source, open_source
    from octavo.loader.checkpoint import open_checkpoint

    wanted = _wanted(options)
    if not options["report"] and (unused := first_given(NAMES)) is not None:
        raise UsageError(f"{unused} applies only to the report: add --report")
    destination: Path = options["destination"]
    text = prepare_report(options) if options["report"] else None
    path, _ = find_model(options["source"], {})
    if text is not None:
        check_windows(options, text, path)
    mixture = parse_mixture(options["dtype"])
    with open_source(path) as source, closing(open_checkpoint(path)) as checkpoint, ProgressBar(announced=True) as bar:
        check_destination(source.path, destination, options["force"])
        ids, first = tokens_of(checkpoint, options["calibration"])
        texts = split_text(ids, options["calibration_chunks"], first)
        result = pruned(checkpoint, source.metadata, texts, wanted, bar.update)
        model = as_source(source.path, result.metadata, checkpoint.file, result.sources)
        choices = choose_types(model, mixture, TypeOptions())
        quantize_model(
            model,
            destination,
            choices,
            mixture.file_type,
            threads=options["threads"],
            report=lambda done, total: bar.update(f"writing {destination.name}, MB", done >> 20, total >> 20),
        )
    write("".join(f"{line}\n" for line in result.removed))
    if text is not None:
        names = [options["source"], str(destination)]
        short = [short_name(name) for name in names]
        models = [*zip(short if short[0] != short[1] else names, (path, destination), strict=True)]
        engine = {"num_threads": options["threads"]} if options["threads"] else {}
        write("\n")
        report_models(models, path, text, engine, options)


def _wanted(options: dict[str, Any]) -> PruneOptions:
    from octavo.compress.prune import PruneOptions

    text: str | None = options["sparsity"]
    sparsity: float | Literal["2:4"] | None = "2:4" if text == "2:4" else None
    if text is not None and sparsity is None:
        try:
            sparsity = float(text)
        except ValueError:
            raise UsageError(f"--sparsity {text!r}: write a share such as 0.5, or 2:4") from None
        if not 0 < sparsity < 1:
            raise UsageError(f"--sparsity {text} must be between 0 and 1")
    wanted = PruneOptions(
        layers=options["layers"],
        heads=options["heads"] or 0.0,
        ffn=options["ffn"] or 0.0,
        sparsity=sparsity,
        method=cast(Any, options["method"]),
    )
    if not (wanted.layers or wanted.heads or wanted.ffn or wanted.sparsity):
        raise UsageError("nothing to remove; give --layers, --heads, --ffn or --sparsity")
    return wanted
