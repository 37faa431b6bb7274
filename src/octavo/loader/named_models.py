"""The user's own model names, each for a model with a system message, a template, sampling or an adapter.

`octavo create` and `octavo cp` write them as JSON files in `models/named` of the cache folder.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo import env
from octavo.config import EngineConfig
from octavo.errors import ModelWriteError, UsageError
from octavo.loader import catalogue
from octavo.loader.aliases import ALIASES
from octavo.loader.model_cache import is_trusted

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}(?::[\w.-]{1,40})?", re.ASCII)
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model with options, under a name that the user chose.

    model: path, hub id or short name.
    options: fields of `octavo.config.EngineConfig`.
    """

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)


def find(name: str) -> NamedModel | None:
    """Return the model of this name, or None if the user has not created one.

    As in Ollama, `NAME:latest` means `NAME`.
    """
    name = name.removesuffix(":latest")
    if not _NAME.fullmatch(name):
        return None
    return _read(_folder() / f"{name}.json")


def every() -> list[NamedModel]:
    """Return all of the user's models, sorted by name."""
    found = (_read(path) for path in sorted(_folder().glob("*.json")))
    return [model for model in found if model is not None]


def expanded(model: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model that a name stands for, and its options, overridden by the given ones.

    Raises UsageError for invalid sampling.
    """
    named = find(model) if isinstance(model, str) else None
    if named is None:
        return model, dict(options)
    sampling = named.options.get("override_generation_config")
    given = options.get("override_generation_config")
    merged = {**named.options, **options}
    if "lora_modules" in options and "default_lora" not in options:  # the name's default is not among these adapters
        merged.pop("default_lora", None)
    if sampling and given:
        given = EngineConfig(override_generation_config=given).sampling_overrides
        merged["override_generation_config"] = {**sampling, **given}
    return named.model, merged


def store(named: NamedModel) -> None:
    """Write a named model, replacing an earlier one of the same name.

    Raises UsageError if the name is invalid or belongs to `octavo list --all`, and ModelWriteError if it cannot be
    written.
    """
    from octavo.loader.atomic_file import write_text

    name = named.name.removesuffix(":latest")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{named.name!r:.80} is not a valid name; use letters, digits, dots, dashes and underscores, such as "
            "my-model:4b"
        )
    if name.lower() in ALIASES or catalogue.find(name) is not None:
        raise UsageError(f"{name} is a model in `octavo list --all`; choose another name")
    folder = _folder()
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ModelWriteError(f"{folder}: cannot be created ({error.strerror}); set OCTAVO_CACHE") from error
    if not is_trusted(folder):
        raise ModelWriteError(f"{folder}: other users may write to it; run chmod 700 on it, or set OCTAVO_CACHE")
    content = {"model": named.model, "options": named.options}
    write_text(folder / f"{name}.json", json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def remove(name: str) -> None:
    """Delete a name. The model that it stands for stays."""
    (_folder() / f"{name}.json").unlink(missing_ok=True)


def _folder() -> Path:
    return env.cache_dir() / "models" / "named"


def _read(path: Path) -> NamedModel | None:
    """Return the model in a file, or None if the file is missing, invalid or writable by others."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if path.stat().st_size <= _MAX_BYTES and is_trusted(path.parent):
            content = json.loads(path.read_text("utf-8"))
            if isinstance(content["model"], str) and isinstance(content["options"], dict):
                return NamedModel(path.name.removesuffix(".json"), content["model"], content["options"])
    return None
