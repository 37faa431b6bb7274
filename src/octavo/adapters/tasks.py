"""Task adapters inside a checkpoint: Jina Embeddings v3 stores low-rank products together with its weights.

Source: the class LoRAParametrization in the model's public code. Sturua et al., arXiv 2409.10173.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from octavo.adapters.adapter import EMBEDDING, AdapterBase, StoredAdapter, StoredPart
from octavo.batch import Float32
from octavo.errors import ModelLoadError
from octavo.graph.ops.low_rank import LowRank
from octavo.loader.checkpoint import checkpoint_name
from octavo.loader.json_file import read_json_object
from octavo.loader.model_file import find_model_file
from octavo.loader.safetensors import open_safetensors
from octavo.loader.tensor_files import TensorFiles
from octavo.models._reading import ConfigReader

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 1 << 20
_MAX_TASKS = 64
_TASKS = "lora_adaptations"  # the names of the tasks, in the order of the stacks of factors
_FACTOR = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<factor>[AB])")
_TYPES = "embed_types.weight"


def has_tasks(folder: Path) -> bool:
    """True if a folder holds a checkpoint with task adapters. Raises ModelLoadError if config.json is damaged."""
    path = folder / CONFIG_NAME
    return path.is_file() and bool(read_json_object(path, MAX_CONFIG_BYTES).get(_TASKS))


def read_task(folder: Path, base: AdapterBase, task: str) -> StoredAdapter:
    """Return the adapter for a task. Raises ModelLoadError naming the key or tensor, or the known tasks."""
    path = folder / CONFIG_NAME
    reader = ConfigReader(read_json_object(path, MAX_CONFIG_BYTES))
    try:
        given = reader.value(_TASKS)
        tasks = reader.texts(_TASKS, min(len(given), _MAX_TASKS) if isinstance(given, list) else 0)
        scale = reader.number("lora_alpha", 1.0) / reader.integer("lora_rank", 4)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if task not in tasks:
        known = ", ".join(tasks)
        raise ModelLoadError(f"{path}: there is no task {task!r:.80}; the adapter's name must be one of {known}")
    with closing(open_safetensors(find_model_file(folder))) as file:
        factors = _factors(file, base, tasks.index(task), len(tasks))
    return StoredAdapter(
        {name: StoredPart(tensor, LowRank.checked(a, b, scale, tensor)) for name, (tensor, a, b) in factors.items()}
    )


def _factors(
    file: TensorFiles, base: AdapterBase, index: int, num_tasks: int
) -> Mapping[str, tuple[str, Float32, Float32]]:
    """Return a task's factors by the checkpoint's names: a tensor's name for errors, A [rank, in] and B [out, rank]."""
    found: dict[str, dict[str, str]] = {}
    for tensor in file.tensors:
        if (match := _FACTOR.fullmatch(tensor)) is not None:
            name = checkpoint_name(match["module"] + ".weight", base.table)
            found.setdefault(name, {})[match["factor"]] = tensor
    parts: dict[str, tuple[str, Float32, Float32]] = {}
    for name, tensors in found.items():
        if tensors.keys() != {"A", "B"}:
            raise ModelLoadError(f"tensor {next(iter(tensors.values()))!r:.120} comes without its other factor")
        a, b = (_of_task(file, tensors[factor], index, num_tasks) for factor in "AB")
        # A table is [in, out], so its factors are stored the other way round.
        parts[name] = (tensors["A"], *((a.T, b.T) if name in (EMBEDDING, _TYPES) else (a, b)))
    return _with_types(parts)


def _with_types(parts: dict[str, tuple[str, Float32, Float32]]) -> Mapping[str, tuple[str, Float32, Float32]]:
    """Return the parts without the head's part, and with the change of the only token type merged into the embedding's
    part.
    """
    parts.pop("pooler.weight", None)
    if (types := parts.pop(_TYPES, None)) is None:
        return parts
    tensor, a_types, b_types = types
    if a_types.shape[1] != 1 or EMBEDDING not in parts:
        raise ModelLoadError(f"tensor {tensor!r:.120} is for {a_types.shape[1]} types of tokens; only one is supported")
    name, a, b = parts[EMBEDDING]
    LowRank.checked(a_types, b_types, 1.0, tensor)
    LowRank.checked(a, b, 1.0, name)
    if len(b) != len(b_types):
        raise ModelLoadError(f"tensor {tensor!r:.120} has {len(b_types)} columns; the embedding has {len(b)}")
    every = np.ones((1, a.shape[1]), np.float32)
    return parts | {EMBEDDING: (name, np.concatenate([a, every]), np.concatenate([b, b_types @ a_types], axis=1))}


def _of_task(file: TensorFiles, tensor: str, index: int, num_tasks: int) -> Float32:
    stack = file.weight(tensor)
    if len(stack.shape) != 3 or stack.shape[0] != num_tasks:
        shape = list(stack.shape)
        raise ModelLoadError(f"tensor {tensor!r:.120} has shape {shape}; it must be a stack of {num_tasks} matrices")
    return np.array(stack.dequantize()[index], np.float32)
