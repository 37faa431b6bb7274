"""Records the models downloaded from the hub: commit, files, checksums, last use.

A recorded model is used unchanged, without the network, until `octavo pull` asks the hub again. Each model has a JSON
file in `models/records` of the cache folder; its own files are in the hub library's cache. The folder also has an empty
file for each short name of `aliases`, whose time is the last use, and a file with the path of each GGUF file that the
user has named.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo import env
from octavo.errors import ModelLoadError
from octavo.loader.aliases import ALIASES
from octavo.loader.model_cache import find_file, is_trusted, models_dir

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 22
_MAX_PATH_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """One of a model's files. `name` is its path in the repository."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Record:
    """A downloaded model.

    label: the name that was requested, such as `org/name:Q4_K_M`.
    snapshot: folder of its files.
    """

    label: str
    commit: str
    snapshot: str
    files: tuple[RecordedFile, ...]  # the one to open comes first

    @property
    def path(self) -> Path:
        """The path to open: the model's file, or the directory of a checkpoint."""
        first = Path(self.snapshot, self.files[0].name)
        return first.parent if first.name == "config.json" else first

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def is_complete(self) -> bool:
        """True if every file exists with the recorded size."""
        paths = [(Path(self.snapshot, file.name), file.nbytes) for file in self.files]
        return all(path.is_file() and path.stat().st_size == nbytes for path, nbytes in paths)


@dataclass(frozen=True, slots=True)
class Installed:
    """A model on this machine.

    used: time of the last use in seconds since 1970.
    is_own: it is the user's own file; Octavo does not delete it.
    """

    name: str
    path: Path
    nbytes: int
    used: float
    files: tuple[Path, ...]
    is_own: bool = False


def find(label: str) -> Record | None:
    """Return a model downloaded earlier if it is complete, and mark it as used now."""
    file = _file_of(label)
    record = _read(file)
    if record is None or record.label != label or not record.is_complete:
        return None
    with contextlib.suppress(OSError):  # a read-only cache keeps no time of use
        os.utime(file)
    return record


def mark_used(alias: str) -> None:
    """Record that the model of a short name is used now.

    The time stamp of the model file does not change, because packed weights in the cache depend on it.
    """
    stamp = _stamp_of(alias)
    with contextlib.suppress(OSError):  # as above
        stamp.parent.mkdir(mode=0o700, exist_ok=True)
        if is_trusted(stamp.parent):
            stamp.touch(mode=0o600)


def mark_file(path: Path) -> None:
    """Record that one of the user's GGUF files is used now, for `octavo list`."""
    path = Path(os.path.abspath(path))
    if path.is_relative_to(env.cache_dir()):
        return
    note = _records_dir() / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.file"
    with contextlib.suppress(OSError):  # a read-only cache keeps no such notes
        if note.is_file():
            os.utime(note)
            return
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_trusted(note.parent):
            note.write_bytes(os.fsencode(path))


def store(label: str, commit: str, snapshot: Path, names: list[str]) -> Record:
    """Write the record of a download, with the sizes and SHA-256 of its files."""
    import msgspec  # here, because most starts neither read nor write a record

    files = tuple(_recorded(snapshot, name) for name in names)
    record = Record(label, commit, str(snapshot), files)
    file = models_dir() / "records" / _file_of(label).name
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(msgspec.json.encode(record).decode())
        os.replace(temporary, file)
    except OSError as error:
        logger.warning("%s: cannot be written (%s); the hub is asked again next time", file, error.strerror or error)
    return record


def installed() -> list[Installed]:
    """Return the downloaded models and the user's own GGUF files that were used, the most recently used first."""
    found = []
    for name, alias in ALIASES.items():
        path = find_file(Path(alias.sha256[:16], alias.filename), alias.nbytes)
        if path is not None:
            stamp = _stamp_of(name)
            used = (stamp if stamp.is_file() else path).stat().st_mtime  # never used: when it was downloaded
            found.append(Installed(name, path, alias.nbytes, used, (path, stamp)))
    for file in _records_dir().glob("*.json"):
        record = _read(file)
        if record is not None and record.is_complete:
            paths = tuple(Path(record.snapshot, f.name) for f in record.files)
            found.append(Installed(record.label, record.path, record.nbytes, file.stat().st_mtime, (*paths, file)))
    return sorted([*found, *_own_files()], key=lambda model: -model.used)


def remove(model: Installed) -> None:
    """Delete a model's files, except those shared with another model. Raises ModelLoadError.

    For the user's own file, delete only the record of its use.
    """
    others = {path.resolve() for other in installed() if other.name != model.name for path in other.files}
    try:
        for path in model.files:
            content = path.resolve()
            if content in others:
                continue
            path.unlink(missing_ok=True)
            if content != path:  # the hub library's snapshots are links to its blobs
                content.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # others may be left in it
                path.parent.rmdir()
    except OSError as error:
        raise ModelLoadError(f"{error.filename}: cannot be removed ({error.strerror or error})") from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def age(used: float) -> str:
    """Return in words how long ago a model was last used: "3 days ago"."""
    seconds = max(time.time() - used, 0.0)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _recorded(snapshot: Path, name: str) -> RecordedFile:
    content = (snapshot / name).resolve()
    return RecordedFile(name, content.stat().st_size, sha256_of(content))


def _read(file: Path) -> Record | None:
    """Return the record in a file, or None if it is missing, invalid or writable by others."""
    import msgspec  # here, because most starts neither read nor write a record

    if not is_trusted(file.parent):
        return None
    try:
        record = msgspec.json.decode(file.read_bytes(), type=Record)
    except (OSError, ValueError):
        return None
    return record if record.files else None


def _own_files() -> Iterator[Installed]:
    """Yield the user's own files that still exist."""
    folder = _records_dir()
    if not is_trusted(folder):
        return
    for note in folder.glob("*.file"):
        with contextlib.suppress(OSError):
            path = Path(os.fsdecode(note.read_bytes()[:_MAX_PATH_BYTES]))
            if path.is_file():
                yield Installed(_from_home(path), path, path.stat().st_size, note.stat().st_mtime, (note,), is_own=True)
            elif not path.parent.exists():  # it was not only moved
                note.unlink()


def _from_home(path: Path) -> str:
    """Return the path with `~` for the home folder, in a form that `run` accepts."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _records_dir() -> Path:
    return env.cache_dir() / "models" / "records"


def _stamp_of(alias: str) -> Path:
    return _records_dir() / f"{alias}.used"


def _file_of(label: str) -> Path:
    return _records_dir() / f"{hashlib.sha256(label.encode()).hexdigest()[:32]}.json"
