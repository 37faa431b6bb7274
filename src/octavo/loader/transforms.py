"""Applies an architecture's declarations (`octavo.models.WeightTable`) to the stored tensors of a file."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
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
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, GGMLWeight, Weight, concat, stack
from octavo.quantization.packed.base import RowIndex

_Group = dict[TensorName, Source]


def transformed(
    sources: Mapping[str, Source], transforms: Sequence[Transform], config: Any, file_format: FileFormat
) -> dict[str, Source]:
    """The sources of the graph's weights, made from the stored tensors under their checkpoint names.

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
    """The tensors of a file under their checkpoint names, from the weights of a graph: `transformed` undone.

    Raises ModelLoadError for a transform that has no way back.
    """
    found = {TensorName.parse(text): source for text, source in weights.items()}
    for transform in reversed(transforms):
        if transform.only in (None, file_format):
            found = _undone(found, transform, config)
    return {str(name): source for name, source in found.items()}


def _of_layers(group: _Group, transform: OfLayers, config: Any) -> tuple[_Group, _Group]:
    """The tensors of the layers of a transform, and the others."""
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
            return found | {name: _permuted(source, order, _axis(name, source)) for name, source in chosen.items()}
        case OneRow():
            return found | {name: _first_row(s) for name, s in chosen.items() if len(s.shape) == 2}
        case Fold():
            return found | {n: _folded(s, -transform.addend) for n, s in chosen.items() if n.kind == ".weight"}
        case Transpose():
            return _turned_back(found, transform)
        case Split():
            return _rejoined(found, transform) if transform.rows(config) else found
        case Stack():
            return _unstacked(found, transform)
        case TokenShares():
            return _with_shares(found, transform)
        case HeadSums():
            return found | {name: _summed_columns(source) for name, source in chosen.items()}
        case Heads():
            whole = {name: source for name, source in found.items() if name.stem == transform.whole}
            joined = {replace(n, stem=transform.stem): _one_matrix(s, transform.transposed) for n, s in whole.items()}
            return {name: source for name, source in found.items() if name not in whole} | joined
        case Ones():
            return {name: source for name, source in found.items() if name.stem != transform.whole}
        case Flatten(rows=rows) if rows is not None:
            return found | {n: _as_rows(s, rows(config)) for n, s in chosen.items() if n.kind == ".weight"}
    raise ModelLoadError(f"weights made by {type(transform).__name__} of {transform.stem} have no way back")


def _turned_back(found: _Group, transpose: Transpose) -> _Group:
    stem = transpose.whole or transpose.stem
    return {
        replace(name, stem=transpose.stem) if name.stem == stem else name: _transposed(source)
        if name.stem == stem and len(source.shape) > 1
        else source
        for name, source in found.items()
    }


def _with_shares(found: _Group, transform: TokenShares) -> _Group:
    """The shares of every layer in one tensor again."""
    joined: _Group = {}
    for name, source in found.items():
        if name.stem not in transform.parts:
            joined[name] = source
        elif name.stem == transform.parts[0]:
            kernels = [found[replace(name, stem=part)] for part in transform.parts]
            joined[replace(name, stem=transform.stem)] = _shares_of_kernels(kernels)
    return joined


def _unstacked(found: _Group, stack: Stack) -> _Group:
    """Every expert as a weight of its own."""
    experts: _Group = {}
    for name, source in found.items():
        if name.stem != stack.whole:
            experts[name] = source
            continue
        for i in range(source.shape[0]):
            experts[TensorName(stack.stem, (*name.numbers, i), name.kind)] = _one_of(source, i)
    return experts


def _one_of(source: Source, index: int) -> Source:
    def make() -> Weight:
        weight = source.make()
        if isinstance(weight, DenseWeight | GGMLWeight):
            return replace(weight, data=weight.data[index])
        return DenseWeight(weight.dequantize()[index])

    nbytes = source.nbytes // source.shape[0]
    return replace(source, shape=source.shape[1:], nbytes=nbytes, make=make, steps=f"{source.steps} number {index}")


def _rejoined(found: _Group, split: Split) -> _Group:
    """The parts of every layer as one weight again."""
    joined: _Group = {}
    for name, source in found.items():
        if name.stem not in split.parts:
            joined[name] = source
        elif name.stem == split.parts[0]:
            parts = [found[replace(name, stem=stem)] for stem in split.parts]
            joined[replace(name, stem=split.stem)] = _concatenated(parts, _axis(name, source))
    return joined


