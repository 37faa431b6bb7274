"""An opened model: configuration and weights under checkpoint names, for either format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from octavo import models
from octavo.errors import ModelLoadError
from octavo.loader.gguf import GGUFFile
from octavo.loader.gguf_checks import check_metadata, check_vocabulary
from octavo.loader.json_file import read_json_object
from octavo.loader.model_files import find_model_file, is_gguf
from octavo.loader.safetensors import SafetensorsModel
from octavo.loader.tensor_files import Source, TensorFiles, Weights
from octavo.loader.tensor_names import GGUF_STEMS, ROPE_FACTORS, renamed
from octavo.loader.transforms import transformed
from octavo.models import Architecture, weight_table
from octavo.models._decoder import ModelConfig
from octavo.models._weights import FileFormat, WeightTable
from octavo.quantization.packed import DENSE_TYPES

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CONFIG_BYTES = 1 << 20
MAX_ROPE_FACTORS = 1 << 12


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. Close it when its weights are packed."""

    path: Path
    directory: Path
    format: FileFormat
    architecture: str  # module under `octavo.models`
    config: ModelConfig  # the `Config` of that module
    weights: Weights
    metadata: Mapping[str, object]  # of a GGUF file; else empty
    file: TensorFiles

    def close(self) -> None:
        """Closes the files. Weights that are still alive keep theirs mapped. May be called twice."""
        self.file.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file (any part of a split one), a safetensors file, or the directory of either.

    Raises ModelLoadError naming file, offset and reason.
    """
    path = find_model_file(path)
    return _open_gguf(path) if is_gguf(path) else _open_safetensors(path)


def warn_unused_weights(checkpoint: Checkpoint, used: Container[str]) -> None:
    """Warns of weights that a graph does not use. The graph itself has checked those that it needs."""
    _warn_unused(checkpoint.path, [name for name in checkpoint.weights if name not in used])


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile.open(path)
    try:
        check_metadata(path, file.metadata)
        name = str(file.metadata["general.architecture"])
        architecture, module = _architecture(path, name)
        stems = {**GGUF_STEMS, **weight_table(module).names}
        names = {stored: renamed(stored, stems) for stored in file.tensors if stored not in ROPE_FACTORS}
        _warn_unused(path, [stored for stored, name in names.items() if name is None])
        _check_vectors(file)
        stored = _stored(file, {stored: name for stored, name in names.items() if name is not None})
        shapes = MappingProxyType({name: source.shape for name, source in stored.items()})
        check_vocabulary(path, file.metadata, shapes)
        # Rotary factors are tensors in GGUF files, but they configure: the model reads them as metadata.
        rope = {g: file.weight(g).dequantize() for g in ROPE_FACTORS if g in file.tensors}
        config = _config(path, lambda: module.Config.from_gguf({**file.metadata, **rope}, shapes))
        weights = _weights(path, module, config, stored, file)
    except BaseException:
        file.close()
        raise
    return Checkpoint(path, path.parent, "gguf", architecture, config, weights, file.metadata, file)


def _check_vectors(file: GGUFFile) -> None:
    """Refuses quantized norms and biases: they are plain numbers in every valid file."""
    for info in file.tensors.values():
        if info.name in ROPE_FACTORS and (len(info.shape) != 1 or info.shape[0] > MAX_ROPE_FACTORS):
            raise ModelLoadError(f"{info.file}: offset {info.offset}: tensor {info.name!r} has the shape {info.shape}")
        if len(info.shape) == 1 and info.type_name not in DENSE_TYPES:
            raise ModelLoadError(
                f"{info.file}: offset {info.offset}: tensor {info.name!r} of shape {list(info.shape)} has type "
                f"{info.type_name}; one of {', '.join(DENSE_TYPES)} is needed"
            )


def _open_safetensors(path: Path) -> Checkpoint:
    config_path = path.parent / "config.json"
    config_json = read_json_object(config_path, MAX_CONFIG_BYTES)
    name = config_json.get("model_type")
    if not isinstance(name, str):
        raise ModelLoadError(f"{config_path}: model_type is {name!r:.80}; it must name an architecture")
    architecture, module = _architecture(config_path, name)
    _check_quantization(config_path, config_json)
    config = _config(config_path, lambda: module.Config.from_hf(config_json))
    file = SafetensorsModel.open(path)
    try:
        table = weight_table(module)
        names = {n: _checkpoint_name(n, table) for n in file.tensors if not n.endswith("rotary_emb.inv_freq")}
        weights = _weights(path, module, config, _stored(file, names), file)
    except BaseException:
        file.close()
        raise
    return Checkpoint(path, path.parent, "safetensors", architecture, config, weights, MappingProxyType({}), file)


def _architecture(path: Path, name: str) -> tuple[str, Architecture]:
    """The module under `octavo.models` for an architecture name of GGUF or config.json, and its own name."""
    module = _named(path, lambda: models.load_architecture(name))
    return models.known_architectures()[name], module


def _check_quantization(path: Path, config_json: Mapping[str, object]) -> None:
    """Refuses quantized checkpoints by the name of their method; otherwise their weights would seem to be missing."""
    section = config_json.get("quantization_config")
    if section is not None:
        method = section.get("quant_method") if isinstance(section, dict) else section
        raise ModelLoadError(
            f"{path}: quantization_config names the method {method!r:.40}, which is not supported; take the "
            "unquantized checkpoint or a GGUF file"
        )


def _config(path: Path, read: Callable[[], ModelConfig]) -> ModelConfig:
    """The configuration from `read`, with the file's name added to its errors."""
    try:
        return _named(path, read)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: the configuration makes no sense: {error!r:.200}") from error


def _named(path: Path, read: Callable[[], T]) -> T:
    """The result of `read`, with the file's name added to its errors."""
    try:
        return read()
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _checkpoint_name(name: str, table: WeightTable) -> str:
    """That of a safetensors file without its prefix, and as the architecture's table has it."""
    prefix = next((prefix for prefix in table.prefixes if name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    return renamed(name, table.names) or name


def _stored(file: TensorFiles, names: Mapping[str, str]) -> dict[str, Source]:
    """The tensors of a file as they are. names: from those in the file to those of the checkpoint."""
    return {name: file.source(stored) for stored, name in names.items()}


def _weights(
    path: Path,
    module: Architecture,
    config: ModelConfig,
    stored: Mapping[str, Source],
    file: TensorFiles,
) -> Weights:
    file_format: FileFormat = "gguf" if isinstance(file, GGUFFile) else "safetensors"
    transforms = weight_table(module).transforms
    return Weights(_named(path, lambda: transformed(stored, transforms, config, file_format)), file)


def _warn_unused(path: Path, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        logger.warning("%s: %d tensors are not used: %s", path, len(names), shown)
