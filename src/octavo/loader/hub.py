"""Finds a model by path, short name, or repository of the Hugging Face hub."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import env
from octavo.errors import ModelLoadError
from octavo.loader.aliases import ALIASES, Alias, DownloadProgress, resolve_alias
from octavo.loader.gguf import part_names
from octavo.loader.safetensors import INDEX_NAME

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<variant>[\w.-]+))?", re.ASCII)
_PATH_LIKE = re.compile(r"[./~].*|.*\.(gguf|safetensors)", re.DOTALL)
_SIDE_FILES = frozenset(
    {"config.json", "quantize_config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
)
_SIDE_FILES |= {"tokenizer.model", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"}
# Of several GGUF files in a repository, the one that most people want: small, with little loss.
_PREFERRED_VARIANTS = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
_REACH_S = 2.0
_LIST_S = 15.0


def resolve_model(name: str, *, progress: DownloadProgress | None = None, offline: bool | None = None) -> Path:
    """The file or directory of a model, downloaded if needed.

    name: a path, a short name (`smollm2`), or a hub repository `org/name`, of which `org/name:Q4_K_M`
    is one GGUF file. progress: called with (file, bytes done, bytes in all) during downloads.
    offline: never touch the network; None: as the environment says.
    Raises ModelLoadError that says what to do.
    """
    offline = env.is_offline() if offline is None else offline
    if alias := ALIASES.get(name.lower()):
        return resolve_alias(alias, lambda a, d: _alias_from_hub(a, d, progress), offline=offline, progress=progress)
    if "\0" in name or len(name) > 4096:
        raise ModelLoadError(f"{name!r:.80}: not a path")
    path = Path(name).expanduser()
    if path.exists() or path.is_symlink():
        return path
    match = _HUB_ID.fullmatch(name)
    if match is None or _PATH_LIKE.fullmatch(name):
        nearest = difflib.get_close_matches(name, ALIASES, 1, 0.4)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        raise ModelLoadError(
            f"{name}: no such file or directory, and no model of that name{hint} Give a path, a hub repository as "
            f"org/name or org/name:Q4_K_M, or one of: {', '.join(ALIASES)}"
        )
    return _from_hub(match["repository"], match["variant"], offline, progress)


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
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise ModelLoadError(f"{repository}: only pickle checkpoints, which are not supported")
    raise ModelLoadError(f"{repository}: neither GGUF nor safetensors files in this repository")


def _from_hub(repository: str, variant: str | None, offline: bool, progress: DownloadProgress | None) -> Path:
    if not offline:
        try:
            revision, names = _list_files(repository, _LIST_S)
        except _UnreachableError as error:
            logger.warning("%s; looking among the models downloaded before", error)
        else:
            files = choose_files(repository, names, variant)
            paths = [_download(repository, name, revision, None, progress) for name in files]
            return paths[0].parent if files[0] == "config.json" else paths[0]
    return _from_hub_cache(repository, variant)


def _from_hub_cache(repository: str, variant: str | None) -> Path:
    """The model from an earlier download, without the network."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        repositories = frozenset()
    revisions = [r for found in repositories if found.repo_id == repository for r in found.revisions]
    for revision in sorted(revisions, key=lambda r: r.last_modified, reverse=True):
        snapshot = revision.snapshot_path
        names = [file.file_path.relative_to(snapshot).as_posix() for file in revision.files]
        try:
            files = choose_files(repository, names, variant)
        except ModelLoadError:  # another variant
            continue
        return snapshot if files[0] == "config.json" else snapshot / files[0]
    wanted = f"{repository}:{variant}" if variant else repository
    raise ModelLoadError(
        f"{wanted}: not downloaded yet and the hub cannot be reached; connect to the network (and unset "
        "OCTAVO_OFFLINE and HF_HUB_OFFLINE), or give a path"
    )


class _UnreachableError(ModelLoadError):
    """The hub did not answer, as opposed to answering with a refusal."""


def _list_files(repository: str, timeout_s: float) -> tuple[str, list[str]]:
    """The current commit of a repository, and its files.

    Raises ModelLoadError; _UnreachableError if the hub does not answer in time.
    """
    from multiprocessing.pool import ThreadPool

    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        with ThreadPool(1) as pool:  # name resolution has no time limit of its own
            info = pool.apply_async(HfApi().model_info, [repository], {"timeout": timeout_s}).get(timeout_s)
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403, 404):
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
