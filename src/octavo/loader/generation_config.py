"""The sampling parameters that a model's authors recommend, for the fields that a request does not set.

The first source with a value is used: `generation_config.json` next to safetensors files or the `general.sampling.*`
keys of a GGUF file, then the table `sampling_defaults.json`. The table was made from the authors' files and has a row
for each base model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from octavo import env
from octavo.config import SamplingValue
from octavo.errors import ModelLoadError, UsageError
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.json_file import read_json_object
from octavo.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"

_MAX_BYTES = 1 << 20
_NEUTRAL = ("none", "vllm")  # the second is vLLM's name
# The field of `SamplingParams` -> its key in generation_config.json, and the last part of its key in a GGUF file.
SAMPLING_KEYS = {
    "temperature": ("temperature", "temp"),
    "top_p": ("top_p", "top_p"),
    "top_k": ("top_k", "top_k"),
    "min_p": ("min_p", "min_p"),
    "typical_p": ("typical_p", None),
    "repetition_penalty": ("repetition_penalty", "penalty_repeat"),
}
# Keys of GGUF files that name the model, the most exact one first.
_NAMES = ("general.name", "general.base_model.0.name", "general.basename")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Recommended sampling parameters.

    values: by field of `SamplingParams`.
    source: where they come from, in words.
    """

    values: dict[str, SamplingValue] = field(default_factory=dict)
    source: str = "neutral values"

    def without(self, given: Container[str]) -> dict[str, SamplingValue]:
        """Return the values of all fields except the given ones."""
        return {name: value for name, value in self.values.items() if name not in given}

    @property
    def numbers(self) -> dict[str, int | float]:
        """The numeric values, that is, all except `stop`."""
        return {name: value for name, value in self.values.items() if not isinstance(value, tuple)}

    def overridden(self, values: Mapping[str, SamplingValue]) -> SamplingDefaults:
        """Return the defaults with other values for some fields."""
        if not values:
            return self
        source = f"{self.source}, but {', '.join(values)} of override_generation_config"
        return SamplingDefaults({**self.values, **values}, source)


def sampling_defaults(checkpoint: Checkpoint, choice: str = "auto") -> SamplingDefaults:
    """Return the defaults of a model.

    choice: see `EngineConfig.generation_config`.

    Raises ModelLoadError naming file, key and value.
    """
    if choice in _NEUTRAL:
        return SamplingDefaults()
    if choice != "auto":
        path = env.user_path(choice)
        path = path / FILE_NAME if path.is_dir() else path
        return SamplingDefaults(_from_json(path), str(path))
    if checkpoint.format == "gguf":
        keys = {name: key and f"general.sampling.{key}" for name, (_, key) in SAMPLING_KEYS.items()}
        if values := _checked(checkpoint.path, checkpoint.file.metadata, keys):
            return SamplingDefaults(values, "general.sampling of the file")
    elif (path := checkpoint.path.parent / FILE_NAME).is_file() and (values := _from_json(path)):
        return SamplingDefaults(values, FILE_NAME)
    base = _base_model(checkpoint)
    return SamplingDefaults(_table()[base], f"recommended by the authors of {base}") if base else SamplingDefaults()


def _from_json(path: Path) -> dict[str, SamplingValue]:
    config = read_json_object(path, _MAX_BYTES)
    values = _checked(path, config, {name: key for name, (key, _) in SAMPLING_KEYS.items()})
    return {"temperature": 0.0} if config.get("do_sample") is False else values


def _checked(path: Path, found: Mapping[str, object], keys: Mapping[str, str | None]) -> dict[str, SamplingValue]:
    """Return the values that a file gives, by field. Raises ModelLoadError naming key and value if one is invalid."""
    values: dict[str, SamplingValue] = {}
    for name, key in keys.items():
        if key is None or found.get(key) is None:
            continue
        try:
            value = getattr(SamplingParams(**{name: found[key]}), name)  # type: ignore[arg-type]
        except UsageError as error:
            raise ModelLoadError(f"{path}: {key}: {error}; --generation-config none leaves it out") from error
        values[name] = round(value, 6)  # a GGUF file has float32: 0.8 reads as 0.800000011920929
    return values


def _base_model(checkpoint: Checkpoint) -> str | None:
    """Return the name of this model's row in the table, or None if there is none.

    The row is found by the names in the model's metadata, by its file or folder, or by its folder in the hub's cache.
    """
    path, is_gguf = checkpoint.path, checkpoint.format == "gguf"
    names = [checkpoint.file.metadata.get(key) for key in _NAMES] if is_gguf else []
    hub_names = re.findall(r"models--([^/]+)", str(path))
    for name in (*names, path.stem if is_gguf else path.parent.name, *hub_names):
        plain = re.sub(r"[^a-z0-9.]+", "-", name.lower()) if isinstance(name, str) else ""
        matches = [key for key in _table() if re.search(rf"(?:^|-){re.escape(key)}(?:$|[-.])", plain)]
        if matches:
            return max(matches, key=len)
    return None


@cache
def _table() -> dict[str, dict[str, SamplingValue]]:
    text = Path(__file__).with_name("sampling_defaults.json").read_text()
    table: dict[str, dict[str, SamplingValue]] = json.loads(text)
    checked = {base: SamplingParams(**values) for base, values in table.items()}  # type: ignore[arg-type]
    return {base: {name: getattr(checked[base], name) for name in values} for base, values in table.items()}