def _concatenated(parts: Sequence[Source], axis: int) -> Source:
    first = parts[0]
    shape = (*first.shape[:axis], sum(part.shape[axis] for part in parts), *first.shape[axis + 1 :])
    return Source(
        type_name=first.type_name,
        shape=shape,
        nbytes=sum(part.nbytes for part in parts),
        tensors=tuple(dict.fromkeys(tensor for part in parts for tensor in part.tensors)),
        make=lambda: concat([part.make() for part in parts]),
        steps="; ".join(part.steps for part in parts) + " joined",
    )


def _first_row(source: Source) -> Source:
    def make() -> Weight:
        return DenseWeight(source.make().dequantize()[0])

    return replace(source, type_name="F32", shape=source.shape[1:], make=make, steps=f"{source.steps} as a vector")


def _as_rows(source: Source, rows: int) -> Source:
    shape = (rows, source.shape[0] // rows)

    def make() -> Weight:
        return DenseWeight(source.make().dequantize().reshape(shape))

    return replace(source, type_name="F32", shape=shape, make=make, steps=f"{source.steps} as {rows} rows")


def _apply(transform: Transform, group: _Group, config: Any) -> Iterator[tuple[TensorName, Source]]:
    match transform:
        case Permute():
            order = transform.order(config)
            for name, source in group.items():
                yield name, _permuted(source, order, _axis(name, source))
        case Split():
            rows = transform.rows(config)
            if not rows:
                yield from group.items()
                return
            for name, source in group.items():
                for part, piece in zip(transform.parts, _split(source, rows, _axis(name, source)), strict=True):
                    yield replace(name, stem=part), piece
        case Stack():
            yield from _stacked(group, transform.whole)
        case Heads():
            for name, source in group.items():
                yield (
                    replace(name, stem=transform.whole),
                    _by_heads(source, transform.heads(config), transform.transposed),
                )
        case OneRow():
            for name, source in group.items():
                yield name, _as_row(source) if len(source.shape) == 1 else source
        case Transpose():
            for name, source in group.items():
                whole = replace(name, stem=transform.whole or name.stem)
                wanted = None if transform.rows is None else transform.rows(config)
                stays = len(source.shape) < 2 or source.shape[-2] == wanted
                yield whole, source if stays else _transposed(source)
        case Fold():
            for name, source in group.items():
                yield name, _folded(source, transform.addend) if name.kind == ".weight" else source
        case NegativeExp() | Flatten():
            for name, source in group.items():
                yield name, _negative_exp(source) if isinstance(transform, NegativeExp) else _flattened(source)
        case Unfolded():
            for name, source in group.items():
                yield name, _as_matrix(source) if len(source.shape) > 2 else source
        case Ones():
            for name, source in group.items():
                yield name, source
                if name.kind == ".weight":
                    yield replace(name, stem=transform.whole), _ones(source.shape[-1])
        case _:
            yield from _with_numbers(transform, group, config)


def _with_numbers(transform: Transform, group: _Group, config: Any) -> Iterator[tuple[TensorName, Source]]:
    """The transforms that change numbers or columns of each tensor by itself."""
    match transform:
        case Softplus():
            for name, source in group.items():
                yield name, _softplus(source, transform.addend)
        case ScaledRows():
            factors = transform.factors(config)
            for name, source in group.items():
                yield name, _with_scaled_rows(source, factors) if name.kind == ".weight" else source
        case UnitRows():
            applies = transform.applies(config)
            for name, source in group.items():
                yield name, _unit_rows(source) if applies else source
        case ByDistance():
            for name, source in group.items():
                yield name, _by_distance(source, transform.buckets(config))
        case TokenShares(parts=parts):
            for name, source in group.items():
                for i, part in enumerate(parts):
                    yield replace(name, stem=part), _kernel_of_shares(source, i, len(parts))
        case HeadSums():
            for name, source in group.items():
                yield name, _head_sums(source, transform.heads(config))
        case PermuteColumns():
            order = transform.order(config)
            for name, source in group.items():
                yield name, _with_columns(source, order) if name.kind == ".weight" else source


def _with_frames(first: _Group, second: _Group) -> _Group:
    """Kernels of two frames [out, channels, y, x] as one, [out, channels, 2, y, x]."""
    joined = dict(first)
    for name, later in zip([name for name in first if name.kind == ".weight"], second.values(), strict=True):
        joined[name] = _two_frames(first[name], later)
    return joined


def _two_frames(first: Source, second: Source) -> Source:
    if first.shape != second.shape or len(first.shape) != 4:
        raise ModelLoadError(
            f"tensor {second.tensors[0]!r:.80} is {list(second.shape)}, {first.tensors[0]!r:.80} {list(first.shape)}; "
            "the kernels of two frames are alike"
        )

    def make() -> Weight:
        return DenseWeight(np.stack([each.make().dequantize() for each in (first, second)], axis=2))

    out, channels, *sides = first.shape
    return Source(
        "F32",
        (out, channels, 2, *sides),
        first.nbytes + second.nbytes,
        first.tensors + second.tensors,
        make,
        f"{first.steps}; {second.steps} as two frames",
    )


def _with_scaled_rows(source: Source, factors: NDArray[np.float32]) -> Source:
    _check_rows(source, len(factors), 0)

    def make() -> Weight:
        array = source.make().dequantize()
        return DenseWeight(array * factors.reshape(-1, *(1,) * (array.ndim - 1)))

    return replace(
        source, type_name="F32", make=make, steps=f"{source.steps} rows times {zlib.crc32(factors.tobytes())}"
    )


def _as_matrix(source: Source) -> Source:
    shape = (source.shape[0], math.prod(source.shape[1:]))

    def make() -> Weight:
        weight = source.make()
        return DenseWeight((weight.data if isinstance(weight, DenseWeight) else weight.dequantize()).reshape(shape))

    type_name = source.type_name if source.type_name in DENSE_TYPES else "F32"
    return replace(source, type_name=type_name, shape=shape, make=make, steps=f"{source.steps} as a matrix")


def _axis(name: TensorName, source: Source) -> int:
    """The dimension of output features: the last of biases, of which each expert may have a row."""
    dimensions = len(source.shape)
    return max(dimensions - (1 if name.kind == ".bias" else 2), 0)


def _rows(source: Source, axis: int, index: RowIndex) -> Weight:
    weight = source.make()
    if axis == 0 or axis < len(source.shape) - 1:
        return weight.rows(index)
    if not isinstance(weight, DenseWeight):
        raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {weight.type_name}; biases must be plain numbers")
    return DenseWeight(weight.data[..., index])


def _check_rows(source: Source, count: int, axis: int) -> None:
    if not source.shape or source.shape[axis] != count:
        raise ModelLoadError(
            f"tensor {source.tensors[0]!r:.80} has the shape {list(source.shape)}; the configuration asks for "
            f"{count} rows"
        )


def _permuted(source: Source, order: NDArray[np.intp], axis: int) -> Source:
    def make() -> Weight:
        _check_rows(source, len(order), axis)  # not before: the graph says it better, or does not use the tensor
        return _rows(source, axis, order)

    return replace(source, make=make, steps=f"{source.steps} rows {zlib.crc32(order.tobytes())}")


def _split(source: Source, rows: Sequence[int], axis: int) -> Iterator[Source]:
    _check_rows(source, sum(rows), axis)
    for begin, end in pairwise(accumulate(rows, initial=0)):
        yield _cut(source, begin, end, axis)


def _cut(source: Source, begin: int, end: int, axis: int) -> Source:
    return replace(
        source,
        shape=(*source.shape[:axis], end - begin, *source.shape[axis + 1 :]),
        nbytes=source.nbytes * (end - begin) // source.shape[axis],
        make=lambda: _rows(source, axis, slice(begin, end)),
        steps=f"{source.steps} rows {begin} to {end}",
    )


def _stacked(group: _Group, whole: str) -> Iterator[tuple[TensorName, Source]]:
    """The experts of each layer as one weight."""
    layers: dict[TensorName, dict[int, Source]] = {}
    for name, source in group.items():
        layer = TensorName(whole, name.numbers[:-1], name.kind)
        layers.setdefault(layer, {})[name.numbers[-1]] = source
    for layer, experts in layers.items():
        parts = [experts[i] for i in range(len(experts)) if i in experts]
        first = parts[0] if parts else next(iter(experts.values()))
        if len(parts) < len(experts):
            missing = next(i for i in range(len(experts)) if i not in experts)
            raise ModelLoadError(f"expert {missing} of {layer} is missing beside {first.tensors[0]!r:.80}")
        for part in parts:
            if (part.type_name, part.shape) != (first.type_name, first.shape):
                raise ModelLoadError(
                    f"tensor {part.tensors[0]!r:.80} is {part.type_name} {list(part.shape)}, but "
                    f"{first.tensors[0]!r:.80} is {first.type_name} {list(first.shape)}; experts must be alike"
                )
        yield layer, _stack_of(parts)


def _stack_of(parts: Sequence[Source]) -> Source:
    return Source(
        type_name=parts[0].type_name,
        shape=(len(parts), *parts[0].shape),
        nbytes=sum(part.nbytes for part in parts),
        tensors=tuple(tensor for part in parts for tensor in part.tensors),
        make=lambda: stack([part.make() for part in parts]),
        steps="; ".join(part.steps for part in parts) + " stacked",
    )


def _by_heads(source: Source, heads: int, transposed: bool) -> Source:
    if len(source.shape) != 2 or source.shape[0] % heads:
        raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}, no matrix of {heads} heads")
    rows, width = source.shape
    size = rows // heads

    def make() -> Weight:
        weight = source.make()
        whole = stack([weight.rows(slice(begin, begin + size)) for begin in range(0, rows, size)])
        if not transposed:
            return whole
        numbers = whole.data if isinstance(whole, DenseWeight) else whole.dequantize()
        return DenseWeight(numbers.swapaxes(-1, -2))

    shape = (heads, width, size) if transposed else (heads, size, width)
    becomes_float = transposed and source.type_name not in DENSE_TYPES
    return replace(
        source,
        type_name="F32" if becomes_float else source.type_name,
        nbytes=4 * rows * width if becomes_float else source.nbytes,
        shape=shape,
        make=make,
        steps=f"{source.steps} of {heads} heads" + " transposed" * transposed,
    )


