"""`octavo eval`: measure the quality of a model by perplexity, divergence from a reference, and tasks."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.options import Options, first_given, with_engine_options
from octavo.cli.terminal import check_folder, find_model, write_facts, write_json, write_table
from octavo.config import EngineConfig, parse_bytes
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.quality.evaluation import TextReport, TokenFigures
    from octavo.quality.harness import TaskReport
    from octavo.quality.texts import JudgedText

_PATH = click.Path(path_type=Path)
_COUNT = click.IntRange(min=1)
_REFERENCE_OPTIONS = ("reference_backend", "reference_cache")
_TEXT_OPTIONS = ("text", "tokens", "convention", "window", "stride", "reference", *_REFERENCE_OPTIONS, "per_token")
_TASK_OPTIONS = ("limit", "few_shot", "few_shot_from")


@click.command("eval", cls=HeadedCommand)
@click.argument("model", shell_complete=complete_model)
@click.option("--text", type=_PATH, metavar="FILE", help="UTF-8 text [default: built-in, half prose, half code]")
@click.option("--tokens", type=_COUNT, help="use only windows with this many tokens in total, spread over the text")
@click.option(
    "--convention",
    type=click.Choice(["chunks", "strided"]),
    default="chunks",
    show_default=True,
    help="how to measure perplexity: chunks whose second half is scored (llama.cpp), or windows that score each token "
    "once",
)
@click.option("--window", type=click.IntRange(min=2), default=512, show_default=True, help="tokens per window")
@click.option(
    "--stride",
    type=_COUNT,
    help="with --convention strided: tokens between window starts [default: half a window]",
)
@click.option("--reference", metavar="MODEL", help="baseline for KL divergence and agreement")
@click.option(
    "--reference-backend", default="cpu", show_default=True, help="cpu, or reference: numpy in float32 (slow, exact)"
)
@click.option(
    "--reference-cache", default="8GiB", show_default=True, metavar="SIZE", help="disk space for cached references"
)
@click.option(
    "--task", "tasks", type=_PATH, multiple=True, metavar="FILE", help="questions as JSON lines (docs/lab/quality.md)"
)
@click.option("--limit", type=_COUNT, help="maximum number of questions per task")
@click.option("--few-shot", type=click.IntRange(min=0), default=0, show_default=True, help="examples before a question")
@click.option(
    "--few-shot-from", type=_PATH, metavar="FILE", help="file with the examples [default: the task's first lines]"
)
@click.option("--per-token", type=_PATH, metavar="FILE", help="write the loss of each token to FILE, as JSON lines")
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@with_engine_options
def evaluate(*, model: str, tasks: tuple[Path, ...], as_json: bool, engine_options: Options, **given: Any) -> None:
    """Measure quality: perplexity, KL divergence, task accuracy.

    MODEL is a path, a hub id or a short name. Measures the perplexity on a text and, with --reference, the KL
    divergence from that model; with --task, the share of correct answers.
    """
    from octavo.quality.texts import read_text

    EngineConfig.resolve(model, engine_options)  # reports errors before a download
    _check(tasks, given)
    if tasks:
        reports = _run_tasks(model, tasks, engine_options, given)
        if as_json:
            write_json([asdict(report) for report in reports])
        else:
            _write_tasks(reports)
        return
    text = read_text(given["text"])
    report, tokens = _evaluate_text(model, text, engine_options, given)
    if given["per_token"] is not None:
        _write_tokens(given["per_token"], tokens)
    if as_json:
        write_json(asdict(report))
    else:
        _write_text(report)


def _check(tasks: tuple[Path, ...], given: dict[str, Any]) -> None:
    """Raise UsageError for options that would be ignored."""
    if (unused := first_given(_TEXT_OPTIONS if tasks else _TASK_OPTIONS)) is not None:
        raise UsageError(
            f"{unused} applies only to {'a text' if tasks else 'tasks'}: {'leave out' if tasks else 'add'} --task"
        )
    if given["reference"] is None and (unused := first_given(_REFERENCE_OPTIONS)) is not None:
        raise UsageError(f"{unused} needs --reference, the model to compare with")
    if given["per_token"] is not None:
        check_folder(given["per_token"])
    if given["stride"] is not None and given["convention"] == "chunks":
        raise UsageError("--stride applies only to --convention strided; add it, or leave out --stride")
    if given["few_shot_from"] is not None and not given["few_shot"]:
        raise UsageError("--few-shot-from needs --few-shot, the number of examples")


def _evaluate_text(
    model: str, text: JudgedText, options: Options, given: dict[str, Any]
) -> tuple[TextReport, TokenFigures]:
    from octavo.quality.evaluation import ReferenceOptions, WindowOptions, evaluate_text

    path, options = find_model(model, options)
    reference = None
    if given["reference"] is not None:
        reference_path, _ = find_model(given["reference"], {})
        threads = {name: value for name, value in options.items() if name == "num_threads"}
        reference = ReferenceOptions(
            str(reference_path),
            {"backend": given["reference_backend"], **threads},
            parse_bytes("reference_cache", given["reference_cache"]),
        )
    windows = WindowOptions(given["convention"], given["window"], given["stride"], given["tokens"])
    with ProgressBar() as progress:
        return evaluate_text(str(path), text, windows, options=options, reference=reference, progress=progress.update)


def _run_tasks(model: str, tasks: tuple[Path, ...], options: Options, given: dict[str, Any]) -> list[TaskReport]:
    from octavo.loader.finite_weights import check_weights
    from octavo.quality.evaluation import progress_of_load
    from octavo.quality.harness import run_task
    from octavo.quality.language_model import LanguageModel
    from octavo.quality.tasks import read_task

    few_shot = {"few_shot": given["few_shot"], "few_shot_from": given["few_shot_from"]}
    read = [read_task(path, limit=given["limit"], **few_shot) for path in tasks]  # reports errors before loading
    path, options = find_model(model, options)
    with ProgressBar() as progress:
        config = EngineConfig.resolve(str(path), options)
        check_weights(config.model, config.revision)
        with LanguageModel(config, progress_of_load(progress.update)) as asked:
            return [run_task(asked, task, partial(progress.update, task.name)) for task in read]


def _write_text(report: TextReport) -> None:
    perplexity, divergence = report.perplexity, report.divergence
    facts = {
        "model": report.model,
        "text": f"{report.text}, {report.num_text_tokens:,} tokens",
        "convention": report.convention,
        "counted": f"{perplexity.num_tokens:,} tokens in {report.num_windows} windows",
        "perplexity": f"{perplexity.perplexity:.4f} ± {perplexity.standard_error:.4f}",
        "loss": f"{perplexity.mean_nll:.5f} nats per token; {report.top1_accuracy:.2%} of the tokens were ranked first",
        "speed": f"{report.tokens_per_s:,.0f} tokens/s, {report.seconds:.1f} s",
    }
    if divergence is not None:
        facts |= {
            "reference": f"{report.reference}, perplexity {divergence.reference_perplexity:.4f}",
            "KL mean": f"{divergence.mean_kl:.6f} ± {divergence.mean_kl_standard_error:.6f}",
            "KL median, p99": f"{divergence.median_kl:.6f}, {divergence.p99_kl:.6f}; largest {divergence.max_kl:.4f}",
            "same top 1": f"{divergence.top1:.2%} ± {divergence.top1_standard_error:.2%}",
        }
    write_facts(facts)


def _write_tasks(reports: list[TaskReport]) -> None:
    rows = [
        {
            "task": report.task,
            "format": report.kind,
            "questions": f"{report.num_questions:,}",
            "figure": name,
            "value": f"{share.value:.4f}",
            "±": f"{share.standard_error:.4f}",
            "truncated": str(report.num_truncated),
        }
        for report in reports
        for name, share in report.figures.items()
    ]
    write_table(rows)


def _write_tokens(path: Path, tokens: TokenFigures) -> None:
    """Write a line for each counted token. An existing file is replaced only once the new one is complete."""
    from octavo.loader.atomic_file import AtomicFile

    with AtomicFile(path, magic=b"") as file:
        for i in range(len(tokens.positions)):
            entry = {
                "position": int(tokens.positions[i]),
                "token_id": int(tokens.token_ids[i]),
                "loss": -float(tokens.logprobs[i]),
                "rank": int(tokens.ranks[i]),
            }
            if tokens.kl is not None:
                entry["kl"] = float(tokens.kl[i])
            file.write(json.dumps(entry).encode() + b"\n")
        file.complete()
        file.publish()
