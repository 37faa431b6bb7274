"""Finds the linear modules of a checkpoint that an adapter can change, and where the graph uses their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.backends.adapted_modules import AdaptedModule, ModulePart
from octavo.compress.to_safetensors import names_in_transformers
from octavo.errors import ModelLoadError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Linear
from octavo.loader.checkpoint import Checkpoint, checkpoint_name
from octavo.loader.tensor_files import Source
from octavo.loader.tensor_names import TensorName
from octavo.loader.transforms import transformed
from octavo.models import load_architecture, weight_table
from octavo.models._weights import Transpose, WeightTable
from octavo.quantization.packed import DenseWeight

ALL_LINEAR = "all-linear"
_Index = NDArray[np.int64]


def find_modules(checkpoint: Checkpoint, graph: Graph, targets: Sequence[str]) -> list[AdaptedModule]:
    """Find the modules whose last name is one of the targets, such as `q_proj`.

    The single target `all-linear` finds all linear modules except the output head. Stacks of experts are not included.

    Raises UsageError for a target that matches no module, and for an architecture whose names in transformers are
    unknown.
    """
    shapes = {
        node.op.weight.name: node.op.weight.shape
        for node in graph.nodes
        if isinstance(node.op, Linear) and node.op.weight.part is None
    }
    stored = checkpoint.format == "safetensors" and checkpoint.quantization is None
    found = _of_files(checkpoint, shapes) if stored else _of_weights(checkpoint, shapes)
    found.sort(key=lambda module: (TensorName.parse(module.name).numbers, module.name))
    if list(targets) == [ALL_LINEAR]:
        return found
    last_names = {module.name.rpartition(".")[2] for module in found}
    if unknown := [target for target in targets if target not in last_names]:
        known = ", ".join(sorted(last_names))
        raise UsageError(f"no module is called {unknown[0]!r:.80}; this model has {known}", param="target_modules")
    return [module for module in found if module.name.rpartition(".")[2] in targets]


def _of_weights(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> list[AdaptedModule]:
    """Number all rows of the graph's weights, and trace them into the tensors of transformers."""
    names = list(shapes)
    starts = np.cumsum([0, *(shapes[name][0] for name in names)])
    numbered = {
        name: _rows_of(np.arange(start, start + shapes[name][0])[:, None])
        for name, start in zip(names, starts, strict=False)
    }
    try:
        tensors = names_in_transformers(checkpoint, numbered)
    except ModelLoadError as error:
        raise UsageError(
            f"{checkpoint.path}: the names of this architecture's modules in transformers cannot be derived from this "
            f"file ({error}); use the model's unquantized safetensors checkpoint"
        ) from error
    modules = []
    for tensor, source in tensors.items():
        numbers = _numbers(source)
        owners = np.searchsorted(starts, numbers, side="right") - 1
        parts = []
        for owner in dict.fromkeys(owners.tolist()):
            rows = np.empty(shapes[names[owner]][0], np.int64)
            at = np.flatnonzero(owners == owner)
            rows[numbers[at] - starts[owner]] = at
            parts.append(ModulePart(names[owner], rows))
        in_features = shapes[parts[0].parameter][1]
        modules.append(AdaptedModule(tensor.removesuffix(".weight"), in_features, len(numbers), tuple(parts)))
    return modules


def _of_files(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> list[AdaptedModule]:
    """Number the rows of the stored tensors, and trace them into the graph's weights."""
    table = weight_table(load_architecture(checkpoint.architecture))
    infos = checkpoint.file.tensors
    tensors = {name: infos[name].shape for name in infos if len(infos[name].shape) == 2 and ".experts." not in name}
    transposed = {name for name in tensors if _is_transposed(checkpoint_name(name, table), table)}
    names = list(tensors)
    outs = [tensors[name][1 if name in transposed else 0] for name in names]
    starts = np.cumsum([0, *outs])
    numbered = {}
    for name, start, out in zip(names, starts, outs, strict=False):
        column = np.arange(start, start + out)[:, None]
        numbered[checkpoint_name(name, table)] = _rows_of(column.T if name in transposed else column)
    made = transformed(numbered, table.transforms, checkpoint.config, "safetensors")
    parts: dict[int, list[ModulePart]] = {}
    for parameter in shapes:
        numbers = _numbers(made[parameter])
        owner = int(np.searchsorted(starts, numbers[0], side="right") - 1)
        parts.setdefault(owner, []).append(ModulePart(parameter, numbers - starts[owner]))
    return [
        AdaptedModule(
            _module_name(names[owner]),
            shapes[found[0].parameter][1],
            outs[owner],
            tuple(found),
            names[owner] in transposed,
        )
        for owner, found in parts.items()
    ]


def _module_name(tensor: str) -> str:
    """Return the module's name in the transformers class. GPT-2 files from before 2020 lack its prefix."""
    name = tensor.removesuffix(".weight")
    return f"transformer.{name}" if name.startswith("h.") else name


def _is_transposed(name: str, table: WeightTable) -> bool:
    stem = TensorName.parse(name).stem
    return any(
        isinstance(transform, Transpose) and transform.stem == stem and transform.only in (None, "safetensors")
        for transform in table.transforms
    )


def _rows_of(numbers: _Index) -> Source:
    """Return a float32 matrix of row numbers, which is exact for up to 16 million rows."""
    weight = DenseWeight(numbers.astype(np.float32))
    return Source(weight.type_name, weight.shape, weight.nbytes, ("rows",), lambda: weight)


def _numbers(source: Source) -> _Index:
    return source.make().dequantize()[:, 0].astype(np.int64)