def _one_matrix(source: Source, transposed: bool) -> Source:
    """The matrices of heads, one below the other: the way back of `_by_heads`."""
    heads, first, second = source.shape
    rows, width = (second, first) if transposed else (first, second)

    def make() -> Weight:
        weight = source.make()
        if not isinstance(weight, DenseWeight):
            raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {weight.type_name}, which cannot be joined")
        data = weight.data.swapaxes(-1, -2) if transposed else weight.data
        return DenseWeight(np.ascontiguousarray(data).reshape(heads * rows, width))

    return replace(source, shape=(heads * rows, width), make=make, steps=f"{source.steps} joined heads")


def _with_columns(source: Source, order: NDArray[np.intp]) -> Source:
    def make() -> Weight:
        weight = source.make()
        if not isinstance(weight, DenseWeight):
            raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {weight.type_name}; its columns cannot move")
        return DenseWeight(weight.data[..., order])

    return replace(source, make=make, steps=f"{source.steps} columns {zlib.crc32(order.tobytes())}")


def _kernel_of_shares(source: Source, part: int, count: int) -> Source:
    """The taps of one of `count` parts, [2 * cols]: of each column that of the token before, then the token's own."""
    if math.prod(source.shape) % count:
        raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}; it must have {count} rows")
    cols = math.prod(source.shape) // count

    def make() -> Weight:
        shares = source.make().dequantize().astype(np.float32).reshape(count, cols)[part]
        return DenseWeight(np.stack([shares, 1.0 - shares], axis=-1).reshape(-1))

    steps = f"{source.steps} taps of part {part}"
    return replace(source, type_name="F32", shape=(2 * cols,), nbytes=8 * cols, make=make, steps=steps)


