"""Finds a model by path, short name, or repository of the Hugging Face hub."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import env
from octavo.errors import ModelLoadError
from octavo.loader.aliases import ALIASES, Alias, DownloadProgress, resolve_alias
from octavo.loader.gguf import part_names
from octavo.loader.pickles import check_no_pickles
from octavo.loader.safetensors import INDEX_NAME

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<variant>[\w.-]+))?", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]{0,199}", re.ASCII)
_PATH_LIKE = re.compile(r"[./~].*|.*\.(gguf|safetensors)", re.DOTALL)
_SIDE_FILES = frozenset(
    {"config.json", "quantize_config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
)
_SIDE_FILES |= {"tokenizer.model", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"}
# Of several GGUF files in a repository, the one that most people want: small, with little loss.
_PREFERRED_VARIANTS = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
_REACH_S = 2.0
_LIST_S = 15.0


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    progress: DownloadProgress | None = None,
    offline: bool | None = None,
) -> Path:
    """The file or directory of a model, downloaded if needed.

    name: a path, a short name (`smollm2`), or a hub repository `org/name`, of which `org/name:Q4_K_M`
    is one GGUF file. revision: branch, tag or commit of a repository; None: the newest.
    progress: called with (file, bytes done, bytes in all) during downloads.
    offline: never touch the network; None: as the environment says.
    Raises ModelLoadError that says what to do.
    """
    offline = env.is_offline() if offline is None else offline
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ModelLoadError(f"revision {revision!r:.80} is no branch, tag or commit of the hub")
    if alias := ALIASES.get(name.lower()):
        _check_no_revision(name, revision, "a short name, which stands for one revision")
        return resolve_alias(alias, lambda a, d: _alias_from_hub(a, d, progress), offline=offline, progress=progress)
    if "\0" in name or len(name) > 4096:
        raise ModelLoadError(f"{name!r:.80}: not a path")
    path = Path(name).expanduser()
    if path.exists() or path.is_symlink():
        _check_no_revision(name, revision, "a path on this machine")
        return path
    match = _HUB_ID.fullmatch(name)
    if match is None or _PATH_LIKE.fullmatch(name):
        nearest = difflib.get_close_matches(name, ALIASES, 1, 0.4)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        raise ModelLoadError(
            f"{name}: no such file or directory, and no model of that name{hint} Give a path, a hub repository as "
            f"org/name or org/name:Q4_K_M, or one of: {', '.join(ALIASES)}"
        )
    return _from_hub(_Wanted(match["repository"], match["variant"], revision), offline, progress)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A model of the hub. variant: of a GGUF file. revision: None is the newest."""

    repository: str
    variant: str | None
    revision: str | None

    @property
    def label(self) -> str:
        name = f"{self.repository}:{self.variant}" if self.variant else self.repository
        return f"{name} at revision {self.revision}" if self.revision else name


def _check_no_revision(name: str, revision: str | None, kind: str) -> None:
    if revision is not None:
        raise ModelLoadError(
            f"{name} is {kind}, but revision {revision!r:.80} is for hub ids such as org/name; leave it out"
        )


def choose_files(repository: str, names: Iterable[str], variant: str | None) -> list[str]:
    """The files of a repository that make up the model; the one to open comes first.

    With a variant (`Q4_K_M`) these are the GGUF file of that name, or all its parts; otherwise the safetensors
    files with their companions, or the most common GGUF file.
    """
    names = sorted(name for name in names if _is_harmless(name))
    top = [name for name in names if "/" not in name]
    if variant is None and "config.json" in top and any(name.endswith(".safetensors") for name in top):
        weights = [name for name in top if name.endswith(".safetensors") or name == INDEX_NAME]
        return ["config.json", *weights, *sorted(_SIDE_FILES.intersection(top) - {"config.json"})]
    ggufs = [name for name in names if name.endswith(".gguf") and "mmproj" not in name.lower()]
    for wanted in [variant] if variant is not None else _PREFERRED_VARIANTS:
        pattern = re.compile(rf"(?:.*[-._/])?{re.escape(wanted)}(?:[-./].*)?\.gguf", re.IGNORECASE)
        if chosen := [name for name in ggufs if pattern.fullmatch(name)]:
            return part_names(chosen[0], ggufs.__contains__)
    if variant is None and ggufs:
        return part_names(ggufs[0], ggufs.__contains__)
    if ggufs:
        raise ModelLoadError(f"{repository}: no GGUF file for {variant!r}; there are: {', '.join(ggufs[:20])}")
    check_no_pickles(
        repository,
        names,
        "Take a repository with safetensors or GGUF files, or a revision of this one that has them, often refs/pr/N "
        "(option revision)",
    )
    raise ModelLoadError(f"{repository}: neither GGUF nor safetensors files in this repository")


