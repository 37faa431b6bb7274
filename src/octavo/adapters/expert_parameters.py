"""Weights that a PEFT adapter changes by parameter name (`target_parameters`), such as stacks of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.adapters.adapter import AdapterBase
from octavo.batch import Float32
from octavo.errors import ModelLoadError
from octavo.graph.ops.low_rank import LowRank
from octavo.loader.checkpoint import checkpoint_name
from octavo.loader.tensor_names import TensorName

# In the order of transformers' modules. PEFT wraps them one after another, so the last is the outermost.
_NAMES = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "weight")
_WRAPPED = ".base_layer"


def checked_targets(path: Path, settings: Mapping[str, object]) -> frozenset[str]:
    """Return the names in `target_parameters`. Raises ModelLoadError for a parameter that cannot take a product."""
    found = settings.get("target_parameters") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ModelLoadError(f"{path}: target_parameters is {found!r:.80}; it must be a list of names")
    for name in found:
        if name.rpartition(".")[2] not in _NAMES:
            raise ModelLoadError(
                f"{path}: target_parameters has {name!r:.80}, but no adapter can change it; the last part of each "
                f"name must be one of {', '.join(_NAMES)}"
            )
    return frozenset(found)


def parameter_of(module: str, targets: frozenset[str]) -> str | None:
    """Return the parameter that a module's factors change, for example `experts.gate_up_proj` for `experts.base_layer`.

    None if the module does not wrap a parameter.
    """
    depth = 0
    while module.endswith(_WRAPPED):
        module, depth = module.removesuffix(_WRAPPED), depth + 1
    keys = (f"{module}.{name}" for name in _NAMES)
    found = [key for key in keys if not targets.isdisjoint(_endings(key))]
    return found[-1 - depth] if depth < len(found) else None


def _endings(name: str) -> Iterator[str]:
    """Yield the name, and the part after each of its dots."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def parts_of_parameter(parameter: str, part: LowRank, rank: int, base: AdapterBase) -> Iterator[tuple[str, LowRank]]:
    """Yield the parts of a parameter, by their names in the checkpoint.

    part: as stored in the file, for all experts.
    rank: rank of one expert.
    """
    name, count = checkpoint_name(parameter, base.table), part.rank // rank
    if parameter.endswith(".weight") and count == 1:
        yield name, part
        return
    part = _stack(part, count)
    stem = TensorName.parse(name).stem
    if stem.endswith((".down_proj", ".down_columns")):
        part = _logical(part, part.shape[-2], base)
    else:
        part = _logical(part, part.shape[-1], base)
    if TensorName.parse(name).kind:
        yield name, part
        return
    name = _named_as_in_graph(name, base)
    stem = TensorName.parse(name).stem
    is_cut = any(each.stem == stem and each.only in (None, "safetensors") for each in base.table.transforms)
    if not name.endswith(".gate_up_proj") or is_cut:
        yield f"{name}.weight", part
        return
    half = part.shape[-2] // 2
    yield f"{name.removesuffix('gate_up_proj')}gate_proj.weight", part.rows(slice(0, half))
    yield f"{name.removesuffix('gate_up_proj')}up_proj.weight", part.rows(slice(half, None))


def _stack(part: LowRank, count: int) -> LowRank:
    """Return one product per expert: A's rows are ordered by expert and rank, B's columns by rank and expert."""
    assert part.a is not None, "it has factors"
    rank = part.rank // count
    a = part.a.reshape(count, rank, -1)
    b = part.b.reshape(len(part.b), rank, count).transpose(2, 0, 1)
    return replace(part, a=a, b=np.ascontiguousarray(b))


def _logical(part: LowRank, hidden: int, base: AdapterBase) -> LowRank:
    """Return the product for weights [out, in], even if PEFT has mistaken a stack of [in, out] for one of [out, in].

    hidden: size of the dimension that, in a stack of [out, in], is the width of the model's rows.
    """
    assert part.a is not None, "it has factors"
    width = base.config.hidden_size
    if hidden == width or width not in part.shape[-2:]:
        return part
    turned: list[Float32] = [np.ascontiguousarray(each.swapaxes(1, 2)) for each in (part.b, part.a)]
    return replace(part, a=turned[0], b=turned[1])


def _named_as_in_graph(name: str, base: AdapterBase) -> str:
    """Return the name with the checkpoint's name for a layer's expert module replaced by the graph's."""
    module, separator, last = name.rpartition(".experts.")
    if not separator:
        return name
    layer = TensorName.parse(name).numbers[:1]
    for place, shape in base.places.items():
        if len(shape) == 3 and ".experts." in place and TensorName.parse(place).numbers[:1] == layer:
            module = place.rpartition(".experts.")[0]
    return f"{module}{separator}{last}"
