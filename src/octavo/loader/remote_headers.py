"""Hub models without their weights: files of full size in which only the headers have been downloaded."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo import env
from octavo.errors import ModelLoadError
from octavo.loader import library
from octavo.loader.aliases import ALIASES
from octavo.loader.gguf import header_bytes, open_gguf
from octavo.loader.hub import UnreachableError, download, files_of, list_files, one_line
from octavo.loader.model_cache import models_dir
from octavo.loader.references import Reference, parse, with_revision

_FIRST_BYTES = 4 << 20
_MAX_HEADER_BYTES = 512 << 20
_SMALL_TENSORS = ("rope_freqs.", "rope_factors_")  # tensors that the configuration is read from


@contextmanager
def remote_headers(name: str, revision: str | None = None) -> Iterator[Path | None]:
    """Download only the headers of a hub model, and yield the path of the result for `open_checkpoint`.

    Its weights read as zeros, and it is removed at the end of the context. Yields None if the whole model is already
    downloaded, if `name` is a path, or if the hub cannot or must not be asked.

    Raises ModelLoadError with a message that explains what to do.
    """
    wanted = _not_here(name, revision)
    if wanted is None:
        yield None
        return
    try:
        commit, names = list_files(wanted.repository, revision=wanted.revision)
    except UnreachableError:  # the hub's own cache may have it
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="headers-", dir=models_dir()) as folder:
        hub, files = _Hub(wanted.repository, commit), files_of(wanted, names)
        for file in files:
            path = Path(folder, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.endswith(".gguf"):
                _fetch_gguf(hub, file, path)
            elif file.endswith(".safetensors"):
                _fetch_safetensors(hub, file, path)
            else:
                download(wanted.repository, file, commit, Path(folder), None)
        main = Path(folder, files[0])
        if main.suffix == ".gguf":
            _fetch_small_tensors(hub, Path(folder), main)
        yield main.parent if main.name == "config.json" else main


@dataclass(frozen=True, slots=True)
class _Hub:
    """A repository at one commit."""

    repository: str
    commit: str

    def fetch(self, name: str, path: Path, start: int, end: int) -> int:
        """Write bytes [start, end) of a file, or as many as exist, to the same place in `path`. Return the file's size.

        The file at `path` gets this size, too, but bytes that were not downloaded take no room on disk.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

        url = hf_hub_url(self.repository, name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                answer.raise_for_status()
                total, at = _place(answer.status_code, answer.headers)
                with path.open("r+b" if path.exists() else "w+b") as file:
                    file.truncate(total)
                    for chunk in answer.iter_bytes():
                        file.seek(at)
                        file.write(chunk[: end - at])
                        at += len(chunk)
                        if at >= end:  # if the server sends everything, the rest is not read
                            break
                return total
        except Exception as error:  # the exceptions of its HTTP library change from version to version
            raise ModelLoadError(
                f"{self.repository}: the header of {name} could not be fetched ({one_line(error)}); check the network "
                "and try again"
            ) from error


def _place(status: int, headers: Mapping[str, str]) -> tuple[int, int]:
    """Return the size of the file, and the offset in it where a response's content begins."""
    if status != 206:
        return int(headers["content-length"]), 0
    place, _, total = headers["content-range"].removeprefix("bytes ").partition("/")
    return int(total), int(place.partition("-")[0])


def _not_here(name: str, revision: str | None) -> Reference | None:
    if env.is_offline() or name.lower() in ALIASES or "\0" in name or len(name) > 4096:
        return None
    path = env.user_path(name)
    if path.exists() or path.is_symlink() or (wanted := parse(name)) is None:
        return None
    wanted = with_revision(wanted, revision)
    return wanted if library.find(wanted.label) is None else None


def _fetch_gguf(hub: _Hub, name: str, path: Path) -> None:
    """Download the header. Its length is only known after reading it."""
    total, end = hub.fetch(name, path, 0, _FIRST_BYTES), _FIRST_BYTES
    while True:
        try:
            needed = header_bytes(path)
        except ModelLoadError:  # bytes not downloaded yet read as zeros
            needed = end + 1
            if end >= min(total, _MAX_HEADER_BYTES):
                raise
        if needed <= end:
            return
        hub.fetch(name, path, end, 4 * end)
        end *= 4


def _fetch_safetensors(hub: _Hub, name: str, path: Path) -> None:
    """Download the header. Its first eight bytes contain its length, as the safetensors format specifies."""
    total = hub.fetch(name, path, 0, _FIRST_BYTES // 4)
    with path.open("rb") as file:
        end = 8 + int.from_bytes(file.read(8), "little")
    if _FIRST_BYTES // 4 < end <= min(total, _MAX_HEADER_BYTES):  # a longer one is refused when the file is opened
        hub.fetch(name, path, _FIRST_BYTES // 4, end)


def _fetch_small_tensors(hub: _Hub, folder: Path, main: Path) -> None:
    model = open_gguf(main)
    try:
        for name, tensor in model.tensors.items():
            if name.startswith(_SMALL_TENSORS):
                file = tensor.file.relative_to(folder).as_posix()
                hub.fetch(file, tensor.file, tensor.offset, tensor.offset + tensor.nbytes)
    finally:
        model.close()
