"""`octavo compare`: compare models or engines on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.model_report import NAMES, check_windows, prepare_report, report_models, short_name, with_report_options
from octavo.cli.options import Options, first_given, with_engine_options
from octavo.cli.terminal import check_folder, find_model, write, write_json, write_table
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.quality.engine_comparison import EngineFigures

_PATH = click.Path(path_type=Path)
_ANSWER_TOKENS = 200
_COUNT = click.IntRange(min=1)
_MODEL_OPTIONS = ("types", "reference", *(name for name in NAMES if name != "turns"))
_ENGINE_OPTIONS = ("prompts", "html", "max_tokens")


@click.command(cls=HeadedCommand)
@click.argument("models", nargs=-1, shell_complete=complete_model)
@click.option("--reference", metavar="MODEL", help="baseline for KL divergence and agreement")
@click.option(
    "--types", metavar="A,B", help="also compare the reference quantized to these types; missing files are created"
)
@with_report_options
@click.option("--engine", "engines", multiple=True, help="compare engines: octavo, llama.cpp=PROGRAM, NAME=URL")
@click.option(
    "--prompts",
    type=_PATH,
    metavar="FILE",
    help="prompts for --engine, separated by --- lines [default: nine built-in ones]",
)
@click.option("--max-tokens", type=_COUNT, help=f"tokens per answer with --engine [default: {_ANSWER_TOKENS}]")
@click.option("--html", type=_PATH, metavar="FILE", help="write the engines' answers side by side to FILE")
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@with_engine_options
def compare(
    *, models: tuple[str, ...], engines: tuple[str, ...], as_json: bool, engine_options: Options, **given: Any
) -> None:
    """Compare models with each other, or inference engines.

    Models are compared by size, quality, speed and memory; engines by speed and answers. Speeds are measured
    alternately (A B A B), because a shared machine's speed varies; trust the ratios rather than the absolute speeds.
    With --engine, give one MODEL: every engine started here runs it. OPENAI_API_KEY is sent to engines given by URL.
    """
    _check(models, engines, engine_options, given)
    if engines:
        _compare_engines(models, engines, as_json, engine_options, given)
    else:
        _compare_models(models, as_json, engine_options, given)


def _check(models: tuple[str, ...], engines: tuple[str, ...], options: Options, given: dict[str, Any]) -> None:
    """Raise UsageError for options that would be ignored."""
    if (unused := first_given(_MODEL_OPTIONS if engines else _ENGINE_OPTIONS)) is not None:
        raise UsageError(
            f"{unused} is for {'models' if engines else 'engines'}: {'leave out' if engines else 'add'} --engine"
        )
    if not engines:
        if given["types"] is not None and given["reference"] is None:
            raise UsageError("--types needs --reference, the model to quantize and compare with")
        if given["reference"] is None and first_given(["reference_cache"]) is not None:
            raise UsageError("--reference-cache needs --reference, the model to compare with")
        if not models and given["types"] is None:
            raise UsageError("nothing to compare: name models, or engines with --engine")
        EngineConfig.resolve(models[0] if models else given["reference"], options)
        return
    if given["html"] is not None:
        check_folder(given["html"])
    if len(models) > 1:
        raise UsageError(f"engines are compared with one model, not with {len(models)}")
    if given["turns"] < 1:
        raise UsageError("--turns is 0; engines need at least one turn")
    if foreign := sorted(options.keys() - {"num_threads"}):
        raise UsageError(f"--{foreign[0].replace('_', '-')} is for models: start that server yourself and give its URL")


def _compare_models(models: tuple[str, ...], as_json: bool, options: Options, given: dict[str, Any]) -> None:
    text = prepare_report(given)
    found = [(short_name(model), find_model(model, options)[0]) for model in models]
    left = {name: value for name, value in options.items() if name != "revision"}
    reference = None if given["reference"] is None else find_model(given["reference"], {})[0]
    check_windows(given, text, found[0][1] if reference is None else reference)
    if given["types"] is not None and reference is not None:
        found += _made(reference, given["types"], left.get("num_threads", 0))
    report_models(found, reference, text, left, given, as_json=as_json)


def _made(source: Path, types: str, threads: int) -> list[tuple[str, Path]]:
    """Quantize the reference to other types and return the files by name."""
    from octavo.quality.made_types import make_types

    with ProgressBar() as progress:
        return make_types(source, types.split(","), threads=threads, progress=progress.update)


def _compare_engines(
    models: tuple[str, ...], engines: tuple[str, ...], as_json: bool, options: Options, given: dict[str, Any]
) -> None:
    from octavo import env
    from octavo.loader.atomic_file import write_text
    from octavo.quality.answers_page import answers_page
    from octavo.quality.engine_comparison import EngineOptions, EngineSpec, compare_engines, read_prompts

    specs = [EngineSpec.parse(engine) for engine in engines]
    prompts = read_prompts(given["prompts"])
    path = find_model(models[0], options)[0] if models else None
    wanted = EngineOptions(
        turns=given["turns"],
        max_tokens=given["max_tokens"] or _ANSWER_TOKENS,
        threads=options.get("num_threads", 0),
        api_key=env.openai_api_key(),
    )
    with ProgressBar() as progress:
        figures = compare_engines(specs, path, prompts, wanted, progress.update)
    if given["html"] is not None:
        write_text(given["html"], answers_page(prompts, figures))
    if as_json:
        write_json({"prompts": prompts, "engines": [asdict(each) for each in figures]})
    else:
        _write_engines(figures)


def _write_engines(figures: list[EngineFigures]) -> None:
    from octavo.quality.answers_page import shown

    first = figures[0].name
    write_table(
        [
            {
                "engine": each.name,
                "model": each.model,
                "TTFT, s": shown(each.ttft_s, 3),
                "TPOT, ms": shown(each.tpot_s, 1, 1e3),
                "tokens/s": shown(each.tokens_per_s, 1),
                "tokens": str(each.num_tokens),
                f"{first} / it": "" if each.ratio is None else shown(each.ratio, 2),
            }
            for each in figures
        ]
    )
    for each in figures:
        for note in each.notes:
            write(f"{each.name}: {note}\n")
