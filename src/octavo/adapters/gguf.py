"""Reads adapters in GGUF files, as written by llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.adapters.adapter import EMBEDDING, AdapterBase, StoredAdapter, StoredPart, checked_invocation
from octavo.errors import ModelLoadError
from octavo.graph.ops.low_rank import LowRank
from octavo.loader.gguf import open_gguf
from octavo.loader.tensor_files import TensorFiles
from octavo.loader.tensor_names import GGUF_STEMS, renamed
from octavo.platform.background_work import give_way

_SUFFIXES = (".lora_a", ".lora_b")
_ALPHA, INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"


def read_gguf(path: Path, base: AdapterBase) -> StoredAdapter:
    """Return the adapter in a file. B's rows are in the order of GGUF files.

    Raises ModelLoadError naming the key or the tensor.
    """
    with closing(open_gguf(path)) as file:
        tokens = np.asarray(file.metadata.get(INVOCATION, ())).tolist()
        return StoredAdapter(_parts(path, file, base), checked_invocation(f"{path}: {INVOCATION}", tokens))


def checked_alpha(path: Path, metadata: Mapping[str, Any]) -> float:
    """Return the alpha of a LoRA adapter. Raises ModelLoadError if the file has none, or contains something else."""
    kind, form = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != "adapter" or form != "lora":
        raise ModelLoadError(f"{path}: general.type is {kind!r:.40} and adapter.type {form!r:.40}: not a LoRA adapter")
    alpha = metadata.get(_ALPHA)
    if not isinstance(alpha, int | float) or not np.isfinite(alpha):
        raise ModelLoadError(f"{path}: {_ALPHA} is {alpha!r:.40}; it must be a number")
    return float(alpha)


def _parts(path: Path, file: TensorFiles, base: AdapterBase) -> dict[str, StoredPart]:
    alpha = checked_alpha(path, file.metadata)
    stems = {**GGUF_STEMS, **base.table.names}
    found: dict[str, StoredPart] = {}
    for tensor in file.tensors:
        give_way()
        weight, suffix = tensor[:-7], tensor[-7:]
        name = renamed(weight, stems)
        if suffix not in _SUFFIXES or name is None:
            raise ModelLoadError(f"{path}: tensor {tensor!r:.80} is not a low-rank part of a weight of this model")
        if suffix == _SUFFIXES[1]:
            if weight + _SUFFIXES[0] not in file.tensors:
                raise ModelLoadError(f"{path}: tensor {tensor!r:.80} comes without {weight}{_SUFFIXES[0]}")
            continue
        if weight + _SUFFIXES[1] not in file.tensors:
            raise ModelLoadError(f"{path}: tensor {tensor!r:.80} comes without {weight}{_SUFFIXES[1]}")
        a, b = (file.weight(weight + each).dequantize().astype(np.float32) for each in _SUFFIXES)
        if name == EMBEDDING:  # a table has a row of A for each token
            a = np.ascontiguousarray(a.T)
        part = LowRank.checked(a, b, 1.0, tensor)
        found[name] = StoredPart(tensor, replace(part, scale=alpha / part.rank))
    return found
