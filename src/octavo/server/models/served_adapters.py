"""The server's adapters: those in its options, those in a folder, and those loaded and unloaded at run time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.adapters.read import Stamps, files_of, stamps_of
from octavo.adapters.resolve import resolve_adapter
from octavo.config import scaled_path
from octavo.errors import ModelLoadError, UsageError
from octavo.server.errors import ApiError

_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_MAX_CHARS = 256  # maximum length of a name in the engine
_FOLDER_NAME = re.compile(r"[\w][\w.@+-]{0,127}")  # one component of a path, but not a hidden one


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that requests can use under its own name.

    path: location of its files
    parent: id of its model
    number: its id in llama.cpp's API
    source: path or repository as given
    owner: the key that loaded it at run time, or None if it was in the server's options
    nbytes: size of its files
    is_of_folder: whether it was found by name in the server's folder
    stamps: stamps of its files when they were found there (`stamps_of`)
    """

    name: str
    path: Path
    parent: str
    number: int
    source: str
    owner: str | None = None
    nbytes: int = 0
    scale: float = 1.0
    is_of_folder: bool = False
    stamps: Stamps = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engine_name(self) -> str:
        """The adapter's name in the engine. It is unique even if adapters of the same name are loaded one after
        another.
        """
        word = self.name.replace("/", "_").replace("\\", "_")
        return f"{self.number}:{self.scale:g}:{word}"[:_MAX_CHARS]


@dataclass(frozen=True, slots=True)
class AdapterGiven:
    """An adapter as given by an option or a request.

    parent: the adapter's model, or None for the first model
    """

    name: str
    source: str
    parent: str | None = None
    scale: float = 1.0

    @classmethod
    def parse_all(cls, text: str) -> list[AdapterGiven]:
        """Parse the value of `--lora-modules`: words of the form `NAME=PATH` separated by spaces, a JSON object in
        vLLM's form (name, path, base_model_name), or a JSON list of such words and objects.

        Raises UsageError.
        """
        if not text.lstrip().startswith(("{", "[")):
            return [cls._of_word(word) for word in text.split()]
        try:
            value: Any = json.loads(text)
        except ValueError as error:
            raise UsageError(f"lora_modules is {text!r:.100}, not valid JSON: {error}") from error
        items = value if isinstance(value, list) else [value]
        return [each for item in items for each in cls._of_item(item)]

    @classmethod
    def _of_item(cls, item: object) -> list[AdapterGiven]:
        if isinstance(item, dict):
            return [cls._of_object(item)]
        if not isinstance(item, str):
            raise UsageError(f"lora_modules has {item!r:.100}; write NAME=PATH, or an object with name and path")
        return cls.parse_all(item) if item.lstrip().startswith("{") else [cls._of_word(item)]

    @classmethod
    def _of_word(cls, word: str) -> AdapterGiven:
        name, separator, source = word.partition("=")
        if not separator or not source:
            raise UsageError(f"lora_modules has {word!r:.100}; write NAME=PATH, or JSON with name and path")
        path, scale = scaled_path(source)
        return cls(_checked(name), path, scale=scale)

    @classmethod
    def _of_object(cls, value: Mapping[str, object]) -> AdapterGiven:
        name, path, parent = (value.get(key) for key in ("name", "path", "base_model_name"))
        unknown = value.keys() - {"name", "path", "base_model_name"}
        if unknown or not isinstance(name, str) or not isinstance(path, str) or not isinstance(parent, str | None):
            raise UsageError(
                f"lora_modules has {dict(value)!r:.100}; an object must have name and path, and may have "
                "base_model_name"
            )
        return cls(_checked(name), path, parent)


@dataclass(frozen=True, slots=True)
class AdapterQuota:
    """The maximum number of adapters that one key may load at run time, and the maximum size of their files."""

    count: int
    nbytes: int


