"""Quantizes a checkpoint layer by layer.

The inputs of a layer's matrices are observed and the matrices are quantized. Then the layer runs again with its new
weights, to produce the inputs of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from octavo.backends.layers import Tokens, Values, each_text
from octavo.compress.checkpoints.folding import ColumnFold, find_folds
from octavo.compress.checkpoints.input_statistics import InputObserver, InputStatistics
from octavo.compress.checkpoints.methods import QuantizationMethod
from octavo.compress.checkpoints.quantization_plan import QuantizationPlan, WorkingWeights
from octavo.compress.checkpoints.workplace import Workplace
from octavo.errors import ModelWriteError
from octavo.graph.builder import Graph
from octavo.graph.values import Parameter
from octavo.quantization.checkpoints._stored import StoredTensor, stored_tensor
from octavo.quantization.ggml_blocks import Floats
from octavo.quantization.packed import DenseWeight, check_finite

StepReport = Callable[[int, int], None]
"""Called with the number of steps done and their total. A step is one text through a layer, or one matrix."""


@dataclass(slots=True)
class LayerQuantizer:
    """Quantizes one model.

    texts: calibration texts; empty for a method that needs no inputs.
    unseen: matrices of experts that no token of the texts chose; they are rounded to nearest.
    """

    plan: QuantizationPlan
    method: QuantizationMethod
    texts: Sequence[Tokens]
    place: Workplace
    report: StepReport
    unseen: list[str] = field(default_factory=list)
    _done: int = 0

    def run(self) -> None:
        """Quantize the layers that are not finished. Raises ModelWriteError naming tensor or file."""
        weights = WorkingWeights(self.plan.checkpoint)
        finished = self.place.num_finished()
        if finished:
            self._step(sum(map(self._steps, range(finished))))  # at once: it took no time now
        for index in range(finished, len(self.plan.layers)):
            weights.changed.clear()
            self.place.write_layer(index, self._layer(index, weights))

    def _steps(self, index: int) -> int:
        runs = 2 if index + 1 < len(self.plan.layers) else 1  # nothing follows the last layer
        return len(self.plan.matrices[index]) + (runs * len(self.texts) if self.method.needs_inputs else 0)

    def _step(self, count: int = 1) -> None:
        self._done += count
        self.report(self._done, sum(map(self._steps, range(len(self.plan.layers)))))

    def _layer(self, index: int, weights: WorkingWeights) -> dict[str, StoredTensor]:
        """Quantize a layer and return its changed tensors as they are stored.

        If the method needs inputs, the layer's outputs are saved for the next layer.
        """
        layer = self.plan.layers[index]
        inputs: dict[str, InputStatistics] = {}
        if self.method.needs_inputs:
            self._check_finite(layer, weights)
            with closing(self.place.values(index, len(self.texts))) as values:
                inputs = self._observe(index, layer, weights, values)
            for fold in find_folds(layer):
                self._fold(fold, weights, inputs)
        tensors = self._quantize(index, weights, inputs)
        if self.method.needs_inputs and index + 1 < len(self.plan.layers):
            with closing(self.place.values(index, len(self.texts))) as values:
                made = each_text(layer, weights.weights, self.texts, values, all_logits=False)
                self.place.write_values(index + 1, layer, self.texts, self._counted(made))
        return tensors

    def _check_finite(self, layer: Graph, weights: WorkingWeights) -> None:
        """Check that the weights are finite, because a NaN would spread through the activations of all later layers."""
        info = self.plan.checkpoint.weights.info
        tensor = ""
        try:
            for tensor in (name for parameter in layer.parameters for name in info(parameter.name).tensors):
                check_finite(weights.stored(tensor))
        except ValueError as error:
            raise ModelWriteError(f"tensor {tensor!r:.100}: {error}") from error

    def _observe(
        self, index: int, layer: Graph, weights: WorkingWeights, values: Sequence[Values]
    ) -> dict[str, InputStatistics]:
        wanted = {*self.plan.matrices[index]}

        def tensor_of(parameter: Parameter, number: int | None) -> str | None:
            name = self.plan.stored_name(parameter, number)
            return name if name in wanted else None

        observer = InputObserver(tensor_of, self.method.evenness)
        for _ in self._counted(
            each_text(layer, weights.weights, self.texts, values, observe=observer, all_logits=False)
        ):
            pass
        for name, statistics in observer.found.items():
            if not np.isfinite(statistics.gram).all():
                raise ModelWriteError(f"the inputs of tensor {name!r:.100} overflow; the checkpoint is damaged")
        return observer.found

    def _counted(self, values: Iterator[Values]) -> Iterator[Values]:
        for found in values:
            yield found
            self._step()

    def _fold(self, fold: ColumnFold, weights: WorkingWeights, inputs: dict[str, InputStatistics]) -> None:
        """Scale the columns of matrices that share an input, and divide whatever produces it."""
        producers = [self._producer(parameter) for parameter in fold.producers]
        consumers = [self._consumer(parameter) for parameter in fold.consumers]
        if None in producers or None in consumers:
            return
        names = [*dict.fromkeys(name for name in consumers if name is not None)]
        quantized = [name for name in names if name in inputs]
        if not quantized:
            return
        statistics = inputs[quantized[0]]
        scale = self.method.scale(fold, statistics, [weights.stored(name) for name in quantized])
        if scale is None:
            return
        rows = fold.shared(scale)
        first, *rest = [name for name in producers if name is not None]
        rows = self._divide(first, rows, weights)
        for name in rest:
            self._divide(name, rows, weights)
        columns = fold.spread(rows)
        for name in names:
            weights.changed[name] = DenseWeight(weights.stored(name) * columns)
        scaled = statistics.scaled(columns)
        for name in quantized:
            inputs[name] = scaled

    def _producer(self, parameter: Parameter) -> str | None:
        """Return the name of the stored tensor whose elements or rows are exactly the parameter's, or None."""
        name = self.plan.stored_name(parameter) if parameter.part is None else None
        return name if name is not None and self.plan.addend(name) is not None else None

    def _consumer(self, parameter: Parameter) -> str | None:
        return self.plan.stored_name(parameter) if parameter.part is None else None

    def _divide(self, name: str, scale: Floats, weights: WorkingWeights) -> Floats:
        """Divide the elements of a vector or the rows of a matrix, and return the divisors that were actually applied.

        A divided vector is rounded to its stored type, so the actual divisors differ from `scale`. Scaling the matrices
        by the actual divisors compensates for that.
        """
        stored = weights.stored(name)
        if stored.ndim > 1:
            weights.changed[name] = DenseWeight(stored / scale[:, None])
            return scale
        addend = np.float32(self.plan.addend(name) or 0)
        type_name = self.plan.checkpoint.file.tensors[name].type_name
        divided: Floats = (stored + addend) / scale - addend
        rounded = DenseWeight(divided).converted(type_name)
        weights.changed[name] = rounded
        new = rounded.dequantize() + addend
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = np.where(new == 0, scale, (stored + addend) / new)
        return exact.astype(np.float32)

    def _quantize(
        self, index: int, weights: WorkingWeights, inputs: dict[str, InputStatistics]
    ) -> dict[str, StoredTensor]:
        """Quantize the matrices of a layer and return all of its changed tensors as they are stored.

        Each matrix removes its statistics from `inputs`. Matrices with the same input share statistics, so their memory
        is freed after the last of these matrices.
        """
        found: dict[str, StoredTensor] = {}
        for name in self.plan.matrices[index]:
            statistics = inputs.pop(name, None)
            if self.method.needs_inputs and statistics is None:
                self.unseen.append(name)
            try:
                weight = self.method.weight(weights.stored(name), statistics)
                parts = self.method.tensors(weight)
            except ValueError as error:
                raise ModelWriteError(f"tensor {name!r:.100} cannot become {self.method.kind}: {error}") from error
            found |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
            weights.changed[name] = weight
            self._step()
        for name, changed in weights.changed.items():
            if name not in self.plan.matrices[index]:
                type_name = self.plan.checkpoint.file.tensors[name].type_name
                data = DenseWeight(changed.dequantize()).converted(type_name).data
                found[name] = stored_tensor(data, type_name)
        return found
