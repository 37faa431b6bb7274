"""A model on disk, opened: configuration and weights under checkpoint names, whatever the format."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from octavo import models
from octavo.errors import ModelLoadError
from octavo.loader.gguf import GGUFFile
from octavo.loader.gguf_checks import check_metadata, check_vocabulary
from octavo.loader.gguf_names import ROPE_FACTORS, checkpoint_name
from octavo.loader.json_file import read_json_object
from octavo.loader.model_files import find_model_file, is_gguf
from octavo.loader.safetensors import SafetensorsModel
from octavo.models import Architecture, ModelConfig
from octavo.quantization.packed import Weight

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20
MAX_ROPE_FACTORS = 1 << 12
DENSE_TYPES = ("F32", "F16", "BF16")


class Weights(Mapping[str, Weight]):
    """The weights by checkpoint name, each made when it is asked for, over the mapped file."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        get: Callable[[str], Weight],
        release: Callable[[str], None],
    ) -> None:
        """shapes: those of all weights; get and release: called with the name of one."""
        self.shapes = shapes
        self._get = get
        self._release = release

    def __getitem__(self, name: str) -> Weight:
        if name not in self.shapes:
            raise KeyError(name)
        return self._get(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def release(self, name: str) -> None:
        """Lets the system take the pages of this weight back, once a backend has packed it."""
        self._release(name)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. Close it when its weights are packed."""

    path: Path
    directory: Path
    format: Literal["gguf", "safetensors"]
    architecture: str  # module under `octavo.models`
    config: ModelConfig  # the `Config` of that module
    weights: Weights
    metadata: Mapping[str, object]  # of a GGUF file; else empty
    file: GGUFFile | SafetensorsModel

    def close(self) -> None:
        """Gives the files back. Weights still alive keep theirs mapped. May be called twice."""
        self.file.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a GGUF file (any part of a split one), a safetensors file, or the directory of either.

    Raises ModelLoadError naming file, offset and reason.
    """
    path = find_model_file(path)
    return _open_gguf(path) if is_gguf(path) else _open_safetensors(path)


def warn_unused_weights(checkpoint: Checkpoint, used: Container[str]) -> None:
    """Warns of weights that a graph does not use; what it needs, it has checked itself."""
    _warn_unused(checkpoint.path, [name for name in checkpoint.weights if name not in used])


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUFFile.open(path)
    try:
        check_metadata(path, file.metadata)
        name = str(file.metadata["general.architecture"])
        architecture, module = _architecture(path, name)
        overrides: Mapping[str, str] = getattr(module, "GGUF_NAMES", {})
        gguf_names: dict[str, str] = {}
        unknown = []
        for gguf_name in file.tensors:
            known = checkpoint_name(gguf_name, overrides)
            if known is not None:
                gguf_names[known] = gguf_name
            elif gguf_name not in ROPE_FACTORS:
                unknown.append(gguf_name)
        _warn_unused(path, unknown)
        _check_vectors(file)
        shapes = MappingProxyType({known: file.tensors[g].shape for known, g in gguf_names.items()})
        check_vocabulary(path, file.metadata, shapes)
        # Rotary factors are tensors in GGUF files, but they configure: the model reads them as metadata.
        rope = {g: file.weight(g).dequantize() for g in ROPE_FACTORS if g in file.tensors}
        config = _config(path, lambda: module.Config.from_gguf({**file.metadata, **rope}, shapes))
    except BaseException:
        file.close()
        raise
    weights = Weights(shapes, lambda n: file.weight(gguf_names[n]), lambda n: file.release(gguf_names[n]))
    return Checkpoint(path, path.parent, "gguf", architecture, config, weights, file.metadata, file)


def _check_vectors(file: GGUFFile) -> None:
    """Norms and biases are plain numbers in every file; a quantized one is a damaged directory."""
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
    stored = {_without_prefix(n): n for n in file.tensors if not n.endswith("rotary_emb.inv_freq")}
    shapes = MappingProxyType({n: file.tensors[s].shape for n, s in stored.items()})
    weights = Weights(shapes, lambda n: file.weight(stored[n]), lambda n: file.release(stored[n]))
    return Checkpoint(path, path.parent, "safetensors", architecture, config, weights, MappingProxyType({}), file)


def _architecture(path: Path, name: str) -> tuple[str, Architecture]:
    """The module under `octavo.models` for an architecture name of GGUF or config.json, and its own name."""
    known = models.known_architectures()
    if name not in known:
        nearest = difflib.get_close_matches(name[:80], known, 1, 0.0)
        raise ModelLoadError(
            f"{path}: architecture {name!r:.80} is not supported; nearest of the supported ones: "
            f"{', '.join(nearest) or 'none'} (all: {', '.join(sorted(known))})"
        )
    return known[name], models.load_architecture(name)


def _check_quantization(path: Path, config_json: Mapping[str, object]) -> None:
    """Refuses quantized checkpoints by the name of their method; their weights would only look missing."""
    section = config_json.get("quantization_config")
    if section is not None:
        method = section.get("quant_method") if isinstance(section, dict) else section
        raise ModelLoadError(
            f"{path}: quantization_config names the method {method!r:.40}, which is not supported; take the "
            "unquantized checkpoint or a GGUF file"
        )


def _config(path: Path, read: Callable[[], ModelConfig]) -> ModelConfig:
    """The configuration that `read` makes; whatever it stumbles over names the file."""
    try:
        return read()
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: the configuration makes no sense: {error!r:.200}") from error


def _without_prefix(name: str) -> str:
    for prefix in ("language_model.model.", "model.language_model.", "language_model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _warn_unused(path: Path, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        logger.warning("%s: %d tensors are not used: %s", path, len(names), shown)