def _shares_of_kernels(kernels: Sequence[Source]) -> Source:
    """The way back, [parts, 1, 1, cols]."""
    first = kernels[0]
    shape = (len(kernels), 1, 1, first.shape[0] // 2)

    def make() -> Weight:
        return DenseWeight(np.stack([each.make().dequantize()[::2] for each in kernels]).reshape(shape))

    tensors = tuple(tensor for each in kernels for tensor in each.tensors)
    return Source("F32", shape, 4 * math.prod(shape), tensors, make, first.steps + " as shares")


def _head_sums(source: Source, heads: int) -> Source:
    cols = math.prod(source.shape)
    if cols % heads:
        raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}, not of {heads} heads")
    dim = cols // heads

    def make() -> Weight:
        weights = source.make().dequantize().astype(np.float32).reshape(heads, 1, dim)
        return DenseWeight(np.ascontiguousarray(np.broadcast_to(weights, (heads, dim, dim))))

    steps = f"{source.steps} summed by {heads} heads"
    return replace(source, type_name="F32", shape=(heads, dim, dim), nbytes=4 * cols * dim, make=make, steps=steps)


def _summed_columns(source: Source) -> Source:
    """The way back, [heads * dim]."""
    cols = source.shape[0] * source.shape[2]

    def make() -> Weight:
        return DenseWeight(source.make().dequantize()[:, 0].reshape(-1))

    return replace(
        source, type_name="F32", shape=(cols,), nbytes=4 * cols, make=make, steps=f"{source.steps} as columns"
    )


