"""Compares models by size, quality against a reference, speed and memory, and recommends one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.bench import Spread
from octavo.engine.loading.progress_bar import size
from octavo.loader.checkpoint import open_checkpoint
from octavo.quality.evaluation import (
    Progress,
    ReferenceOptions,
    TextReport,
    WindowOptions,
    evaluate_text,
)
from octavo.quality.speed import Speed, speed_of
from octavo.quality.texts import JudgedText

# A model this close to its reference answers nearly as it does; the best 4-bit mixtures lie around it.
CLOSE_KL = 0.05
CLOSE_PERPLEXITY = 1.02  # times the best one's, where there is no reference


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """One of the compared models. Without a reference, models are compared by perplexity instead of distance.

    num_bytes: size of its files.
    is_best_by_size: no other model is both smaller and closer to the reference.
    is_best_by_speed: no other model both decodes faster and is closer to the reference.
    """

    name: str
    path: str
    num_bytes: int
    bits_per_weight: float
    report: TextReport
    decode: Spread | None = None
    prefill: Spread | None = None
    peak_bytes: int | None = None
    is_best_by_size: bool = False
    is_best_by_speed: bool = False

    @property
    def distance(self) -> float:
        """Distance from the reference: the mean KL divergence, or the perplexity if there is no reference."""
        divergence = self.report.divergence
        return self.report.perplexity.perplexity if divergence is None else divergence.mean_kl


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """The figures of all models.

    usable_bytes: memory of this machine that a model may use.
    turns: number of speed measurements.
    """

    reference: str | None
    convention: str
    text: str
    turns: int
    usable_bytes: int
    models: tuple[ComparedModel, ...]
    recommendation: str


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """Options of a comparison.

    engine: fields of `EngineConfig` for every model.
    turns: number of speed measurements; 0 measures no speed.
    """

    windows: WindowOptions = field(default_factory=WindowOptions)
    reference: ReferenceOptions | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    turns: int = 3


def compare_models(
    models: Sequence[tuple[str, Path]],
    text: JudgedText,
    options: ComparisonOptions,
    usable_bytes: int,
    progress: Progress | None = None,
    measure: Callable[[str, dict[str, Any]], Speed] = speed_of,
) -> ModelComparison:
    """Compare models. Speeds are measured alternately, with each model in its own process.

    models: names with their paths.

    Raises the errors of `evaluate_text`.
    """
    rows = []
    for done, (name, path) in enumerate(models):
        if progress is not None:
            progress("models judged", done, len(models))
        rows.append(_judged(name, path, text, options, progress))
    speeds: list[list[Speed]] = [[] for _ in rows]
    for turn in range(options.turns):
        for i, row in enumerate(rows):
            if progress is not None:
                progress("turns of speed", turn * len(rows) + i, options.turns * len(rows))
            speeds[i].append(measure(row.path, options.engine))
    if options.turns:
        rows = [_with_speeds(row, found) for row, found in zip(rows, speeds, strict=True)]
    rows = _marked(rows)
    first = rows[0].report
    return ModelComparison(
        reference=first.reference,
        convention=first.convention,
        text=first.text,
        turns=options.turns,
        usable_bytes=usable_bytes,
        models=tuple(rows),
        recommendation=recommend(rows, usable_bytes),
    )


def _judged(
    name: str, path: Path, text: JudgedText, options: ComparisonOptions, progress: Progress | None
) -> ComparedModel:
    with closing(open_checkpoint(path)) as checkpoint:
        num_bytes = sum(file.stat().st_size for file in checkpoint.file.paths)
        bits = checkpoint.bits_per_weight
    report, _ = evaluate_text(
        str(path), text, options.windows, options=options.engine, reference=options.reference, progress=progress
    )
    return ComparedModel(name, str(path), num_bytes, bits, report)


def _with_speeds(row: ComparedModel, speeds: Sequence[Speed]) -> ComparedModel:
    return replace(
        row,
        decode=Spread.of([speed.decode for speed in speeds]),
        prefill=Spread.of([speed.prefill for speed in speeds]),
        peak_bytes=max(speed.peak_bytes for speed in speeds),
    )


def _marked(rows: Sequence[ComparedModel]) -> list[ComparedModel]:
    by_size = pareto_front([(float(row.num_bytes), row.distance) for row in rows])
    by_speed = pareto_front([(-row.decode.median if row.decode else 0.0, row.distance) for row in rows])
    return [
        replace(row, is_best_by_size=i in by_size, is_best_by_speed=row.decode is not None and i in by_speed)
        for i, row in enumerate(rows)
    ]


def pareto_front(points: Sequence[tuple[float, ...]]) -> set[int]:
    """Return the indices of the points that no other point dominates (no worse in every coordinate and better in one).

    Smaller coordinates are better.
    """
    return {
        i
        for i, point in enumerate(points)
        if not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)
    }


def recommend(rows: Sequence[ComparedModel], usable_bytes: int) -> str:
    """Recommend a model in one line, or say that none fits.

    It is the fastest of the models that fit and are close to the reference, or the smallest of them if no speed was
    measured. If none is close, it is the closest one that fits.
    """
    fitting = [row for row in rows if (row.peak_bytes or row.num_bytes) <= usable_bytes]
    if not fitting:
        return f"none of these models fits the {size(usable_bytes)} of memory that can be used on this machine"
    best = min(row.distance for row in fitting)
    has_reference = fitting[0].report.divergence is not None
    limit = CLOSE_KL if has_reference else CLOSE_PERPLEXITY * best
    close = [row for row in fitting if row.distance <= limit]
    chosen = min(
        close or [row for row in fitting if row.distance == best],
        key=lambda row: (-row.decode.median if row.decode else 0.0, row.num_bytes),
    )
    how = "fastest" if chosen.decode else "smallest"
    measure = f"mean KL {chosen.distance:.4f}" if has_reference else f"perplexity {chosen.distance:.3f}"
    reason = (
        f"the {how} among those that fit {size(usable_bytes)} with a "
        + (f"mean KL of at most {CLOSE_KL}" if has_reference else "perplexity within 2 % of the best")
        if close
        else f"the closest to the reference among those that fit {size(usable_bytes)}; no mean KL is at most {CLOSE_KL}"
    )
    speed = f", {chosen.decode.median:.0f} tokens/s" if chosen.decode else ""
    return f"use {chosen.name}: {reason} ({measure}, {size(chosen.num_bytes)}{speed})"
