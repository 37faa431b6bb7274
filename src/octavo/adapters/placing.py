"""Maps an adapter's stored parts to a graph's weights.

The base's own weight table permutes, splits and stacks A and B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from octavo.adapters.adapter import AdapterBase, StoredPart
from octavo.graph.ops.low_rank import LowRank
from octavo.loader.tensor_names import TensorName
from octavo.models._decoder import ModelConfig
from octavo.models._weights import (
    FileFormat,
    Flatten,
    Fold,
    Heads,
    NegativeExp,
    OneRow,
    Permute,
    Split,
    Stack,
    Transform,
    Transpose,
)
from octavo.platform.background_work import give_way

_Group = dict[TensorName, StoredPart]


def placed(parts: Mapping[str, StoredPart], base: AdapterBase, file_format: FileFormat) -> dict[str, LowRank]:
    """Return the parts by the names of the graph's weights instead of the checkpoint's.

    file_format: the format of the names, which need not be the base's.
    Raises ModelLoadError naming a tensor of the adapter that does not fit the model, or whose effect this engine cannot
    compute.
    """
    groups: dict[str, _Group] = {}
    for text, part in parts.items():
        name = TensorName.parse(text)
        groups.setdefault(name.stem, {})[name] = part
    for transform in base.table.transforms:
        if transform.only in (None, file_format) and transform.stem in groups:
            for name, part in _apply(transform, groups.pop(transform.stem), base):
                groups.setdefault(name.stem, {})[name] = part
    found: dict[str, LowRank] = {}
    for group in groups.values():
        give_way()
        for name, part in group.items():
            _check_place(part, str(name), base.places)
            found[str(name)] = part.low_rank
    return found


def _check_place(part: StoredPart, name: str, places: Mapping[str, tuple[int, ...]]) -> None:
    shape = places.get(name)
    if shape is None:
        raise part.refuse(f"belongs to {name}, where this model takes no low-rank product")
    if part.low_rank.a is None and part.low_rank.shape != shape:
        raise part.refuse(
            f"is {list(part.low_rank.shape)}, but {name} is {list(shape)}: an adapter with added tokens needs a "
            "model that was resized for them"
        )
    if part.low_rank.shape != shape:
        raise part.refuse(f"is for a weight of {list(part.low_rank.shape)}, but {name} is {list(shape)}")


def _apply(transform: Transform, group: _Group, base: AdapterBase) -> Iterator[tuple[TensorName, StoredPart]]:
    """Yield the products for the weights that a transform produces.

    Low-rank factors have their logical orientation, so a weight that is stored transposed needs only a new name.
    """
    match transform:
        case Permute():
            order = transform.order(base.config)
            for name, part in group.items():
                yield name, _rows(part, order, len(order))
        case Split():
            yield from _split(transform, group, base.config)
        case Stack():
            yield from _stacked(group, transform.whole, base.places)
        case Heads():
            heads = transform.heads(base.config)
            for name, part in group.items():
                yield replace(name, stem=transform.whole), _by_heads(part, heads, transform.transposed)
        case Transpose():
            for name, part in group.items():
                yield replace(name, stem=transform.whole or name.stem), part
        case OneRow():
            yield from group.items()
        case Fold() | NegativeExp() | Flatten():
            part = next(iter(group.values()))
            raise part.refuse(f"belongs to {transform.stem}, but that is not the matrix of a product")


def _rows(part: StoredPart, index: NDArray[np.intp] | slice, expected: int) -> StoredPart:
    found = part.low_rank
    if found.b.shape[-2] != expected:
        raise part.refuse(f"is for {found.b.shape[-2]} output features; the configuration asks for {expected}")
    return replace(part, low_rank=found.rows(index))


def _split(split: Split, group: _Group, config: ModelConfig) -> Iterator[tuple[TensorName, StoredPart]]:
    """Split B by rows. All parts have the same A."""
    rows = split.rows(config)
    if not rows:
        yield from group.items()
        return
    for name, part in group.items():
        for stem, (begin, end) in zip(split.parts, pairwise(accumulate(rows, initial=0)), strict=True):
            yield replace(name, stem=stem), _rows(part, slice(begin, end), sum(rows))


def _stacked(
    group: _Group, whole: str, places: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[TensorName, StoredPart]]:
    """Join the experts of each layer into one part. Experts without a part get zeros."""
    layers: dict[TensorName, dict[int, StoredPart]] = {}
    for name, part in group.items():
        layers.setdefault(TensorName(whole, name.numbers[:-1], name.kind), {})[name.numbers[-1]] = part
    for layer, experts in layers.items():
        first = next(iter(experts.values()))
        count = places.get(str(layer), (max(experts) + 1,))[0]
        rank = max(part.low_rank.rank for part in experts.values())
        out_features, in_features = first.low_rank.shape
        a = np.zeros((count, rank, in_features), np.float32)
        b = np.zeros((count, out_features, rank), np.float32)
        for number, part in experts.items():
            found = part.low_rank
            if found.gain is not None or found.a is None:
                raise part.refuse("is more than a low-rank product, but a stack of experts takes nothing else")
            if number >= count or found.shape != first.low_rank.shape:
                raise part.refuse(f"is for {list(found.shape)} of expert {number}, unlike {first.tensor!r:.120}")
            a[number, : found.rank] = found.a
            b[number, :, : found.rank] = found.b * np.float32(found.scale)
        yield layer, StoredPart(first.tensor, LowRank(a, b, 1.0))


def _by_heads(part: StoredPart, heads: int, transposed: bool) -> StoredPart:
    """Return a product for each head: the head's rows of B with all of A, transposed if the weight is."""
    found = part.low_rank
    if found.gain is not None and transposed:
        raise part.refuse(
            "has magnitudes (DoRA) for a weight that is stored transposed. That is not supported: merge the adapter "
            "into the model"
        )
    if found.a is None:
        raise part.refuse(
            "replaces a whole weight that is cut into heads. That is not supported: merge the adapter into the model"
        )
    out_features, in_features = found.shape
    b = found.b.reshape(heads, out_features // heads, found.rank)
    gain = None if found.gain is None else found.gain.reshape(heads, -1)
    a = np.broadcast_to(found.a, (heads, found.rank, in_features))
    if transposed:
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    return replace(part, low_rank=LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b), found.scale, gain))