def _as_row(source: Source) -> Source:
    def make() -> Weight:
        return stack([source.make()])

    return replace(source, shape=(1, *source.shape), make=make, steps=f"{source.steps} as a row")


def _transposed(source: Source) -> Source:
    def make() -> Weight:
        weight = source.make()
        if not isinstance(weight, DenseWeight):
            raise ModelLoadError(f"tensor {source.tensors[0]!r:.80} is {weight.type_name}, which cannot be transposed")
        return DenseWeight(weight.data.swapaxes(-1, -2))

    shape = (*source.shape[:-2], source.shape[-1], source.shape[-2])
    return replace(source, shape=shape, make=make, steps=f"{source.steps} transposed")


def _negative_exp(source: Source) -> Source:
    def make() -> Weight:
        return DenseWeight(-np.exp(source.make().dequantize().astype(np.float32)))

    return replace(source, type_name="F32", make=make, steps=f"{source.steps} -exp")


def _flattened(source: Source) -> Source:
    def make() -> Weight:
        return DenseWeight(source.make().dequantize().reshape(-1))

    return replace(source, type_name="F32", shape=(math.prod(source.shape),), make=make, steps=f"{source.steps} flat")


def _softplus(source: Source, addend: float) -> Source:
    def make() -> Weight:
        return DenseWeight(np.logaddexp(source.make().dequantize().astype(np.float32), np.float32(0.0)) + addend)

    return replace(source, type_name="F32", make=make, steps=f"{source.steps} softplus + {addend}")


def _unit_rows(source: Source) -> Source:
    def make() -> Weight:
        rows = source.make().dequantize().astype(np.float32)
        return DenseWeight(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-7))

    return replace(source, type_name="F32", make=make, steps=f"{source.steps} in unit rows")


def _by_distance(source: Source, buckets: NDArray[np.intp]) -> Source:
    if len(source.shape) != 2 or source.shape[0] <= buckets.max():
        found = f"tensor {source.tensors[0]!r:.80} is {list(source.shape)}"
        raise ModelLoadError(f"{found}; the configuration asks for {buckets.max() + 1} buckets of distances")

    def make() -> Weight:
        return DenseWeight(np.ascontiguousarray(source.make().dequantize().astype(np.float32)[buckets].T))

    shape = (source.shape[1], len(buckets))
    steps = f"{source.steps} by distance {zlib.crc32(buckets.tobytes())}"
    return replace(source, type_name="F32", shape=shape, nbytes=4 * math.prod(shape), make=make, steps=steps)


def _add_distance_vectors(groups: dict[str, _Group], transform: DistanceVectors, config: Any) -> None:
    """Puts the vectors in the place of the table and its norm. Projections that nothing else needs go, too."""
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
                made = _distance_vectors(rows, (table, *norm.values()), source, bias, config.num_heads)
                shape = (config.num_heads, source.shape[0] // config.num_heads, len(buckets))
                steps = f"{made.steps} by distance {zlib.crc32(buckets.tobytes())}"
                made = replace(made, shape=shape, nbytes=4 * math.prod(shape), steps=steps)
                groups.setdefault(whole, {})[replace(name, stem=whole)] = made


def _distance_vectors(
    rows: Callable[[], NDArray[np.float32]],
    read: Sequence[Source],
    projection: Source,
    bias: Source | None,
    num_heads: int,
) -> Source:
    """rows: [distances, hidden], made of the sources `read`."""
    sources = (*read, projection, *(() if bias is None else (bias,)))

    def make() -> Weight:
        found = rows() @ projection.make().dequantize().T.astype(np.float32)
        if bias is not None:
            found = found + bias.make().dequantize()
        by_head = found.T.reshape(num_heads, -1, len(found))
        return DenseWeight(np.ascontiguousarray(by_head, np.float32))

    tensors = tuple(tensor for source in sources for tensor in source.tensors)
    steps = " ".join(source.steps for source in sources)
    return Source("F32", (), 0, tensors, make, steps)


def _ones(count: int) -> Source:
    return Source("F32", (count,), 4 * count, (), lambda: DenseWeight(np.ones(count, np.float32)), "ones")


def _folded(source: Source, addend: float) -> Source:
    def make() -> Weight:
        return DenseWeight(source.make().dequantize() + np.float32(addend))

    return replace(source, type_name="F32", make=make, steps=f"{source.steps} + {addend}")
