"""Plots of a model comparison: perplexity by size, and distance from the reference by speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from octavo.errors import UsageError
from octavo.loader.atomic_file import write_bytes
from octavo.quality.model_comparison import ComparedModel, ModelComparison

REMEDY = "the plots need matplotlib: pip install 'octavo[report]'"
_SUFFIXES = (".svg", ".png")


def write_plots(comparison: ModelComparison, folder: Path) -> list[Path]:
    """Write each plot as SVG and PNG to an existing folder.

    Raises UsageError without matplotlib, and ModelWriteError if the disk is full, leaving no partly written plot.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(REMEDY) from None
    models = comparison.models
    written = []
    plots = [("perplexity_by_size", _by_size)]
    if all(model.decode is not None for model in models):
        plots.append(("distance_by_speed", _by_speed))
    for name, draw in plots:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        draw(figure.subplots(), models)
        for suffix in _SUFFIXES:
            path = folder / (name + suffix)
            drawn = BytesIO()
            with rc_context({"svg.fonttype": "none"}):  # letters as text: a third of the bytes of their outlines
                figure.savefig(drawn, format=suffix[1:], dpi=150)
            write_bytes(path, drawn.getvalue())
            written.append(path)
    return written


def _shared_name(models: Sequence[ComparedModel]) -> str:
    """Return the part before the last dot (the model's name) if it is the same in all names, else an empty string."""
    stems = {model.name.rpartition(".")[0] for model in models}
    return stems.pop() if len(stems) == 1 else ""


def _titled(title: str, models: Sequence[ComparedModel]) -> str:
    name = _shared_name(models)
    return _escaped(f"{name}: {title}") if name else title.capitalize()


def _escaped(text: str) -> str:
    return text.replace("$", r"\$")  # a dollar sign would start a formula


def _by_size(axes: Any, models: Sequence[ComparedModel]) -> None:
    _draw(
        axes,
        models,
        lambda model: (model.num_bytes / 1e6, model.report.perplexity.perplexity),
        lambda model: model.is_best_by_size,
    )
    axes.set_xlabel("size of the files, MB")
    axes.set_ylabel("perplexity")
    divergence = models[0].report.divergence
    if divergence is not None:
        axes.axhline(divergence.reference_perplexity, linewidth=1, linestyle=":", color="grey")
    axes.set_title(_titled("perplexity by size", models))


def _by_speed(axes: Any, models: Sequence[ComparedModel]) -> None:
    has_reference = models[0].report.divergence is not None
    _draw(
        axes,
        models,
        lambda model: (model.decode.median if model.decode else 0.0, model.distance),
        lambda model: model.is_best_by_speed,
    )
    if has_reference and all(model.distance > 0 for model in models):
        axes.set_yscale("log")
    axes.set_xlabel("decode, tokens/s")
    axes.set_ylabel("mean KL divergence from the reference, nats" if has_reference else "perplexity")
    axes.set_title(_titled(f"{'distance from the reference' if has_reference else 'perplexity'} by speed", models))


def _draw(
    axes: Any,
    models: Sequence[ComparedModel],
    place: Callable[[ComparedModel], tuple[float, float]],
    is_best: Callable[[ComparedModel], bool],
) -> None:
    """Draw labelled points; points on the front are filled and joined."""
    axes.margins(x=0.1, y=0.08)  # for the names at the right and at the top
    front = sorted(place(model) for model in models if is_best(model))
    axes.plot([x for x, _ in front], [y for _, y in front], linewidth=1, color="tab:blue", zorder=1)
    shared = _shared_name(models)
    for model in models:
        x, y = place(model)
        axes.scatter([x], [y], color="tab:blue" if is_best(model) else "white", edgecolors="tab:blue", zorder=2)
        name = _escaped(model.name.removeprefix(f"{shared}."))
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
