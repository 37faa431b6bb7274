"""The report that compares models: its options, table and plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.options import Options
from octavo.cli.terminal import write, write_json, write_table
from octavo.config import EngineConfig, parse_bytes
from octavo.engine.loading.progress_bar import ProgressBar, size
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.quality.model_comparison import ComparedModel, ModelComparison
    from octavo.quality.texts import JudgedText

_PATH = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)
NAMES = ("text", "tokens", "window", "turns", "plots", "reference_cache")
_OPTIONS = (
    click.option("--text", type=_PATH, metavar="FILE", help="UTF-8 text [default: built-in, half prose, half code]"),
    click.option("--tokens", type=_COUNT, help="use only windows with this many tokens in total, spread over the text"),
    click.option("--window", type=click.IntRange(min=2), default=512, show_default=True, help="tokens per window"),
    click.option(
        "--reference-cache", default="8GiB", show_default=True, metavar="SIZE", help="disk space for cached references"
    ),
    click.option(
        "--plots", type=_PATH, metavar="FOLDER", help="write plots to FOLDER, as SVG and PNG (octavo[report])"
    ),
    click.option(
        "--turns", type=click.IntRange(min=0), default=3, show_default=True, help="speed measurements per model"
    ),
)


def with_report_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the report's options. `NAMES` lists the parameters in which the command receives them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def prepare_report(given: dict[str, Any]) -> JudgedText:
    """Return the report's text and create the folder for plots, so that errors occur before a model is downloaded."""
    from octavo.quality.texts import read_text

    parse_bytes("reference_cache", given["reference_cache"])
    text = read_text(given["text"])
    if given["plots"] is not None:
        given["plots"].mkdir(parents=True, exist_ok=True)
    return text


def check_windows(given: dict[str, Any], text: JudgedText, model: Path) -> None:
    """Raise UsageError if the text has too few tokens for this model, before any long-running work."""
    from octavo.quality.evaluation import WindowOptions, tokenizer_of

    tokenizer = tokenizer_of(str(model))
    WindowOptions(size=given["window"], max_tokens=given["tokens"]).windows(text.encode(tokenizer), tokenizer)


def report_models(
    models: Sequence[tuple[str, Path]],
    reference: Path | None,
    text: JudgedText,
    options: Options,
    given: dict[str, Any],
    *,
    as_json: bool = False,
) -> None:
    """Compare the named models and write the report.

    options: engine options
    """
    from octavo.engine.loading.devices import free_memory
    from octavo.quality.evaluation import ReferenceOptions, WindowOptions
    from octavo.quality.model_comparison import ComparisonOptions, compare_models

    limit = parse_bytes("reference_cache", given["reference_cache"])
    wanted = ComparisonOptions(
        WindowOptions(size=given["window"], max_tokens=given["tokens"]),
        None if reference is None else ReferenceOptions(str(reference), {}, limit),
        options,
        given["turns"],
    )
    usable = free_memory(EngineConfig.resolve(str(models[0][1]), options)).usable_bytes
    with ProgressBar() as progress:
        comparison = compare_models(models, text, wanted, usable, progress.update)
    if as_json:
        write_json(asdict(comparison))
    else:
        write_table([_model_row(model) for model in comparison.models])
        write(f"\n{_explained(comparison)}\n{comparison.recommendation}\n")
    _write_plots(comparison, given["plots"])


def short_name(model: str) -> str:
    """Return the name of a model in the report: its file or folder."""
    return Path(model).name.removesuffix(".gguf") or model


def _write_plots(comparison: ModelComparison, folder: Path | None) -> None:
    """Write the plots. Without matplotlib, explain how to get them."""
    from octavo.quality.plots import REMEDY, write_plots

    if folder is None:
        return
    try:
        for path in write_plots(comparison, folder):
            click.echo(f"octavo: wrote {path}", err=True)
    except UsageError:
        click.echo(f"octavo: {REMEDY}", err=True)


def _model_row(model: ComparedModel) -> dict[str, str]:
    perplexity, divergence = model.report.perplexity, model.report.divergence
    front = "".join(mark for mark, is_on in (("s", model.is_best_by_size), ("v", model.is_best_by_speed)) if is_on)
    row = {
        "model": model.name,
        "size": size(model.num_bytes),
        "bits": f"{model.bits_per_weight:.2f}",
        "perplexity": f"{perplexity.perplexity:.3f} ± {perplexity.standard_error:.3f}",
    }
    if divergence is not None:
        row |= {
            "KL mean": f"{divergence.mean_kl:.5f}",
            "KL p99": f"{divergence.p99_kl:.4f}",
            "top 1": f"{divergence.top1:.1%}",
        }
    if model.decode is not None and model.prefill is not None and model.peak_bytes is not None:
        row |= {
            "decode": f"{model.decode.median:.1f} ({model.decode.low:.1f} to {model.decode.high:.1f})",
            "prefill": f"{model.prefill.median:.0f} ({model.prefill.low:.0f} to {model.prefill.high:.0f})",
            "memory": size(model.peak_bytes),
        }
    return row | {"front": front}


def _explained(comparison: ModelComparison) -> str:
    reference = f"; KL and top 1 against {comparison.reference}" if comparison.reference is not None else ""
    speed = f"; tokens/s of {comparison.turns} turns, median (low to high)" if comparison.turns else ""
    return (
        f"perplexity: {comparison.convention}; text: {comparison.text}{reference}{speed}\n"
        "front: s: nothing is both smaller and closer; v: nothing is both faster and closer"
    )