class ServedAdapters:
    """All adapters of a server by name. Belongs to one event loop.

    models: the models' ids; no adapter may have one of these names
    folder: folder with adapters that requests can use by the names of its entries, or None
    allows_all: whether clients without an admin key may load and unload adapters
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        folder: Path | None = None,
        quota: AdapterQuota = AdapterQuota(8, 1 << 30),
        allows_all: bool = False,
    ) -> None:
        self._models = models
        self._folder = folder
        self._quota = quota
        self._by_name: dict[str, ServedAdapter] = {}
        self._next_number = 0
        self._applied: dict[int, float] = {}  # llama.cpp's scales for requests that name the model itself
        self.allows_all = allows_all

    @property
    def entries(self) -> list[ServedAdapter]:
        """All adapters registered so far, ordered by number."""
        return list(self._by_name.values())

    def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter with this name, or None if there is none. If needed, register it from the folder."""
        known = self._by_name.get(name)
        if known is not None and not known.is_of_folder:
            return known
        path = self._in_folder(name)
        if path is None:
            return None
        if known is not None and known.stamps == stamps_of(path):
            return known  # otherwise its files have changed
        adapter = replace(self.new(AdapterGiven(name, str(path)), path), is_of_folder=True, stamps=stamps_of(path))
        self.put(adapter)
        return adapter

    def of(self, model: str) -> list[ServedAdapter]:
        """Return the adapters of one model."""
        return [adapter for adapter in self._by_name.values() if adapter.parent == model]

    def locate(self, source: str) -> Path:
        """Return the path of an adapter's files, downloaded if needed.

        source: a name in the folder, a path or a repository on the hub

        May take a long time. Raises ModelLoadError.
        """
        return self._in_folder(source) or resolve_adapter(source)

    def check(self, given: AdapterGiven, path: Path, owner: str | None, *, replaces: bool = False) -> None:
        """Raise UsageError for an invalid name or model, and ApiError 429 if the key's quota is exceeded.

        replaces: allow an existing adapter of that name, as long as it has the same owner or `owner` is None
        """
        parent = given.parent or self._models[0]
        if parent not in self._models:
            raise UsageError(f"base_model_name is {parent!r:.100}; available: {', '.join(self._models)}")
        if given.name in self._models:
            raise UsageError(f"lora_name {given.name!r:.100} is the name of a model; choose another", param="lora_name")
        old = self._by_name.get(given.name)
        if old is not None and not replaces:
            message = f"the adapter {given.name!r:.100} has been loaded already; unload it, or set load_inplace"
            raise UsageError(message, param="lora_name")
        if owner:
            self.check_owner(given.name, owner)
        if owner is not None:
            self._check_quota(owner, _nbytes(path), old)

    def new(self, given: AdapterGiven, path: Path, owner: str | None = None) -> ServedAdapter:
        """Return a new adapter with its own number. Requests can use it only after `put`."""
        parent = given.parent or self._models[0]
        self._next_number += 1
        number, nbytes = self._next_number - 1, _nbytes(path)
        return ServedAdapter(given.name, path, parent, number, given.source, owner, nbytes, given.scale)

    def put(self, adapter: ServedAdapter) -> ServedAdapter | None:
        """Register the adapter under its name, and return the adapter that it replaces."""
        old = self._by_name.pop(adapter.name, None)
        if old is not None:
            self._applied.pop(old.number, None)
        self._by_name[adapter.name] = adapter
        return old

    def remove(self, name: str) -> ServedAdapter:
        """Remove an adapter. Requests that use it continue. Raises ApiError 404."""
        if (found := self._by_name.pop(name, None)) is None:
            known = ", ".join(self._by_name) or "none"
            raise ApiError(404, f"there is no adapter {name!r:.100}; loaded: {known}", param="lora_name")
        self._applied.pop(found.number, None)
        return found

    def numbered(self, scales: Iterable[tuple[int, float]], param: str) -> ServedAdapter | None:
        """Return the adapter with a nonzero scale in llama.cpp's pairs of number and scale, or None if all scales are
        zero.

        Raises UsageError for a number that no adapter has, and for several nonzero scales.
        """
        known = {adapter.number: adapter for adapter in self._by_name.values()}
        found = []
        for number, scale in scales:
            if number not in known:
                there = ", ".join(map(str, known)) or "none"
                raise UsageError(f"{param}: there is no adapter with id {number}; available: {there}", param=param)
            if scale:
                found.append(replace(known[number], scale=scale))
        if len(found) > 1:
            names = " and ".join(adapter.name for adapter in found[:2])
            reason = f"{param}: {names} at once, but a request has one adapter: set the other scales to 0"
            raise UsageError(reason, param=param)
        return found[0] if found else None

    def apply(self, scales: Sequence[tuple[int, float]]) -> None:
        """Set the scales for requests that name the model itself. Raises the same errors as `numbered`."""
        self.numbered(scales, "id")
        self._applied = dict(scales)

    def applied_to(self, model: str) -> ServedAdapter | None:
        """Return the adapter for requests that name the model itself."""
        found = self.numbered(self._applied.items(), "id") if self._applied else None
        return found if found is not None and found.parent == model else None

    def scale_of(self, adapter: ServedAdapter) -> float:
        """Return the adapter's scale in requests that name the model itself."""
        return self._applied.get(adapter.number, 0.0)

    def check_owner(self, name: str, owner: str) -> None:
        """Raise ApiError 403 if another key, or the server itself, has loaded the adapter of this name."""
        found = self._by_name.get(name)
        if found is not None and found.owner != owner:
            raise ApiError(403, f"the adapter {name!r:.100} was not loaded with this key", code="admin_key_required")

    def check_inside(self, source: str) -> None:
        """Raise ApiError 403 if there is a folder and the source does not name one of its entries."""
        if self._folder is None:
            return
        if self._in_folder(source) is None:
            raise ApiError(403, f"lora_path {source!r:.100} is not a name in --lora-dir; other paths need an admin key")

    def _in_folder(self, name: str) -> Path | None:
        """Return the path of the adapter with this name if it is really in the folder, and not a link to somewhere
        else.
        """
        if self._folder is None or not _FOLDER_NAME.fullmatch(name):
            return None
        root = self._folder.resolve()
        for path in (root / name, root / f"{name}.gguf"):
            with suppress(OSError, ModelLoadError):
                if path.resolve().parent == root and all(
                    file.resolve().is_relative_to(root) for file in files_of(path)
                ):
                    return path
        return None

    def _check_quota(self, owner: str, nbytes: int, replaced: ServedAdapter | None) -> None:
        own = [adapter for adapter in self._by_name.values() if adapter.owner == owner and adapter is not replaced]
        if len(own) >= self._quota.count:
            names = ", ".join(adapter.name for adapter in own)
            message = f"this key has loaded {len(own)} adapters, the limit (--lora-quota): {names}; unload one"
            raise ApiError(429, message, code="adapter_quota_exceeded")
        total = sum(adapter.nbytes for adapter in own) + nbytes
        if total > self._quota.nbytes:
            message = (
                f"the adapters of this key would have {total:,} bytes; at most {self._quota.nbytes:,} are allowed "
                "(--lora-quota-bytes): unload one"
            )
            raise ApiError(429, message, code="adapter_quota_exceeded")


def _nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in files_of(path))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"lora_modules: the name {name!r:.100} must have 1 to 256 visible characters")
    return name