def _from_hub(wanted: _Wanted, offline: bool, progress: DownloadProgress | None) -> Path:
    repository = wanted.repository
    if not offline:
        try:
            commit, names = _list_files(repository, _LIST_S, wanted.revision)
        except _UnreachableError as error:
            logger.warning("%s; looking among the models downloaded before", error)
        else:
            files = choose_files(repository, names, wanted.variant)
            paths = [_download(repository, name, commit, None, progress) for name in files]
            return paths[0].parent if files[0] == "config.json" else paths[0]
    return _from_hub_cache(wanted)


def _from_hub_cache(wanted: _Wanted) -> Path:
    """The model from an earlier download, without the network."""
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
            files = choose_files(wanted.repository, names, wanted.variant)
        except ModelLoadError:  # another variant
            continue
        return snapshot if files[0] == "config.json" else snapshot / files[0]
    raise ModelLoadError(
        f"{wanted.label}: not downloaded yet and the hub cannot be reached; connect to the network (and unset "
        "OCTAVO_OFFLINE and HF_HUB_OFFLINE), or give a path"
        + (f"; the downloaded commits are {', '.join(r.commit_hash for r in every)}" if every != revisions else "")
    )


class _UnreachableError(ModelLoadError):
    """The hub did not answer, as opposed to answering with a refusal."""


def _list_files(repository: str, timeout_s: float, revision: str | None = None) -> tuple[str, list[str]]:
    """The commit of a revision of a repository, and its files. None: the newest revision.

    Raises ModelLoadError; _UnreachableError if the hub does not answer in time.
    """
    from multiprocessing.pool import ThreadPool

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    options = {"timeout": timeout_s, "revision": revision}
    try:
        with ThreadPool(1) as pool:  # name resolution has no time limit of its own
            info = pool.apply_async(HfApi().model_info, [repository], options).get(timeout_s)
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403, 404):
            if isinstance(error, RevisionNotFoundError):
                raise ModelLoadError(f"{repository}: no branch, tag or commit {revision!r:.80} there") from error
            raise ModelLoadError(
                f"{repository}: no such repository, or access must be granted first; check the name, and if it is "
                "private or gated accept its terms, then set HF_TOKEN or run `hf auth login`"
            ) from error
        raise ModelLoadError(f"{repository}: the hub refused: {_one_line(error)}") from error
    except Exception as error:  # the exceptions of its HTTP library change from version to version
        raise _UnreachableError(
            f"{repository}: the hub cannot be reached within {timeout_s:g} s ({_one_line(error)})"
        ) from error
    return str(info.sha), [sibling.rfilename for sibling in info.siblings or []]


def _alias_from_hub(alias: Alias, directory: Path, progress: DownloadProgress | None) -> Path:
    _list_files(alias.repository, _REACH_S)  # fails fast without a network
    return _download(alias.repository, alias.filename, alias.revision, directory, progress)


def _download(
    repository: str, name: str, revision: str, directory: Path | None, progress: DownloadProgress | None
) -> Path:
    """Downloads one file into `directory`, or into the hub's own cache. A broken download is resumed."""
    from huggingface_hub import hf_hub_download

    try:
        bar = _progress_bar(name, progress)
        return Path(hf_hub_download(repository, name, revision=revision, local_dir=directory, tqdm_class=bar))
    except Exception as error:  # as above; also a full disk, which is an OSError
        raise ModelLoadError(
            f"{repository}: {name} could not be downloaded ({_one_line(error)}); check the network and the free space "
            "of the disk and try again, complete files are kept"
        ) from error


def _progress_bar(name: str, progress: DownloadProgress | None) -> type[tqdm]:
    """A progress bar for the hub library that shows nothing and reports to `progress`."""
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
    """True if a file name of the hub stays within its directory on every system."""
    pieces = name.split("/")
    return all(p not in ("", ".", "..") and len(p) <= 255 for p in pieces) and not re.search(r"[\0\\:]", name)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]
