"""The facts about an adapter that its headers tell, without the model that it is for."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.adapters.gguf import ALPHA, INVOCATION, is_adapter_file
from octavo.adapters.peft import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAME, check_settings, check_tensors
from octavo.adapters.read import files_of
from octavo.errors import ModelLoadError
from octavo.loader.gguf import open_gguf
from octavo.loader.json_file import read_json_object
from octavo.loader.safetensors import open_safetensors
from octavo.loader.tensor_files import TensorFiles


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter as its files describe it.

    ranks: how many modules have each rank. modules: how many have each last name. problem: the reason why no model
    takes it, or None; whether its shapes fit a model is seen when it is read for one.
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
    """The facts about an adapter; None: the path is none. Raises ModelLoadError for a file that cannot be read."""
    if path.is_dir():
        return _of_folder(path) if (path / CONFIG_NAME).is_file() else None
    if path.name in (CONFIG_NAME, WEIGHTS_NAME):
        return describe_adapter(path.parent)
    return _of_gguf(path) if path.suffix == ".gguf" and is_adapter_file(path) else None


def _of_folder(folder: Path) -> AdapterFacts:
    path = folder / CONFIG_NAME
    settings = read_json_object(path, MAX_CONFIG_BYTES)
    problem = None
    with closing(open_safetensors(folder / WEIGHTS_NAME)) as file:
        try:
            check_tensors(folder / WEIGHTS_NAME, file.tensors)
            check_settings(path, settings)
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
            **_of_tensors(file, folder, (".lora_A.weight", ".lora_B.weight")),
        )


def _of_gguf(path: Path) -> AdapterFacts:
    with closing(open_gguf(path)) as file:
        metadata = file.metadata
        return AdapterFacts(
            path=str(path),
            format="gguf",
            base=_text(metadata.get("general.base_model.0.name")),
            alpha=_number(metadata.get(ALPHA)),
            use_rslora=False,
            invocation_tokens=_tokens(np.asarray(metadata.get(INVOCATION, ())).tolist()),
            problem=None,
            **_of_tensors(file, path, (".weight.lora_a", ".weight.lora_b")),
        )


def _of_tensors(file: TensorFiles, path: Path, endings: tuple[str, str]) -> dict[str, Any]:
    ranks: Counter[int] = Counter()
    modules: Counter[str] = Counter()
    for name, info in file.tensors.items():
        if name.endswith(endings[0]) and len(info.shape) == 2:
            ranks[info.shape[0]] += 1
            modules[name.removesuffix(endings[0]).rpartition(".")[2]] += 1
    return {
        "ranks": dict(sorted(ranks.items())),
        "modules": dict(modules.most_common()),
        "num_parameters": sum(math.prod(info.shape) for info in file.tensors.values()),
        "file_bytes": sum(each.stat().st_size for each in files_of(path)),
    }


def _text(found: object) -> str | None:
    return found if isinstance(found, str) and found else None


def _number(found: object) -> float | None:
    return float(found) if type(found) in (int, float) and abs(found) < 1e30 else None  # type: ignore[arg-type]


def _tokens(found: object) -> list[int]:
    return found if isinstance(found, list) and all(type(token) is int for token in found) else []
