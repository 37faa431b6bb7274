"""Applies an architecture's declarations (`octavo.models.WeightTable`) to the stored tensors of a file."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.loader import source_changes
from octavo.loader.tensor_files import Source
from octavo.loader.tensor_names import TensorName
from octavo.models._decoder import ModelConfig
from octavo.models._weights import (
    ByDistance,
    DistanceVectors,
    FileFormat,
    Flatten,
    Fold,
    Heads,
    HeadSums,
    NegativeExp,
    OfLayers,
    OneRow,
    Ones,
    Permute,
    PermuteColumns,
    ScaledRows,
    Softplus,
    Split,
    Stack,
    TokenShares,
    Transform,
    Transpose,
    Unfolded,
    UnitRows,
)

_Group = dict[TensorName, Source]


def transformed(
    sources: Mapping[str, Source], transforms: Sequence[Transform], config: Any, file_format: FileFormat
) -> dict[str, Source]:
    """Return the sources of the graph's weights, made from the stored tensors under their checkpoint names.

    Raises ModelLoadError naming a tensor that does not fit its transform.
    """
    groups: dict[str, _Group] = {}
    for text, source in sources.items():
        name = TensorName.parse(text)
        groups.setdefault(name.stem, {})[name] = source
    for transform in transforms:
        if transform.only in (None, file_format) and transform.stem in groups:
            if isinstance(transform, DistanceVectors):
                _add_distance_vectors(groups, transform, config)
                continue
            group = groups.pop(transform.stem)
            if isinstance(transform, OfLayers):
                group, groups[transform.stem] = _of_layers(group, transform, config)
                transform = transform.step
            if isinstance(transform, Unfolded) and transform.frames in groups:
                group = _with_frames(group, groups.pop(transform.frames))
            for name, source in _apply(transform, group, config):
                groups.setdefault(name.stem, {})[name] = source
    return {str(name): source for group in groups.values() for name, source in group.items()}


def restored(
    weights: Mapping[str, Source],
    transforms: Sequence[Transform],
    config: ModelConfig,
    file_format: FileFormat = "gguf",
) -> dict[str, Source]:
    """Convert the weights of a graph back to stored tensors under their checkpoint names. The inverse of `transformed`.

    Raises ModelLoadError for a transform that has no inverse.
    """
    found = {TensorName.parse(text): source for text, source in weights.items()}
    for transform in reversed(transforms):
        if transform.only in (None, file_format):
            found = _undone(found, transform, config)
    return {str(name): source for name, source in found.items()}


def _of_layers(group: _Group, transform: OfLayers, config: Any) -> tuple[_Group, _Group]:
    """Return the tensors in the layers that a transform applies to, and the remaining tensors."""
    layers = transform.layers(config)
    chosen = {name: source for name, source in group.items() if name.numbers and name.numbers[0] in layers}
    return chosen, {name: source for name, source in group.items() if name not in chosen}


def _undone(found: _Group, transform: Transform, config: ModelConfig) -> _Group:
    if isinstance(transform, OfLayers):
        chosen, others = _of_layers(found, transform, config)
        return others | _undone(chosen, transform.step, config)
    chosen = {name: source for name, source in found.items() if name.stem == transform.stem}
    if getattr(transform, "one_way", False):
        return found
    match transform:
        case Permute():
            order = np.argsort(transform.order(config))
            return found | {
                name: source_changes.permuted(source, order, _axis(name, source)) for name, source in chosen.items()
            }
        case OneRow():
            return found | {name: source_changes.first_row(s) for name, s in chosen.items() if len(s.shape) == 2}
        case Fold():
            return found | {
                n: source_changes.folded(s, -transform.addend) for n, s in chosen.items() if n.kind == ".weight"
            }
        case Transpose():
            return _turned_back(found, transform)
        case Split():
            return _rejoined(found, transform) if transform.rows(config) else found
        case Stack():
            return _unstacked(found, transform)
        case TokenShares():
            return _with_shares(found, transform)
        case HeadSums():
            return found | {name: source_changes.summed_columns(source) for name, source in chosen.items()}
        case Heads():
            whole = {name: source for name, source in found.items() if name.stem == transform.whole}
            joined = {
                replace(n, stem=transform.stem): source_changes.one_matrix(s, transform.transposed)
                for n, s in whole.items()
            }
            return {name: source for name, source in found.items() if name not in whole} | joined
        case Ones():
            return {name: source for name, source in found.items() if name.stem != transform.whole}
        case PermuteColumns():
            order = np.argsort(transform.order(config))
            return found | {n: source_changes.with_columns(s, order) for n, s in chosen.items() if n.kind == ".weight"}
        case Unfolded(kernel=kernel) if kernel is not None:
            return _refolded(found, chosen, transform, kernel(config))
        case Flatten(rows=rows) if rows is not None:
            return found | {
                n: source_changes.as_rows(s, rows(config)) for n, s in chosen.items() if n.kind == ".weight"
            }
    raise ModelLoadError(f"weights made by {type(transform).__name__} of {transform.stem} cannot be converted back")


def _turned_back(found: _Group, transpose: Transpose) -> _Group:
    stem = transpose.whole or transpose.stem
    return {
        replace(name, stem=transpose.stem) if name.stem == stem else name: source_changes.transposed(source)
        if name.stem == stem and len(source.shape) > 1
        else source
        for name, source in found.items()
    }


def _refolded(found: _Group, chosen: _Group, transform: Unfolded, kernel: tuple[int, ...]) -> _Group:
    """Turn the matrices back into kernels.

    Kernels of two frames, [channels, 2, y, x], become separate tensors again.
    """
    refolded = dict(found)
    for name, source in chosen.items():
        if name.kind == ".weight" and kernel:
            refolded[name] = source_changes.as_kernel(source, kernel)
            if transform.frames is not None:
                later = TensorName(transform.frames, (1,), ".weight")
                refolded[name], refolded[later] = source_changes.single_frames(refolded[name])
    return refolded


def _with_shares(found: _Group, transform: TokenShares) -> _Group:
    """Join the shares of every layer into one tensor again."""
    joined: _Group = {}
    for name, source in found.items():
        if name.stem not in transform.parts:
            joined[name] = source
        elif name.stem == transform.parts[0]:
            kernels = [found[replace(name, stem=part)] for part in transform.parts]
            joined[replace(name, stem=transform.stem)] = source_changes.shares_of_kernels(kernels)
    return joined


def _unstacked(found: _Group, stack: Stack) -> _Group:
    """Return every expert as a separate weight."""
    experts: _Group = {}
    for name, source in found.items():
        if name.stem != stack.whole:
            experts[name] = source
            continue
        for i in range(source.shape[0]):
            experts[TensorName(stack.stem, (*name.numbers, i), name.kind)] = source_changes.one_of(source, i)
    return experts


def _rejoined(found: _Group, split: Split) -> _Group:
    """Join the parts of every layer into one weight again."""
    joined: _Group = {}
    for name, source in found.items():
        if name.stem not in split.parts:
            joined[name] = source
        elif name.stem == split.parts[0]:
            parts = [found[replace(name, stem=stem)] for stem in split.parts]
            joined[replace(name, stem=split.stem)] = source_changes.concatenated(parts, _axis(name, source))
    return joined


def _apply(transform: Transform, group: _Group, config: Any) -> Iterator[tuple[TensorName, Source]]:
    match transform:
        case Permute():
            order = transform.order(config)
            for name, source in group.items():
                yield name, source_changes.permuted(source, order, _axis(name, source))
        case Split():
            rows = transform.rows(config)
            if not rows:
                yield from group.items()
                return
            for name, source in group.items():
                for part, piece in zip(
                    transform.parts, source_changes.split(source, rows, _axis(name, source)), strict=True
                ):
                    yield replace(name, stem=part), piece
        case Stack():
            yield from _stacked(group, transform, config)
        case Heads():
            for name, source in group.items():
                yield (
                    replace(name, stem=transform.whole),
                    source_changes.by_heads(source, transform.heads(config), transform.transposed),
                )
        case OneRow():
            for name, source in group.items():
                yield name, source_changes.as_row(source) if len(source.shape) == 1 else source
        case Transpose():
            for name, source in group.items():
                whole = replace(name, stem=transform.whole or name.stem)
                wanted = None if transform.rows is None else transform.rows(config)
                stays = len(source.shape) < 2 or source.shape[-2] == wanted
                yield whole, source if stays else source_changes.transposed(source)
        case Fold():
            for name, source in group.items():
                yield name, source_changes.folded(source, transform.addend) if name.kind == ".weight" else source
        case NegativeExp() | Flatten():
            for name, source in group.items():
                yield (
                    name,
                    source_changes.negative_exp(source)
                    if isinstance(transform, NegativeExp)
                    else source_changes.flattened(source),
                )
        case Unfolded():
            for name, source in group.items():
                yield name, source_changes.as_matrix(source) if len(source.shape) > 2 else source
        case Ones():
            for name, source in group.items():
                yield name, source
                if name.kind == ".weight":
                    yield replace(name, stem=transform.whole), source_changes.ones(source.shape[-1])
        case _:
            yield from _with_numbers(transform, group, config)


def _with_numbers(transform: Transform, group: _Group, config: Any) -> Iterator[tuple[TensorName, Source]]:
    """Yield the tensors after a transform that changes their numbers or their columns."""
    match transform:
        case Softplus():
            for name, source in group.items():
                yield name, source_changes.softplus(source, transform.addend)
        case ScaledRows():
            factors = transform.factors(config)
            for name, source in group.items():
                yield name, source_changes.with_scaled_rows(source, factors) if name.kind == ".weight" else source
        case UnitRows():
            applies = transform.applies(config)
            for name, source in group.items():
                yield name, source_changes.unit_rows(source) if applies else source
        case ByDistance():
            for name, source in group.items():
                yield name, source_changes.by_distance(source, transform.buckets(config))
        case TokenShares(parts=parts):
            for name, source in group.items():
                for i, part in enumerate(parts):
                    yield replace(name, stem=part), source_changes.kernel_of_shares(source, i, len(parts))
        case HeadSums():
            for name, source in group.items():
                yield name, source_changes.head_sums(source, transform.heads(config))
        case PermuteColumns():
            order = transform.order(config)
            for name, source in group.items():
                yield name, source_changes.with_columns(source, order) if name.kind == ".weight" else source


def _with_frames(first: _Group, second: _Group) -> _Group:
    """Join the kernels of two frames [out, channels, y, x] into one, [out, channels, 2, y, x]."""
    joined = dict(first)
    for name, later in zip([name for name in first if name.kind == ".weight"], second.values(), strict=True):
        joined[name] = source_changes.two_frames(first[name], later)
    return joined


def _axis(name: TensorName, source: Source) -> int:
    """Return the dimension of output features: the last one for biases, which may have one row per expert."""
    dimensions = len(source.shape)
    return max(dimensions - (1 if name.kind == ".bias" else 2), 0)


def _stacked(group: _Group, stack: Stack, config: Any) -> Iterator[tuple[TensorName, Source]]:
    """Yield the experts of each layer as one weight."""
    count = math.inf if stack.count is None else stack.count(config)
    layers: dict[TensorName, dict[int, Source]] = {}
    for name, source in group.items():
        if name.numbers[-1] >= count:
            continue
        layer = TensorName(stack.whole, name.numbers[:-1], name.kind)
        layers.setdefault(layer, {})[name.numbers[-1]] = source
    for layer, experts in layers.items():
        parts = [experts[i] for i in range(len(experts)) if i in experts]
        first = parts[0] if parts else next(iter(experts.values()))
        if len(parts) < len(experts):
            missing = next(i for i in range(len(experts)) if i not in experts)
            raise ModelLoadError(f"expert {missing} of {layer} is missing; the file has {first.tensors[0]!r:.80}")
        for part in parts:
            if (part.type_name, part.shape) != (first.type_name, first.shape):
                raise ModelLoadError(
                    f"tensor {part.tensors[0]!r:.80} is {part.type_name} {list(part.shape)}, but "
                    f"{first.tensors[0]!r:.80} is {first.type_name} {list(first.shape)}; experts must be alike"
                )
        yield layer, source_changes.stack_of(parts)


def _add_distance_vectors(groups: dict[str, _Group], transform: DistanceVectors, config: Any) -> None:
    """Replace the distance table and its norm with the vectors of each distance.

    Projections that nothing else needs are removed.
    """
    table = next(iter(groups.pop(transform.stem).values()))
    norm = {name.kind: source for name, source in groups.pop(transform.norm, {}).items()}
    buckets = transform.buckets(config)
    if len(table.shape) != 2 or table.shape[0] <= buckets.max() or table.shape[1] != config.hidden_size:
        found = f"tensor {table.tensors[0]!r:.80} is {list(table.shape)}"
        raise ModelLoadError(f"{found}; the configuration asks for [{buckets.max() + 1}, {config.hidden_size}]")

    def rows() -> NDArray[np.float32]:
        x = table.make().dequantize().astype(np.float32)
        if norm:
            x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + config.norm_eps)
            x = x * norm[".weight"].make().dequantize() + norm[".bias"].make().dequantize()
        return np.asarray(x[buckets], np.float32)

    for stem, whole in transform.projections(config).items():
        group = groups.pop(stem, {}) if ".distance_" in stem else groups.get(stem, {})
        for name, source in group.items():
            if name.kind == ".weight":
                bias = group.get(replace(name, kind=".bias"))
                made = source_changes.distance_vectors(rows, (table, *norm.values()), source, bias, config.num_heads)
                shape = (config.num_heads, source.shape[0] // config.num_heads, len(buckets))
                steps = f"{made.steps} by distance {zlib.crc32(buckets.tobytes())}"
                made = replace(made, shape=shape, nbytes=4 * math.prod(shape), steps=steps)
                groups.setdefault(whole, {})[replace(name, stem=whole)] = made
