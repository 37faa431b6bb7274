"""Finds a model by path, short name, or repository on the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from octavo import env
from octavo.errors import ModelLoadError
from octavo.loader import library
from octavo.loader.aliases import ALIASES, Alias, DownloadProgress, resolve_alias
from octavo.loader.catalogue import nearest
from octavo.loader.gguf import part_names
from octavo.loader.model_file import best_mmproj, is_mmproj, mmproj_folders
from octavo.loader.pickles import check_no_pickles
from octavo.loader.references import Reference, parse, with_revision
from octavo.loader.safetensors import INDEX_NAME

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm

logger = logging.getLogger(__name__)

_SIDE_FILES = frozenset(
    {
        "config.json",
        "quantize_config.json",
        "quant_config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)
_SIDE_FILES |= {
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
}
_SIDE_FILES |= {"preprocessor_config.json", "processor_config.json"}  # for images
_MODULES = "modules.json"
_SIDE_FILES |= {_MODULES, "config_sentence_transformers.json"}
_NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[\w-]+\.jinja", re.ASCII)
# Modules of sentence-transformers, such as `1_Pooling/config.json`.
_MODULE_FILE = re.compile(r"[0-9]{1,2}_\w+/(?:config\.json|model\.safetensors)", re.ASCII)
# The GGUF files that most users want: small, with little loss.
_PREFERRED_VARIANTS = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q4", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
_REACH_S = 2.0
_LIST_S = 15.0


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    refresh: bool = False,
    progress: DownloadProgress | None = None,
    offline: bool | None = None,
) -> Path:
    """Return the file or directory of a model, downloaded if needed.

    name: a path, a short name (`smollm2`, `qwen3:4b`), a hub repository `org/name`, one of its GGUF files
        `org/name:Q4_K_M`, or the web address of a repository or a file.
    revision: branch, tag or commit of a repository; None means the newest.
    refresh: ask the hub even if the model is already downloaded.
    progress: called with (file, bytes done, total bytes).
    offline: never use the network; None means that the environment variables decide.

    Raises ModelLoadError with a message that explains what to do.
    """
    offline = env.is_offline() if offline is None else offline
    if alias := ALIASES.get(name.lower()):
        _check_no_revision(name, revision, "a short name for one fixed revision")
        path = resolve_alias(alias, lambda a, d: _alias_from_hub(a, d, progress), offline=offline, progress=progress)
        library.mark_used(name.lower())
        return path
    if "\0" in name or len(name) > 4096:
        raise ModelLoadError(f"{name!r:.80}: not a path")
    path = env.user_path(name)
    if path.exists() or path.is_symlink():
        _check_no_revision(name, revision, "a path on this machine")
        return path
    if (wanted := parse(name)) is None:
        near = nearest(name, ALIASES)
        raise ModelLoadError(
            f"{name}: no such file or directory, and no model with that "
            f"name{f'; did you mean {near}?' if near else '.'} Give a path, a hub repository as org/name or "
            "org/name:Q4_K_M, or a short name (`octavo list --all`)"
        )
    wanted = with_revision(wanted, revision)
    if not refresh and (record := library.find(wanted.label)) is not None:
        return record.path
    return _from_hub(wanted, offline, progress)


def label_of(name: str) -> str | None:
    """Return the name under which a short name, hub id or address is recorded, or None for anything else."""
    if name.lower() in ALIASES:
        return name.lower()
    wanted = parse(name)
    return None if wanted is None else wanted.label


def _check_no_revision(name: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise ModelLoadError(
            f"{name} is {kind}, but revision {revision!r:.80} is for hub ids such as org/name; leave it out"
        )


def choose_files(repository: str, names: Iterable[str], variant: str | None) -> list[str]:
    """Return the files of a repository that make up the model. The file to open comes first.

    With a variant (`Q4_K_M`), these are the GGUF file of that type, or all of its parts. Without one, they are the
    safetensors files with their companions, or else a single GGUF model, preferably Q4_K_M. If a GGUF model has a
    vision part, that file is included.
    """
    names = sorted(name for name in names if _is_harmless(name))
    top = [name for name in names if "/" not in name]
    if variant is None and "config.json" in top and any(name.endswith(".safetensors") for name in top):
        weights = [name for name in top if name.endswith(".safetensors") or name == INDEX_NAME]
        modules = [name for name in names if _MODULE_FILE.fullmatch(name)] if _MODULES in top else []
        templates = [name for name in names if _NAMED_TEMPLATE.fullmatch(name)]
        side = sorted(_SIDE_FILES.intersection(top) - {"config.json"})
        return ["config.json", *weights, *modules, *side, *templates]
    ggufs = [name for name in names if name.endswith(".gguf") and not is_mmproj(name)]
    for wanted in [variant] if variant is not None else _PREFERRED_VARIANTS:
        pattern = re.compile(rf"(?:.*[-._/])?{re.escape(wanted)}(?:[-./].*)?\.gguf", re.IGNORECASE)
        if chosen := [name for name in ggufs if pattern.fullmatch(name)]:
            return _with_mmproj(part_names(chosen[0], ggufs.__contains__), names)
    if variant is None and ggufs:
        return _with_mmproj(part_names(ggufs[0], ggufs.__contains__), names)
    if ggufs:
        raise ModelLoadError(f"{repository}: no GGUF file for {variant!r}; there are: {', '.join(ggufs[:20])}")
    check_no_pickles(
        repository,
        names,
        "Use a repository with safetensors or GGUF files, or a revision of this one that has them, often refs/pr/N "
        "(option revision)",
    )
    raise ModelLoadError(f"{repository}: neither GGUF nor safetensors files in this repository")


def _with_mmproj(parts: list[str], names: Iterable[str]) -> list[str]:
    """Return the parts of a GGUF model and, if there is one, the vision file that the loader will find next to them."""
    found = best_mmproj(name for name in names if name.endswith(".gguf") and is_mmproj(name))
    for folder in mmproj_folders(PurePosixPath(parts[0])):
        for name in found:
            if PurePosixPath(name).parent == folder:
                return [*parts, name]
    return parts


def _from_hub(wanted: Reference, offline: bool, progress: DownloadProgress | None) -> Path:
    repository = wanted.repository
    if not offline:
        try:
            commit, checksums = list_files(repository, revision=wanted.revision)
        except UnreachableError as error:
            logger.warning("%s; using models that were downloaded earlier", error)
        else:
            files = files_of(wanted, checksums)
            paths = [download(repository, name, commit, None, progress) for name in files]
            snapshot = paths[0].parents[files[0].count("/")]
            record = library.store(wanted.label, commit, snapshot, files)
            _check_content(record, checksums)
            return record.path
    return _from_hub_cache(wanted)


def files_of(wanted: Reference, names: Iterable[str]) -> list[str]:
    """Return the files that a reference stands for, starting with the file to open. Raises ModelLoadError."""
    if wanted.file is None:
        return choose_files(wanted.repository, names, wanted.variant)
    if wanted.file not in (names := list(names)) or not _is_harmless(wanted.file):
        raise ModelLoadError(f"{wanted.repository}: no file {wanted.file!r:.200} there")
    parts = part_names(wanted.file, names.__contains__)
    return _with_mmproj(parts, names) if wanted.file.endswith(".gguf") and not is_mmproj(wanted.file) else parts


def _check_content(record: library.Record, checksums: Mapping[str, str | None]) -> None:
    """Compare the SHA-256 of large files with the hub's. Deletes a file that differs and raises ModelLoadError."""
    for file in record.files:
        expected = checksums.get(file.name)
        if expected is not None and expected != file.sha256:
            Path(record.snapshot, file.name).resolve().unlink(missing_ok=True)
            raise ModelLoadError(
                f"{record.label}: {file.name} has SHA-256 {file.sha256}, not {expected} as the hub reports; the file "
                "was removed, try again"
            )


