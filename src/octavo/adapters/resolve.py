"""Finds the files of an adapter: a path, an `ADAPTER` in an Ollama Modelfile, or a hub repository."""

from __future__ import annotations

import re
from pathlib import Path

from octavo import env
from octavo.adapters.peft import CONFIG_NAME, WEIGHTS_NAME
from octavo.errors import ModelLoadError
from octavo.loader.hub import download, list_files
from octavo.loader.pickles import check_no_pickles
from octavo.loader.references import parse

_MAX_MODELFILE_BYTES = 1 << 16
_INSTRUCTION = re.compile(r"^\s*ADAPTER\s+(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
_FROM = re.compile(r"^\s*FROM\s+\S", re.IGNORECASE | re.MULTILINE)


def resolve_adapter(source: str) -> Path:
    """Return the folder or GGUF file of an adapter, downloaded if needed.

    source: a path, an Ollama Modelfile with an `ADAPTER`, or a repository `org/name`.
    Raises ModelLoadError.
    """
    if "\0" in source or len(source) > 4096:
        raise ModelLoadError(f"{source!r:.80}: not a path")
    path = env.user_path(source)
    if path.exists():
        return _of_modelfile(path) or path
    wanted = parse(source)
    if wanted is None or source.startswith(("/", ".", "~")):
        raise ModelLoadError(f"{source}: no such file or directory; give an adapter's folder or file, or org/name")
    if env.is_offline():
        raise ModelLoadError(f"{source}: no such path, and the hub is off (OCTAVO_OFFLINE or HF_HUB_OFFLINE)")
    commit, names = list_files(wanted.repository, revision=wanted.revision)
    files = [name for name in (CONFIG_NAME, WEIGHTS_NAME) if name in names]
    if len(files) < 2:
        files = sorted(name for name in names if name.endswith(".gguf") and "/" not in name)[:2]
        if len(files) != 1:
            check_no_pickles(wanted.repository, names, "Use an adapter with safetensors")
            raise ModelLoadError(
                f"{wanted.repository}: no adapter there: {CONFIG_NAME} with {WEIGHTS_NAME}, or one GGUF file, is needed"
            )
    paths = [download(wanted.repository, name, commit, None, None) for name in files]
    return paths[0].parent if files[0] == CONFIG_NAME else paths[0]


def _of_modelfile(path: Path) -> Path | None:
    """Return the adapter named by a Modelfile, relative to its folder, or None if the path is not a Modelfile."""
    if not path.is_file() or path.suffix in (".gguf", ".safetensors", ".json"):
        return None
    if path.stat().st_size > _MAX_MODELFILE_BYTES:
        return None
    text = path.read_text("utf-8", "replace")
    if not _FROM.search(text):
        return None
    found = [name.strip("\"'") for name in _INSTRUCTION.findall(text)]
    if len(found) != 1:
        raise ModelLoadError(f"{path}: {len(found)} instructions ADAPTER; a request has one adapter")
    adapter = path.parent / env.user_path(found[0])
    if not adapter.exists():
        raise ModelLoadError(f"{path}: ADAPTER {found[0]}: no such file or directory")
    return adapter
