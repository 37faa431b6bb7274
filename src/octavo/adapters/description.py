"""Describes an adapter from its headers, without the model that it is for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from octavo.adapters.expert_parameters import parameter_of
from octavo.adapters.gguf import INVOCATION, checked_alpha
from octavo.adapters.peft import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    PREFIX,
    WEIGHTS_NAME,
    AdapterScales,
    check_tensors,
    checked_scales,
    copies_of,
    weights_file,
)
from octavo.adapters.read import files_of
from octavo.errors import ModelLoadError
from octavo.loader.gguf import open_gguf
from octavo.loader.json_file import read_json_object
from octavo.loader.safetensors import open_safetensors

_FACTOR = ".lora_A.weight"


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter as its files describe it.

    ranks: the number of modules with each rank.
    modules: the number of modules for each last part of a module's name, such as `q_proj`.
    problem: the reason why no model accepts it, or None. Whether its shapes fit a model is checked only when it is read
    for that model.
    """

    path: str
    format: str  # peft or gguf
    base: str | None  # the name of the model that it was trained for
    ranks: dict[int, int]
    modules: dict[str, int]
    alpha: float | None
    use_rslora: bool
    invocation_tokens: list[int]
    num_parameters: int
    file_bytes: int
    problem: str | None


def describe_adapter(path: Path) -> AdapterFacts | None:
    """Return the facts about an adapter, or None if the path is not one.

    Raises ModelLoadError for an unreadable file.
    """
    if path.is_dir():
        return _of_folder(path) if (path / CONFIG_NAME).is_file() else None
    if path.name in (CONFIG_NAME, WEIGHTS_NAME):
        return describe_adapter(path.parent)
    return _of_gguf(path) if path.suffix == ".gguf" else None


def _of_folder(folder: Path) -> AdapterFacts:
    path = folder / CONFIG_NAME
    settings = read_json_object(path, MAX_CONFIG_BYTES)
    problem, weights = None, weights_file(folder)
    wrapped: dict[str, tuple[str, int]] = {}
    with closing(open_safetensors(weights)) as file:
        copies = copies_of(file.tensors, settings)
        shapes = {name: info.shape for name, info in file.tensors.items() if name not in copies}
        try:
            check_tensors(weights, shapes, settings)
            wrapped = _wrapped(shapes, checked_scales(path, settings))
        except ModelLoadError as error:
            problem = str(error)
        return AdapterFacts(
            path=str(folder),
            format="peft",
            base=_text(settings.get("base_model_name_or_path")),
            alpha=_number(settings.get("lora_alpha")),
            use_rslora=bool(settings.get("use_rslora")),
            invocation_tokens=_tokens(settings.get("alora_invocation_tokens")),
            problem=problem,
            **_of_tensors(shapes, folder, (_FACTOR, ".lora_embedding_A"), wrapped),
        )


def _of_gguf(path: Path) -> AdapterFacts | None:
    with closing(open_gguf(path)) as file:
        metadata, shapes = file.metadata, {name: info.shape for name, info in file.tensors.items()}
        if metadata.get("general.type") != "adapter":
            return None
        alpha = problem = None
        try:
            alpha = checked_alpha(path, metadata)
        except ModelLoadError as error:
            problem = str(error)
        return AdapterFacts(
            path=str(path),
            format="gguf",
            base=_text(metadata.get("general.base_model.0.name")),
            alpha=alpha,
            use_rslora=False,
            invocation_tokens=_tokens(np.asarray(metadata.get(INVOCATION, ())).tolist()),
            problem=problem,
            **_of_tensors(shapes, path, (".weight.lora_a",)),
        )


def _wrapped(shapes: Mapping[str, tuple[int, ...]], scales: AdapterScales) -> dict[str, tuple[str, int]]:
    """Return, by tensor name, the `target_parameters` entry that the tensor belongs to and the rank of an expert."""
    modules = {name: name.removeprefix(PREFIX).removesuffix(_FACTOR) for name in shapes if name.endswith(_FACTOR)}
    found = {name: parameter_of(module, scales.targets) for name, module in modules.items()}
    return {name: (each, int(scales.rank_of(each))) for name, each in found.items() if each is not None}


def _of_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    path: Path,
    endings: tuple[str, ...],
    wrapped: Mapping[str, tuple[str, int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Describe an adapter from the shapes of its tensors.

    shapes: shapes of the adapter's tensors, by name.
    endings: endings of the names of A factors.
    wrapped: result of `_wrapped`.
    """
    ranks: Counter[int] = Counter()
    modules: Counter[str] = Counter()
    for name, shape in shapes.items():
        ending = next((each for each in endings if name.endswith(each)), None)
        if ending is not None and len(shape) in (2, 3):  # one matrix, or one per expert
            module, rank = wrapped.get(name, (name.removesuffix(ending), shape[-2]))
            ranks[rank] += 1
            modules[module.removesuffix(".weight").rpartition(".")[2]] += 1
    return {
        "ranks": dict(sorted(ranks.items())),
        "modules": dict(modules.most_common()),
        "num_parameters": sum(map(math.prod, shapes.values())),
        "file_bytes": sum(each.stat().st_size for each in files_of(path)),
    }


def _text(found: object) -> str | None:
    return found if isinstance(found, str) and found else None


def _number(found: object) -> float | None:
    return float(found) if type(found) in (int, float) and abs(found) < 1e30 else None  # type: ignore[arg-type]


def _tokens(found: object) -> list[int]:
    return found if isinstance(found, list) and all(type(token) is int for token in found) else []
