"""Chooses the type of each tensor of a model, and writes the model as a quantized GGUF file."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.backends.quantizers import compute_threads, quantizer_types
from octavo.compress.allocation import Option, allocate
from octavo.compress.encode import Encoding, Importance, encode
from octavo.compress.importance import ImportanceMatrix, fitted
from octavo.compress.mixtures import MIXTURES, Mixture, Rules, can_be_quantized, fallback, find_mixture, layer_order
from octavo.compress.source import SourceModel, SourceTensor
from octavo.errors import UsageError
from octavo.loader.gguf_writer import MetadataValue, OutputTensor, write_gguf
from octavo.quantization.ggml import BLOCK_SIZES, stored_bytes
from octavo.quantization.packed import DENSE_TYPES

_LEAST_BLOCK = 32
Report = Callable[[int, int], None]
"""Called with the bytes of the result that are done, and the total."""


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """A tensor, the type it gets, and the reason if it needs explaining."""

    tensor: SourceTensor
    type_name: str
    note: str = ""

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.type_name, self.tensor.shape)


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """Types that the user sets. Patterns are regular expressions.

    overrides: (pattern, type); the first pattern found in a tensor's name decides.
    keep: patterns of tensors that stay as they are.
    """

    overrides: Sequence[tuple[re.Pattern[str], str]] = ()
    keep: Sequence[re.Pattern[str]] = ()


def parse_type(text: str) -> str:
    """Check the name of a type that a tensor can have, and return it. Raises UsageError listing all types."""
    known = quantizer_types() | DENSE_TYPES.keys()
    if text.upper() not in known:
        raise UsageError(f"type {text!r} is unknown; a tensor can be {', '.join(sorted(known))}", param="type")
    return text.upper()


def parse_mixture(text: str) -> Mixture:
    """Return a mixture by its name. Raises UsageError listing all of them."""
    if (mixture := find_mixture(text)) is None:
        raise UsageError(f"type {text!r} is unknown; choose one of {', '.join(MIXTURES)}", param="type")
    return mixture


def choose_types(
    model: SourceModel, mixture: Mixture, options: TypeOptions, *, has_importance: bool = False
) -> list[TypeChoice]:
    """Choose the type of each tensor, in the order of the model.

    Raises UsageError for an override that does not fit the width of its tensor, and for patterns that match nothing.
    """
    rules = Rules(mixture, model.facts(has_importance))
    _check_patterns(model, options)
    chosen = {}
    for tensor in sorted(model.tensors, key=lambda tensor: layer_order(tensor.name)):
        chosen[tensor.name] = _choose(tensor, rules, options)
    return [chosen[tensor.name] for tensor in model.tensors]


def _choose(tensor: SourceTensor, rules: Rules, options: TypeOptions) -> TypeChoice:
    # The rules count tensors, those with a type of their own included.
    name, width = tensor.name, tensor.shape[-1]
    is_asked = can_be_quantized(name, tensor.shape) and not any(pattern.search(name) for pattern in options.keep)
    by_rule = rules.choose(name, tensor.shape) if is_asked else ""
    if (fixed := _fixed(tensor, options)) is not None:
        return fixed
    type_name = fallback(by_rule, width)
    return TypeChoice(tensor, type_name, "" if type_name == by_rule else f"{by_rule} does not fit rows of {width}")


def _fixed(tensor: SourceTensor, options: TypeOptions) -> TypeChoice | None:
    """Return the choice for a tensor whose type no mixture decides, or None for other tensors. Raises UsageError."""
    name, shape = tensor.name, tensor.shape
    if any(pattern.search(name) for pattern in options.keep):
        return TypeChoice(tensor, tensor.type_name, "kept")
    if not can_be_quantized(name, shape):
        return TypeChoice(tensor, tensor.type_name if tensor.type_name in DENSE_TYPES else "F32")
    for pattern, type_name in options.overrides:
        if pattern.search(name):
            if shape[-1] % BLOCK_SIZES[type_name][0]:
                raise UsageError(
                    f"tensor {name!r} has rows of {shape[-1]} values, not a multiple of the {type_name} block size "
                    f"{BLOCK_SIZES[type_name][0]}; choose {fallback(type_name, shape[-1])}",
                    param="tensor_type",
                )
            return TypeChoice(tensor, type_name, "chosen by --tensor-type")
    return None


def free_tensors(model: SourceModel, options: TypeOptions) -> list[SourceTensor]:
    """Return the tensors whose type can be chosen to meet a size limit.

    `options` do not set their type, and their rows are whole blocks. Raises the same errors as `choose_types`.
    """
    _check_patterns(model, options)
    return [t for t in model.tensors if t.shape[-1] % _LEAST_BLOCK == 0 and _fixed(t, options) is None]


def check_size(model: SourceModel, options: TypeOptions, bits: float, smallest: Mapping[str, int]) -> None:
    """Check that the model can be stored in this many bits per weight. Raises UsageError.

    smallest: minimum number of bytes of every free tensor.
    """
    least = sum(choice.nbytes for choice in _choices_beside(model, options, smallest).values()) + sum(smallest.values())
    if _budget(model, bits) < least:
        needed = math.ceil(800 * least / _num_values(model)) / 100
        raise UsageError(f"--bpw {bits:g} is too small: this model needs at least {needed:g} bits per weight")


def _budget(model: SourceModel, bits: float) -> int:
    """Return the size in bytes of all tensors at this many bits per weight."""
    return int(bits * _num_values(model) / 8)


def _choices_beside(model: SourceModel, options: TypeOptions, free: Container[str]) -> dict[str, TypeChoice]:
    """Return the types of the tensors that are not free."""
    taken = {}
    for tensor in model.tensors:
        if tensor.name not in free:
            dense = tensor.type_name if tensor.type_name in DENSE_TYPES else "F16"
            taken[tensor.name] = _fixed(tensor, options) or TypeChoice(tensor, dense, "no whole blocks")
    return taken


def _num_values(model: SourceModel) -> int:
    return sum(math.prod(tensor.shape) for tensor in model.tensors)


def choose_by_size(
    model: SourceModel, options: TypeOptions, bits: float, losses: Mapping[str, Sequence[Option]]
) -> list[TypeChoice]:
    """Choose the types with the least total loss that keep the model within this many bits per weight.

    The result is in the order of the model. Call `check_size` first.

    losses: the options of every free tensor.
    """
    taken = _choices_beside(model, options, losses)
    free = [tensor for tensor in model.tensors if tensor.name in losses]
    room = _budget(model, bits) - sum(choice.nbytes for choice in taken.values())
    chosen = allocate([losses[tensor.name] for tensor in free], room)
    taken |= {tensor.name: TypeChoice(tensor, option.type_name) for tensor, option in zip(free, chosen, strict=True)}
    return [taken[tensor.name] for tensor in model.tensors]


def nearest_file_type(choices: Sequence[TypeChoice]) -> int:
    """Return `general.file_type` of the mixture whose base is the type of most weights."""
    counts: Counter[str] = Counter()
    for choice in choices:
        counts[choice.type_name] += math.prod(choice.tensor.shape)
    [(most, _)] = counts.most_common(1)
    return next((mixture.file_type for mixture in MIXTURES.values() if mixture.base == most), 0)


def _check_patterns(model: SourceModel, options: TypeOptions) -> None:
    for pattern in [*options.keep, *(pattern for pattern, _ in options.overrides)]:
        if not any(pattern.search(tensor.name) for tensor in model.tensors):
            raise UsageError(f"pattern {pattern.pattern!r} matches no tensor name; names look like blk.0.attn_q.weight")


def quantize_model(
    model: SourceModel,
    path: Path,
    choices: Sequence[TypeChoice],
    file_type: int,
    importance: ImportanceMatrix | None = None,
    *,
    threads: int = 0,
    max_part_bytes: int | None = None,
    report: Report = lambda _done, _total: None,
) -> list[Path]:
    """Write the model with these types, and return its files.

    The bytes are the same for any number of threads.

    Raises ModelWriteError naming file or tensor; in that case no file with the name has been created.
    """
    data = importance or ImportanceMatrix({})
    columns = data.columns()
    count = compute_threads(threads)
    total = sum(choice.nbytes for choice in choices)
    done = 0
    encodings = [_encoding_of(choice, columns) for choice in choices]
    with ThreadPoolExecutor(count, "quantize") as pool, closing(encode(encodings, pool, count)) as encoded:

        def chunks(choice: TypeChoice) -> Iterator[NDArray[np.uint8]]:
            nonlocal done
            for chunk in next(encoded):
                yield chunk
                done += chunk.nbytes
                report(done, total)
            choice.tensor.release()

        tensors = [
            OutputTensor(c.tensor.name, c.type_name, c.tensor.shape, lambda c=c: chunks(c))  # type: ignore[misc]
            for c in choices
        ]
        return write_gguf(path, _metadata(model, file_type, data), tensors, max_part_bytes=max_part_bytes)


def _encoding_of(choice: TypeChoice, columns: Mapping[str, Importance]) -> Encoding:
    tensor = choice.tensor
    return Encoding(tensor.name, tensor.shape, tensor.make, choice.type_name, _importance_of(choice, columns))


def _importance_of(choice: TypeChoice, columns: Mapping[str, Importance]) -> Importance | None:
    """Return the tensor's importance, [columns] or [experts, columns], or None if it is unknown or not needed.

    Raises UsageError if its shape does not fit the tensor.
    """
    found = columns.get(choice.tensor.name)
    shape = choice.tensor.shape
    if found is None or choice.type_name in DENSE_TYPES:
        return None
    found = fitted(found, shape)
    if found.shape not in ((shape[-1],), (*shape[:-2], shape[-1])):
        raise UsageError(
            f"the importance of tensor {choice.tensor.name!r} has the shape {list(found.shape)}, but the tensor has "
            f"{list(shape)}; it belongs to another model"
        )
    return found


def _metadata(model: SourceModel, file_type: int, data: ImportanceMatrix) -> dict[str, MetadataValue]:
    kept = {key: value for key, value in model.metadata.items() if not key.startswith("quantize.imatrix.")}
    kept |= {"general.file_type": np.uint32(file_type), "general.quantization_version": np.uint32(2)}
    if data.squares:
        kept |= {
            "quantize.imatrix.file": data.file,
            "quantize.imatrix.dataset": data.dataset,
            "quantize.imatrix.entries_count": np.uint32(len(data.squares)),
            "quantize.imatrix.chunks_count": np.uint32(data.num_chunks),
        }
    return kept


def bits_per_weight(choices: Sequence[TypeChoice]) -> float:
    """Return the mean number of bits per weight over all tensors."""
    return 8 * sum(choice.nbytes for choice in choices) / max(sum(math.prod(c.tensor.shape) for c in choices), 1)