def _from_hub_cache(wanted: Reference) -> Path:
    """Return the model from an earlier download, without using the network."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        repositories = frozenset()
    every = [r for found in repositories if found.repo_id == wanted.repository for r in found.revisions]
    revisions = [r for r in every if wanted.revision in (None, r.commit_hash, *r.refs)]
    for revision in sorted(revisions, key=lambda r: r.last_modified, reverse=True):
        snapshot = revision.snapshot_path
        names = [file.file_path.relative_to(snapshot).as_posix() for file in revision.files]
        try:
            files = files_of(wanted, names)
        except ModelLoadError:  # another variant
            continue
        return snapshot if files[0] == "config.json" else snapshot / files[0]
    raise ModelLoadError(
        f"{wanted.label}: not downloaded yet and the hub cannot be reached; connect to the network (and unset "
        "OCTAVO_OFFLINE and HF_HUB_OFFLINE), or give a path"
        + (f"; the downloaded commits are {', '.join(r.commit_hash for r in every)}" if every != revisions else "")
    )


class UnreachableError(ModelLoadError):
    """The hub did not answer, as opposed to answering with a refusal."""


def list_files(
    repository: str, timeout_s: float = _LIST_S, revision: str | None = None
) -> tuple[str, dict[str, str | None]]:
    """Return the commit of a repository's revision, and its files with the SHA-256 of the large ones.

    revision: branch, tag or commit; None means the newest.

    Raises UnreachableError if the hub does not answer in time, and ModelLoadError if it refuses.
    """
    from multiprocessing.pool import ThreadPool

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    options = {"timeout": timeout_s, "revision": revision, "files_metadata": True}
    try:
        with ThreadPool(1) as pool:  # name resolution has no time limit
            info = pool.apply_async(HfApi().model_info, [repository], options).get(timeout_s)
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403, 404):
            if isinstance(error, RevisionNotFoundError):
                raise ModelLoadError(f"{repository}: no branch, tag or commit {revision!r:.80} there") from error
            raise ModelLoadError(
                f"{repository}: no such repository, or access must be granted first; check the name, and if it is "
                "private or gated accept its terms, then set HF_TOKEN or run `hf auth login`"
            ) from error
        raise ModelLoadError(f"{repository}: the hub refused: {one_line(error)}") from error
    except Exception as error:  # the exceptions of its HTTP library change from version to version
        raise UnreachableError(
            f"{repository}: the hub cannot be reached within {timeout_s:g} s ({one_line(error)})"
        ) from error
    return str(info.sha), {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or []}


def _alias_from_hub(alias: Alias, directory: Path, progress: DownloadProgress | None) -> Path:
    list_files(alias.repository, _REACH_S)  # fails fast without a network
    return download(alias.repository, alias.filename, alias.revision, directory, progress)


def download(
    repository: str, name: str, revision: str, directory: Path | None, progress: DownloadProgress | None
) -> Path:
    """Download one file into `directory`, or into the hub's own cache. An interrupted download is resumed.

    Raises ModelLoadError.
    """
    from huggingface_hub import hf_hub_download

    try:
        bar = _progress_bar(name, progress)
        return Path(hf_hub_download(repository, name, revision=revision, local_dir=directory, tqdm_class=bar))
    except Exception as error:  # as above; also a full disk, which is an OSError
        raise ModelLoadError(
            f"{repository}: {name} could not be downloaded ({one_line(error)}); check the network and the free space "
            "of the disk and try again, complete files are kept"
        ) from error


def _progress_bar(name: str, progress: DownloadProgress | None) -> type[tqdm]:
    """Return a progress bar class for the hub library that shows nothing and reports to `progress`."""
    from huggingface_hub.utils.tqdm import tqdm

    class HubBar(tqdm):
        monitor_interval = 0  # no thread

        def __init__(self, *_: object, total: float | None = None, initial: float = 0, **__: object) -> None:
            super().__init__(total=total, initial=initial, disable=True)  # type: ignore[no-untyped-call]
            self.update(0)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress is not None:
                progress(name, int(self.n), int(self.total or 0))

    return HubBar


def _is_harmless(name: str) -> bool:
    """Return True if a file name from the hub stays within its directory on every system."""
    pieces = name.split("/")
    return all(p not in ("", ".", "..") and len(p) <= 255 for p in pieces) and not re.search(r"[\0\\:]", name)


def one_line(error: Exception) -> str:
    """Return the text of an error in a form that fits into the middle of a sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]
