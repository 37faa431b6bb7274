"""Quantized versions of a model for a comparison, created once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from octavo import __version__, env
from octavo.compress.quantize import TypeOptions, choose_types, parse_mixture, quantize_model
from octavo.compress.source import open_source
from octavo.loader.checkpoint import open_checkpoint
from octavo.quality.evaluation import Progress
from octavo.quality.reference_scores import reference_key


def make_types(
    source: Path,
    type_names: Sequence[str],
    *,
    folder: Path | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> list[tuple[str, Path]]:
    """Return GGUF files of a model in these types or mixtures, with a name for each. Existing files are reused.

    folder: where to keep them; None means `quantized` in Octavo's cache. Each content of the model's files, and each
        version of Octavo, has its own subfolder.

    Raises UsageError for an unknown type before creating anything, and ModelWriteError if the disk is full.
    """
    mixtures = {name.lower(): parse_mixture(name) for name in type_names}
    with closing(open_checkpoint(source)) as checkpoint:
        files = checkpoint.file.paths
    kept = (env.cache_dir() / "quantized" if folder is None else folder) / reference_key(files, __version__)
    kept.mkdir(parents=True, exist_ok=True)
    stem = source.name.removesuffix(".gguf")
    made = []
    for name, mixture in mixtures.items():
        path = kept / f"{stem}.{name}.gguf"
        if not path.exists():
            with open_source(source) as model:
                choices = choose_types(model, mixture, TypeOptions())

                def report(done: int, total: int, name: str = name) -> None:
                    if progress is not None:
                        progress(f"making {name}, MB", done >> 20, total >> 20)

                quantize_model(model, path, choices, mixture.file_type, threads=threads, report=report)
        made.append((f"{stem}.{name}", path))
    return made
