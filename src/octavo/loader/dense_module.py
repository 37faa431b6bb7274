"""Dense modules of sentence-transformers: linear layers with activations, applied to pooled vectors.

Source: the class Dense of sentence-transformers. Each has a folder with `config.json` and `model.safetensors`.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.batch import Float32
from octavo.errors import ModelLoadError
from octavo.loader.json_file import read_json_object
from octavo.loader.safetensors import open_safetensors
from octavo.models._reading import MAX_WIDTH, ConfigReader

_MAX_BYTES = 1 << 20
_ACTIVATIONS = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_CLASS = re.compile(r"torch\.nn\.(?:modules\.\w+\.)?(?P<name>\w+)", re.ASCII)
# Values of keys that would change the meaning of the module.
_ONLY: dict[str, object] = {"use_residual": False}
_NAMES = ("module_input_name", "module_output_name")  # names of its input and output
_KEYS = {"in_features", "out_features", "bias", "activation_function", *_NAMES, *_ONLY}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A layer that computes activation(weight @ x + bias).

    activation: a name in ACTIVATIONS of the graph's operations, or None for no activation.
    """

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: str | None

    def load(self) -> tuple[Float32, Float32]:
        """Return the weight [out_features, in_features] and the bias [out_features].

        Raises ModelLoadError naming the file.
        """
        path = self.folder / "model.safetensors"
        if not path.is_file():
            raise ModelLoadError(
                f"{path}: no such file. If you trust the model, write it with "
                "SentenceTransformer(MODEL).save(DIRECTORY) of sentence-transformers"
            )
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (self.out_features, self.in_features)}
        if self.has_bias:
            shapes["linear.bias"] = (self.out_features,)
        with closing(open_safetensors(path)) as file:
            found = {name: info.shape for name, info in file.tensors.items()}
            if found != shapes:
                raise ModelLoadError(f"{path}: has the tensors {found!r:.200}, but config.json asks for {shapes}")
            weight = np.array(file.weight("linear.weight").dequantize(), np.float32)
            bias = file.weight("linear.bias").dequantize() if self.has_bias else np.zeros(self.out_features)
            return weight, np.array(bias, np.float32)


def read_dense(folder: Path, *, of_tokens: bool = False) -> DenseModule:
    """Read a dense module's `config.json`.

    of_tokens: the module changes the vectors of tokens instead of the pooled vector of a text.

    Raises ModelLoadError naming the file and the key.
    """
    path = folder / "config.json"
    values = read_json_object(path, _MAX_BYTES)
    reader = ConfigReader(values)
    try:
        for key in sorted(values.keys() - _KEYS):
            raise reader.error(key[:80], values[key], f"not supported; the keys are {', '.join(sorted(_KEYS))}")
        name = "token_embeddings" if of_tokens else "sentence_embedding"
        for key, only in {**dict.fromkeys(_NAMES, name), **_ONLY}.items():
            if values.get(key) not in (None, only):
                raise reader.error(key, values[key], f"must be {only}")
        return DenseModule(
            folder,
            reader.integer("in_features", high=MAX_WIDTH),
            reader.integer("out_features", high=MAX_WIDTH),
            reader.flag("bias", True),
            _activation(reader),
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _activation(reader: ConfigReader) -> str | None:
    name = reader.values.get("activation_function", "torch.nn.Tanh")  # null names none
    found = _CLASS.fullmatch(name) if isinstance(name, str) else None
    if found is None or found["name"] not in _ACTIVATIONS:
        known = ", ".join(f"torch.nn.{each}" for each in _ACTIVATIONS)
        raise reader.error("activation_function", name, f"must be one of {known}")
    return _ACTIVATIONS[found["name"]]
