"""The quantized checkpoint formats of Hugging Face, each in its own module.

A module here has `METHODS`, its names in the configuration, and `Format`, the class that builds canonical weights from
the stored tensors of one layer. The stored tensors decide which layers are quantized; all other layers stay plain.
Files with a leading underscore contain shared code.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Protocol

from octavo.errors import ModelLoadError
from octavo.models._reading import ConfigReader
from octavo.quantization.checkpoints._layer import Layer, Lowered, StoredTensors, layers

_CODES = ("qweight", "weight_packed", "W_q", "weight")  # tensors of codes


class CheckpointFormat(Protocol):
    """The interface of a format's class. An instance is created from the quantization section of the configuration."""

    def weights(self, layer: Layer) -> Iterator[Lowered]:
        """Yield the quantized weights of this layer. Raises ModelLoadError naming the key or tensor."""


@cache
def known_methods() -> Mapping[str, ModuleType]:
    """Return the modules of all methods, by the methods' names."""
    names = [name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return {method: module for module in modules for method in module.METHODS}


def lowered(config: ConfigReader, file: StoredTensors) -> Iterator[Lowered]:
    """Yield all quantized weights of a file, without reading them. Raises ModelLoadError naming the key or tensor."""
    names = ", ".join(sorted(known_methods()))
    supported = f"supported are {names}; use a checkpoint of one of these, the unquantized one or a GGUF file"
    if not config.has("quant_method"):
        raise ModelLoadError(f"{config.prefix}quant_method is missing; {supported}")
    method = config.text("quant_method")
    if method not in known_methods():
        raise config.error("quant_method", method, f"is not supported; {supported}")
    made: CheckpointFormat = known_methods()[method].Format(config)
    layer: Layer | None = None
    try:
        for layer in layers(file):
            yield from made.weights(layer)
    except ValueError as error:  # sizes that no canonical weight has
        raise ModelLoadError(f"layer {layer and layer.name!r:.80}: {error}") from error


def check_unscaled(file: StoredTensors, made: Mapping[str, object], config: ConfigReader | None) -> None:
    """Raise ModelLoadError if codes were not turned into a weight, because they would be taken for plain numbers.

    made: names of the quantized weights.
    config: None if the checkpoint does not specify its quantization. In that case, eight-bit floats without any scales
        are plain numbers.
    """
    for layer in layers(file):
        part = next((part for part in _CODES if part in layer.parts), None)
        if part is None or f"{layer.name}.weight" in made or not layer.type_name(part).startswith(("I", "U", "F8")):
            continue
        others = ", ".join(sorted(layer.parts.keys() - {part, "bias"}))
        if config is None and layer.type_name(part).startswith("F8") and "scale" not in others:
            continue
        missing = "no quantization_config explains it; use the complete checkpoint"
        if config is not None:
            missing = f"the scales of quant_method {config.text('quant_method')!r} are missing"
        found = f"this layer also has {others:.100}" if others else "this layer has nothing else"
        raise layer.error(part, f"has the type {layer.type_name(part)}, but {missing} ({found})")
