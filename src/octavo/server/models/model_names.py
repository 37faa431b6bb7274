"""The names that requests may use for a model: its id, its aliases, and the path or repository that was served."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from octavo import env
from octavo.errors import UsageError

DEFAULT_NAME = "default"  # means the first model, unless another one has this name
_PART = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)
_HUB_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)")


def served_name(model: str) -> str:
    """Return the id of a model that was served without a name.

    For a file on this machine, this is the file name without suffix and part number. For a folder or a safetensors
    file, it is the folder's name, or the repository's name if the folder is in the hub's cache. Anything else is
    already a name.
    """
    path = env.user_path(model)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):  # too long, or not a path at all
        return model
    if not is_file and not is_folder:
        return model
    folder = (path if is_folder else path.parent).absolute()
    if is_file and ".safetensors" not in path.name:
        return _PART.sub("", path.stem) or model
    if folder.parent.name == "snapshots" and (match := _HUB_FOLDER.fullmatch(folder.parent.parent.name)):
        return f"{match[1]}/{match[2]}"
    return Path(folder.resolve()).name or model


def read_aliases(given: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Return alias -> id from the values of `--alias`: `a,b` for the only model, `NAME=a,b` for one of several models.

    Raises UsageError.
    """
    found: dict[str, str] = {}
    for text in given:
        name, separator, aliases = text.rpartition("=")
        if not separator:
            if len(names) > 1:
                raise UsageError(
                    f"alias is {text!r}, but there are {len(names)} models; name its model: {names[0]}={text}"
                )
            name = names[0]
        if name not in names:
            raise UsageError(f"alias is {text!r}, but there is no model {name!r}; available: {', '.join(names)}")
        for alias in split_names(aliases):
            if found.get(alias, name) != name or (alias in names and alias != name):
                raise UsageError(f"alias {alias!r} is given to two models; give each its own")
            found[alias] = name
    return {alias: name for alias, name in found.items() if alias != name}


def split_names(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


class ModelNames:
    """Finds a model's id by any of its names.

    models: the path or repository served under each id
    aliases: result of `read_aliases`
    """

    def __init__(self, models: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> None:
        self._known: dict[str, str] = {}
        for name, model in reversed(list(models.items())):  # if two ids have the same file, the first one counts
            self._known |= dict.fromkeys((model, str(env.user_path(model).absolute())), name)
        if models:
            self._known[DEFAULT_NAME] = next(iter(models))
        self._known |= {**(aliases or {}), **{name: name for name in models}}
        self._aliases = dict(aliases or {})

    def find(self, name: str) -> str | None:
        """Return the model's id, or None if no model has this name."""
        return self._known.get(name)

    def aliases_of(self, name: str) -> list[str]:
        """Return the aliases of an id, in the given order."""
        return [alias for alias, owner in self._aliases.items() if owner == name]
