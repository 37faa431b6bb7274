"""Measures on a text how much loss each tensor of a model causes when it is quantized.

One tensor at a time is rounded to one type, the probe. The loss is the KL divergence between the next-token
distributions of this model and of the model with float16 weights. Since the divergence grows with the square of a small
weight error, the loss of other types follows from the ratio of the weighted squared errors. Layers before the tensor
are not recomputed, because their results are kept. Only the two outermost layers at each end and every third layer in
between are measured. For the other layers, the divergence per unit of weighted error is interpolated between the same
tensors of the measured layers, on a logarithmic scale.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo import __version__
from octavo.backends.layers import Values, layers_of
from octavo.backends.quantizers import quantize
from octavo.backends.whole_texts import TextRunner
from octavo.compress.allocation import Option
from octavo.compress.encode import Importance
from octavo.compress.mixtures import layer_order
from octavo.compress.source import SourceTensor
from octavo.errors import NumericalError, UsageError
from octavo.graph.segments import cut
from octavo.loader.atomic_file import write_text
from octavo.loader.checkpoint import Checkpoint
from octavo.models import build_graph
from octavo.quantization.ggml import BLOCK_SIZES, stored_bytes
from octavo.quantization.packed import DENSE_TYPES, DenseWeight, GGMLWeight, Weight

TEXTS, TEXT_TOKENS, TEXT_ROWS = 4, 128, 64
_OUTER_LAYERS, _INNER_STEP = 2, 3
CANDIDATES = (
    "Q2_K", "IQ3_XXS", "Q3_K", "MXFP4", "IQ4_XS", "IQ4_NL", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K", "Q8_0",
)  # fmt: skip
_PROBES = ("Q3_K", "IQ4_NL")  # about four bits: their errors are far above those of float32 arithmetic
_SAMPLE_VALUES = 1 << 18  # values per matrix from which errors of types are measured

Count = Callable[[int, int], None]
LogProbs = NDArray[np.float32]
RowDivergence = Callable[[LogProbs, LogProbs], NDArray[np.float64]]
"""Computes KL divergences [rows] from log-probabilities and logits [rows, vocabulary]."""


def _silent(_done: int, _total: int) -> None:
    pass


def candidates(width: int) -> list[str]:
    """Return the types whose blocks fit rows of this width."""
    return [name for name in CANDIDATES if width % BLOCK_SIZES[name][0] == 0]


def types_of(tensor: SourceTensor) -> list[str]:
    """Return the types that a tensor could have, including its own."""
    return list(dict.fromkeys([*candidates(tensor.shape[-1]), tensor.type_name]))


def least_bytes(tensor: SourceTensor) -> int:
    """Return the size in bytes of a tensor in the smallest of its types."""
    return min(stored_bytes(name, tensor.shape) for name in types_of(tensor))


@dataclass(frozen=True, slots=True)
class FloatWeights(Mapping[str, Weight]):
    """The weights of a checkpoint, some of them replaced. Matrices are float16, or float32 if they are stored so.

    Vectors have the type in which they are stored.
    """

    checkpoint: Checkpoint
    replaced: Mapping[str, DenseWeight] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Weight:
        if name in self.replaced:
            return self.replaced[name]
        weight = self.checkpoint.weights[name]
        if len(weight.shape) < 2 or weight.type_name in ("F16", "F32"):
            return weight
        return as_float16(name, weight.dequantize())

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.weights)

    def __len__(self) -> int:
        return len(self.checkpoint.weights)

    def info(self, name: str) -> DenseWeight:
        """Return the type and size of a weight, as an array that takes no memory."""
        source = self.checkpoint.weights.info(name)
        is_stored = len(source.shape) < 2 or source.type_name in ("F16", "F32")
        kind = DENSE_TYPES[source.type_name] if is_stored and name not in self.replaced else np.float16
        return DenseWeight(np.broadcast_to(np.zeros((), kind), source.shape))

    def fingerprint(self, name: str) -> bytes:
        return self.checkpoint.weights.fingerprint(name)

    def release(self, name: str) -> None:
        self.checkpoint.weights.release(name)


def as_float16(name: str, values: NDArray[np.float32]) -> DenseWeight:
    """Convert the numbers to float16. Raises UsageError naming the tensor if one is too large."""
    try:
        return DenseWeight(values).converted("F16")
    except ValueError as error:
        raise UsageError(f"tensor {name!r:.80}: {error}") from error


def calibration_texts(ids: Sequence[int], first: int | None) -> NDArray[np.int32]:
    """Return pieces spread evenly over the tokens of a text, [texts, tokens].

    first: token that replaces the first one of each piece.

    Raises UsageError for a text of fewer than two tokens.
    """
    if len(ids) < 2:
        raise UsageError("the calibration text is empty; give a few pages of text like the model will see")
    length = min(TEXT_TOKENS, len(ids))
    count = min(TEXTS, len(ids) // length)
    starts = [i * (len(ids) - length) // max(count - 1, 1) for i in range(count)]
    texts = np.array([ids[start : start + length] for start in starts], np.int32)
    if first is not None:
        texts[:, 0] = first
    return texts


class Measurements:
    """The divergences measured so far, by tensor, in a JSON file.

    The file is rewritten after each measurement, so that a killed run loses only one. Its name depends on the model,
    the text, the importance and the version of Octavo, so that measurements made with others are never used.
    """

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, texts: NDArray[np.int32], importance: Mapping[str, Importance]
    ) -> None:
        digest = hashlib.sha256(repr((__version__, _PROBES, texts.tolist())).encode())
        for name, columns in sorted(importance.items()):
            digest.update(name.encode() + columns.tobytes())
        for name in sorted(checkpoint.weights):
            digest.update(checkpoint.weights.fingerprint(name))
        self.path = folder / f"{digest.hexdigest()[:32]}.json"
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            found = {}
        numbers = found.items() if isinstance(found, dict) else ()
        self.divergences = {str(k): float(v) for k, v in numbers if isinstance(v, int | float)}

    def add(self, tensor: str, divergence: float) -> None:
        self.divergences[tensor] = divergence
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self.divergences))


class Sensitivity:
    """Measures the divergences and errors of one model's tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        texts: NDArray[np.int32],
        importance: Mapping[str, Importance],
        divergence: RowDivergence,
    ) -> None:
        """Prepare to measure a model.

        importance: importance of columns, by GGUF name.
        divergence: `octavo.quality.figures.kl_divergence`.
        """
        self._checkpoint = checkpoint
        self._texts = texts
        self._importance = importance
        self._divergence = divergence
        length = texts.shape[1]
        rows = min(TEXT_ROWS, length - 1)
        self.rows = np.unique(np.linspace(min(length // 8, length - 2), length - 2, rows).astype(np.int32))
        self._graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
        self._layers = layers_of(self._graph)
        self._inputs: list[Values] = []
        self._base: NDArray[np.float32] = np.empty((0, 0), np.float32)

    def measure(self, tensors: Sequence[SourceTensor], known: Measurements, report: Count = _silent) -> None:
        """Add the divergences that `known` lacks, from the last layer to the first.

        Only the tensors chosen by `measured_of` are measured.

        report: called with the number of finished tensors and the number of all tensors to measure.
        """
        tensors = measured_of(tensors)
        weights = self._checkpoint.weights
        users: dict[str, list[str]] = {}
        for name in weights:
            for stored in weights.info(name).tensors:
                users.setdefault(stored, []).append(name)
        missing = [tensor for tensor in tensors if tensor.name not in known.divergences]
        report(len(tensors) - len(missing), len(tensors))
        if not missing:
            return
        self._run_base()
        of_layer: dict[tuple[int, int], list[tuple[SourceTensor, list[str]]]] = {}
        for tensor in missing:
            names = sorted({name for stored in tensor.stored for name in users.get(stored, [])})
            places = [i for i, layer in enumerate(self._layers) if any(p.name in names for p in layer.parameters)]
            if not places:  # no output depends on it
                known.add(tensor.name, 0.0)
                continue
            of_layer.setdefault((places[0], places[-1]), []).append((tensor, names))
        for first, last in sorted(of_layer, reverse=True):
            with _Rest(self, first, last) as rest:
                for tensor, names in of_layer[first, last]:
                    known.add(tensor.name, self._divergence_of(tensor, names, rest))
                    report(sum(tensor.name in known.divergences for tensor in tensors), len(tensors))

    def _run_base(self) -> None:
        values: Values = ()
        weights = FloatWeights(self._checkpoint)
        for layer in self._layers:
            self._inputs.append(values)
            with TextRunner(layer, weights, self._texts, self.rows) as runner:
                values = runner.run(values)
        logits = values[0]
        if not np.isfinite(logits).all():
            raise NumericalError(
                "the model's logits contain NaN or infinity, so types cannot be compared; use an intact model"
            )
        shifted = logits - logits.max(axis=1, keepdims=True)
        self._base = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    def _divergence_of(self, tensor: SourceTensor, names: Sequence[str], rest: _Rest) -> float:
        changed = {name: self.probed(name, tensor) for name in names}
        logits = rest.run(FloatWeights(self._checkpoint, changed))
        return max(float(self._divergence(self._base, logits).mean()), 0.0)

    def probed(self, name: str, tensor: SourceTensor) -> DenseWeight:
        """Return the graph's weight `name`, which is all or part of `tensor`, in the type of the probe."""
        values = self._checkpoint.weights[name].dequantize()
        importance = _fitted(self._importance.get(tensor.name), values.shape)
        probe = probe_of(values.shape[-1])
        matrices = values.reshape(-1, *values.shape[-2:])
        for i, matrix in enumerate(matrices):
            columns = None if importance is None else importance[i % len(importance)]
            matrices[i] = _rounded(tensor.name, probe, matrix, columns)
        return as_float16(name, matrices.reshape(values.shape))

    def options(
        self, tensors: Sequence[SourceTensor], known: Measurements, report: Count = _silent
    ) -> list[list[Option]]:
        """Return the options of each tensor, one for each type in `types_of`, with the expected losses.

        A tensor's own type causes no loss.
        """
        errors = []
        for done, tensor in enumerate(tensors, 1):
            errors.append(self._errors(tensor, candidates(tensor.shape[-1])))
            report(done, len(tensors))
        tiny = float(np.finfo(np.float32).tiny)
        scales = {
            tensor.name: known.divergences[tensor.name] / max(found[probe_of(tensor.shape[-1])], tiny)
            for tensor, found in zip(tensors, errors, strict=True)
            if tensor.name in known.divergences
        }
        scales = _interpolated(tensors, scales)
        return [
            [
                Option(name, stored_bytes(name, tensor.shape), loss * scales[tensor.name])
                for name in types_of(tensor)
                for loss in [0.0 if name == tensor.type_name else found[name]]
            ]
            for tensor, found in zip(tensors, errors, strict=True)
        ]

    def _errors(self, tensor: SourceTensor, types: Sequence[str]) -> dict[str, float]:
        """Return the weighted squared error of each type, over a sample of rows from the whole tensor."""
        weight = tensor.make()
        matrices = weight.shape[0] if len(weight.shape) > 2 else 1
        importance = _fitted(self._importance.get(tensor.name), weight.shape)
        totals = dict.fromkeys(types, 0.0)
        for i in range(0, matrices, -(-matrices // 4)):
            part = weight if matrices == 1 else _matrix(weight, i)
            wanted = max(_SAMPLE_VALUES // part.shape[-1] // min(matrices, 4), 1)
            index = np.unique(np.linspace(0, part.shape[0] - 1, min(wanted, part.shape[0])).astype(np.intp))
            x = part.rows(index).dequantize()
            columns = None if importance is None else importance[i % len(importance)]
            scale = np.ones(x.shape[1], np.float32) if columns is None else columns
            for name in types:
                difference = _rounded(tensor.name, name, x, columns) - x
                totals[name] += float(np.einsum("ij,ij,j->", difference, difference, scale, dtype=np.float64))
        tensor.release()
        return totals


class _Rest:
    """The layers from `first` to the end. Weights in layers `first` to `last` can be replaced for each run.

    The layers after `last` are compiled only once.
    """

    def __init__(self, owner: Sensitivity, first: int, last: int) -> None:
        self._owner = owner
        count = len(owner._layers)
        ranges = [range(first), range(first, last + 1), range(last + 1, count)]
        parts = iter(cut(owner._graph, [r for r in ranges if r]))
        graphs = [next(parts) if r else None for r in ranges]
        assert graphs[1] is not None
        self._changed = graphs[1]
        self._inputs = owner._inputs[first]
        weights = FloatWeights(owner._checkpoint)
        self._after = None if graphs[2] is None else TextRunner(graphs[2], weights, owner._texts, owner.rows)

    def run(self, weights: FloatWeights) -> NDArray[np.float32]:
        """Return the logits with these weights."""
        with TextRunner(self._changed, weights, self._owner._texts, self._owner.rows) as runner:
            values = runner.run(self._inputs)
        [logits] = values if self._after is None else self._after.run(values)
        return np.asarray(logits, np.float32)

    def __enter__(self) -> _Rest:
        return self

    def __exit__(self, *_: object) -> None:
        if self._after is not None:
            self._after.close()


def measured_of(tensors: Sequence[SourceTensor]) -> list[SourceTensor]:
    """Return the tensors to measure.

    Every other tensor is in a layer between two layers whose corresponding tensors are measured.
    """
    series = _series(tensors)
    found = []
    for tensor in tensors:
        layers = sorted(series[_kind(tensor)])
        place, count = layers.index(layer_order(tensor.name)[0]), len(layers)
        if min(place, count - 1 - place) < _OUTER_LAYERS or (place - _OUTER_LAYERS) % _INNER_STEP == 1:
            found.append(tensor)
    return found


def _kind(tensor: SourceTensor) -> tuple[str, tuple[int, ...]]:
    """Return a key that is equal for corresponding tensors of different layers."""
    return re.sub(r"^blk\.\d+\.", "blk.*.", tensor.name), tensor.shape


def _series(tensors: Sequence[SourceTensor]) -> dict[tuple[str, tuple[int, ...]], dict[int, str]]:
    """Return the names of corresponding tensors in all layers: `_kind` -> layer -> name."""
    series: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    for tensor in tensors:
        series.setdefault(_kind(tensor), {})[layer_order(tensor.name)[0]] = tensor.name
    return series


def _interpolated(tensors: Sequence[SourceTensor], scales: Mapping[str, float]) -> dict[str, float]:
    """Interpolate the scales of all tensors from the known scales of some layers."""
    found: dict[str, float] = {}
    for names in _series(tensors).values():
        layers = sorted(layer for layer, name in names.items() if name in scales)
        logs = [float(np.log(max(scales[names[layer]], 1e-30))) for layer in layers]
        found |= {name: float(np.exp(np.interp(layer, layers, logs))) for layer, name in names.items()}
    return found


def probe_of(width: int) -> str:
    """Return the type in which a tensor with rows of this width is measured."""
    return next(name for name in _PROBES if width % BLOCK_SIZES[name][0] == 0)


def _rounded(
    tensor: str, type_name: str, x: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Round rows of a tensor to a type. Raises UsageError naming the tensor."""
    try:
        return GGMLWeight.from_bytes(type_name, quantize(type_name, x, importance), x.shape).dequantize()
    except ValueError as error:
        raise UsageError(f"tensor {tensor!r:.80} cannot become {type_name}: {error}") from error


def _matrix(weight: DenseWeight | GGMLWeight, index: int) -> DenseWeight | GGMLWeight:
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.data[index])
    return GGMLWeight(weight.type_name, weight.data[index])


def _fitted(columns: Importance | None, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """Return the importance as [matrices, columns], with one row if all matrices share it, or None if it does not
    fit.
    """
    if columns is None:
        return None
    rows = columns.reshape(-1, columns.shape[-1])
    return rows if rows.shape[1] == shape[-1] else None
