"""The on-disk state of a calibration run: the finished layers, and the input values of the next one.

A layer is finished once its file has its final name; its output values are written before that. After a killed run, the
next run continues after the last finished layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from octavo.backends.layers import Tokens, Values
from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.values import TOKENS
from octavo.loader.atomic_file import write_text
from octavo.loader.atomic_folder import AtomicFolder
from octavo.loader.json_file import read_json_object
from octavo.loader.safetensors import open_safetensors
from octavo.loader.safetensors_writer import SafeTensor, write_safetensors
from octavo.loader.tensor_files import TensorFiles
from octavo.quantization.checkpoints._stored import StoredTensor

WORK = "work"
"""Name of the work folder inside the folder of the unfinished model."""
_PLAN = "plan.json"
_MAX_PLAN_BYTES = 1 << 22


class Workplace:
    """The folder of unfinished work.

    plan: everything the result depends on; work for a different plan is discarded.
    """

    def __init__(self, folder: AtomicFolder, plan: Mapping[str, object]) -> None:
        self._folder = folder
        self._work = folder.partial / WORK
        if not self._is_of(plan):
            folder.clear()
            self._work.mkdir()
            write_text(self._work / _PLAN, json.dumps(plan))

    def _is_of(self, plan: Mapping[str, object]) -> bool:
        try:
            return bool(read_json_object(self._work / _PLAN, _MAX_PLAN_BYTES) == json.loads(json.dumps(plan)))
        except ModelLoadError:
            return False

    def num_finished(self) -> int:
        """Number of finished layers."""
        count = 0
        while self._layer(count).exists():
            count += 1
        return count

    def write_layer(self, index: int, tensors: Mapping[str, StoredTensor]) -> None:
        """Write the tensors of a finished layer, and delete its input values."""
        write_safetensors(
            self._layer(index),
            [SafeTensor(n, t.type_name, t.data.shape, lambda t=t: [t.data.tobytes()]) for n, t in tensors.items()],  # type: ignore[misc]
        )
        self._values(index).unlink(missing_ok=True)

    def open_layer(self, index: int) -> TensorFiles:
        """Open the tensors of a finished layer."""
        return open_safetensors(self._layer(index))

    def write_values(self, index: int, layer: Graph, texts: Sequence[Tokens], values: Iterable[Values]) -> None:
        """Write the input values of layer `index`, text by text as they are computed.

        layer: the layer that computes them, number `index` - 1.
        """
        shapes = [(len(text) if v.rows is TOKENS else 1, v.cols) for text in texts for v in layer.outputs]
        arrays = (np.ascontiguousarray(array, np.float32) for text in values for array in text)
        tensors = [
            SafeTensor(f"{i}", "F32", shape, lambda: [next(arrays).reshape(-1).view(np.uint8)])
            for i, shape in enumerate(shapes)
        ]
        write_safetensors(self._values(index), tensors)
        for _ in arrays:  # to its end, where the layer's memory is freed
            pass

    def values(self, index: int, count: int) -> StoredValues:
        """Open the input values of layer `index` for `count` texts."""
        return StoredValues(self._values(index) if index else None, count)

    def remove(self) -> None:
        """Remove the work folder. Call this once the model is complete."""
        for path in sorted(self._work.iterdir()):
            path.unlink()
        self._work.rmdir()

    def _layer(self, index: int) -> Path:
        return self._work / f"layer-{index:05}.safetensors"

    def _values(self, index: int) -> Path:
        return self._work / f"values-{index:05}.safetensors"


class StoredValues(Sequence[Values]):
    """The values that a layer receives for each text, mapped from a file. The first layer receives none.

    Close it after use.
    """

    def __init__(self, path: Path | None, count: int) -> None:
        self._file = None if path is None else open_safetensors(path)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Values:  # type: ignore[override]
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._file is None:
            return ()
        slots = len(self._file.tensors) // self._count
        names = [str(i) for i in range(index * slots, (index + 1) * slots)]
        return tuple(self._file.weight(name).dequantize() for name in names)

    def __iter__(self) -> Iterator[Values]:
        return (self[i] for i in range(self._count))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
