"""Opens the vision part of a model: the image encoder, its weights and its processor."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo import env
from octavo.batch import Array
from octavo.errors import GraphError, ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.patches import MERGED
from octavo.loader.checkpoint import MAX_CONFIG_BYTES, Checkpoint, errors_of
from octavo.loader.gguf import open_gguf
from octavo.loader.json_file import read_json_object
from octavo.loader.model_file import mmproj_files
from octavo.loader.tensor_files import TensorFiles, Weights
from octavo.loader.tensor_names import renamed
from octavo.loader.transforms import transformed
from octavo.media.processor import ImageProcessor, read_processor
from octavo.media.settings import VIDEO_FILE
from octavo.models._reading import ConfigReader
from octavo.models.towers import Tower, tower_of, tower_of_projector
from octavo.models.towers._tower import TowerConfig, projector_type

logger = logging.getLogger(__name__)

_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
_PROBE_SIDE = 64  # side in pixels of a test picture, laid out to check that all parts fit together
_MOST_PATCHES = 1 << 16  # per tile; published models have up to 10,080


@dataclass(frozen=True, slots=True)
class VisionPart:
    """The vision part of a model.

    tensors: names of its tensors in the text model's file. They are not weights of the text model.
    """

    tower: Tower
    config: TowerConfig
    weights: Weights
    processor: ImageProcessor
    tensors: frozenset[str]
    path: Path  # path of its file
    file: TensorFiles | None = None  # a separate file

    def close(self) -> None:
        """Close the vision file, if it is a separate one. Weights still in use keep it mapped."""
        if self.file is not None:
            self.file.close()

    def graph(self) -> Graph:
        """Return the encoder's unoptimized graph. Raises GraphError naming operation, shapes and layer."""
        g = Graph(self.weights.shapes)
        g.output = self.tower.build(g, self.config)
        return g

    def tables(self) -> Mapping[str, Array]:
        """Return the weights that the host reads, as arrays by name."""
        return {name: self.weights[name].dequantize() for name in self.config.host_tables}


def open_vision(checkpoint: Checkpoint, mmproj: str | None = None, max_tokens: int | None = None) -> VisionPart | None:
    """Return the vision part of a checkpoint, or None if it has none or one of an unknown kind.

    mmproj: the vision file of a GGUF model; None means the only vision file next to the model. If that file does not
        fit, perhaps because it belongs to another model, a warning is logged and the model reads only text.
    max_tokens: maximum number of tokens per image, for model families that can scale images down.

    Raises ModelLoadError naming file and key.
    """
    if checkpoint.format == "safetensors":
        if mmproj is not None:
            raise ModelLoadError(
                f"mmproj {mmproj!r:.200} is for GGUF models; {checkpoint.path} has its image encoder, if any, in its "
                "own files: leave mmproj out"
            )
        return _from_safetensors(checkpoint, max_tokens)
    if mmproj is not None:
        return _from_mmproj(checkpoint, env.user_path(mmproj), max_tokens)
    beside = mmproj_files(checkpoint.path)
    if not beside:
        return None
    try:
        if len(beside) > 1:
            names = ", ".join(path.name for path in beside)
            raise ModelLoadError(f"{len(beside)} files may be its vision encoder: name one with --mmproj: {names}")
        return _from_mmproj(checkpoint, beside[0], max_tokens)
    except ModelLoadError as error:
        logger.warning("%s reads text only: %s", checkpoint.path, error)
        return None


def _from_mmproj(checkpoint: Checkpoint, path: Path, max_tokens: int | None) -> VisionPart:
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such file, but mmproj names it; --mmproj none loads the model without it")
    file = open_gguf(path)
    try:
        with errors_of(path):
            projector = projector_type(file.metadata)
            tower = tower_of_projector(projector)
            if tower is None:
                raise ModelLoadError(f"clip.projector_type is {projector!r:.80}, but Octavo does not support it")
            names = {tensor: _gguf_name(tensor, tower.WEIGHTS.names) for tensor in file.tensors}
            stored = {name: file.source(tensor) for tensor, name in names.items() if name is not None}
            shapes = {name: source.shape for name, source in stored.items()}
            text = ConfigReader(checkpoint.file.metadata, f"{checkpoint.file.metadata['general.architecture']}.")
            config = tower.Config.from_gguf(ConfigReader(file.metadata, "clip.vision."), text, shapes)
            width = checkpoint.config.hidden_size * (1 + config.sight.num_added)
            if config.output_width != width:
                raise ModelLoadError(
                    f"the encoder makes rows of {config.output_width} columns, but {checkpoint.path.name} takes "
                    f"{width}: the two files do not belong together"
                )
            weights = Weights(transformed(stored, tower.WEIGHTS.transforms, config, "gguf"), file)
            config = config.with_numbers(_numbers(weights))
            processor = read_processor(*tower.Config.processor_settings(ConfigReader(file.metadata, "clip.vision.")))
            part = VisionPart(tower, config, weights, _limited(processor, max_tokens), frozenset(), path, file)
            _check(part)
            return part
    except BaseException:
        file.close()
        raise


def _limited(processor: ImageProcessor, max_tokens: int | None) -> ImageProcessor:
    return processor if max_tokens is None else processor.limited(max_tokens)


def _check(part: VisionPart) -> None:
    """Raise ModelLoadError if weights, configuration and processor do not fit together.

    A wrong array may raise ValueError instead. Without this check, the first image would end the engine. No weight is
    read.
    """
    try:
        inputs = part.graph().inputs
    except GraphError as error:
        raise ModelLoadError(f"the image encoder: {error}") from error
    config, processor, shapes = part.config, part.processor, part.weights.shapes
    if missing := [name for name in config.host_tables if name not in shapes]:
        raise ModelLoadError(f"the image encoder: weight {missing[0]!r} is missing")
    tile = processor.layout(_PROBE_SIDE, _PROBE_SIDE).tiles[0]
    rows, cols = tile.grid_rows, tile.grid_cols
    if rows * cols > _MOST_PATCHES:
        raise ModelLoadError(f"the image encoder: a tile has {rows} x {cols} patches; the limit is {_MOST_PATCHES}")
    further = config.inputs([tile], {name: np.broadcast_to(np.float32(0), shapes[name]) for name in config.host_tables})
    block = np.zeros((processor.patch_size * processor.merge_size,) * 2 + (3,), np.uint8)
    patches = (rows * cols, processor.rows((block,)).shape[1])
    found = [patches, *(array.shape for array in further.inputs), tile.num_tokens]
    counts = {name: domain.count for name, domain in further.domains.items()}
    wanted = [*((counts[value.rows.name], value.cols) for value in inputs), counts[MERGED.name]]
    if found != wanted:
        raise ModelLoadError(
            f"the image encoder takes patches, tables and tokens of shapes {wanted}; a tile has {found}"
        )


def _gguf_name(tensor: str, names: Mapping[str, str]) -> str | None:
    """Return the tensor's name in the graph, or None if nothing uses the tensor.

    A number that is not a layer's number, as in `mm.0`, belongs to the stem.
    """
    stem, _, kind = tensor.rpartition(".")
    return f"{names[stem]}.{kind}" if stem in names else renamed(tensor, names)


def _from_safetensors(checkpoint: Checkpoint, max_tokens: int | None) -> VisionPart | None:
    folder, file = checkpoint.path.parent, checkpoint.file
    path = folder / "config.json"
    config_json = read_json_object(path, MAX_CONFIG_BYTES)
    tower = tower_of(config_json.get("model_type"))
    if tower is None or not isinstance(config_json.get("vision_config"), Mapping):
        return None
    found = _named(tower, file.tensors)
    if not found:
        return None
    with errors_of(path):
        config = tower.Config.from_hf(ConfigReader(config_json))
        stored = {name: file.source(tensor) for tensor, name in found.items()}
        weights = Weights(transformed(stored, tower.WEIGHTS.transforms, config, "safetensors"), file)
        config = config.with_numbers(_numbers(weights))
    with errors_of(folder):  # its errors name one of several files
        processor = read_processor(str(config_json["model_type"]), config_json, _preprocessor(folder))
        processor = _limited(processor, max_tokens)
    part = VisionPart(tower, config, weights, processor, frozenset(found), checkpoint.path)
    with errors_of(checkpoint.path):
        _check(part)
    return part


def _numbers(weights: Weights) -> dict[str, float]:
    """Return the values of weights that are a single number."""
    names = [name for name, shape in weights.shapes.items() if math.prod(shape) == 1]
    return {name: float(weights[name].dequantize().reshape(-1)[0]) for name in names}


def _named(tower: Tower, tensors: Mapping[str, object]) -> dict[str, str]:
    """Return the graph's name for each of the encoder's tensors, by its name in the file."""
    found = {}
    for tensor in tensors:
        prefix = next((prefix for prefix in tower.WEIGHTS.prefixes if tensor.startswith(prefix)), None)
        if prefix is not None:
            name = tensor.removeprefix(prefix)
            found[tensor] = renamed(name, tower.WEIGHTS.names) or name
    return found


def _preprocessor(folder: Path) -> dict[str, Any]:
    """Return the image processor's settings. Those for videos, if any, are under `video`."""
    videos = _settings(folder, VIDEO_FILE, "video_processor")
    return _settings(folder, _PREPROCESSOR, "image_processor") | ({"video": videos} if videos else {})


def _settings(folder: Path, name: str, section: str) -> dict[str, Any]:
    """Return the settings of a processor, from its own file or, in newer models, from a section of another file."""
    found: dict[str, Any] = {}
    if (folder / name).is_file():
        found = dict(read_json_object(folder / name, MAX_CONFIG_BYTES))
    if (folder / _PROCESSOR).is_file():
        stored = read_json_object(folder / _PROCESSOR, MAX_CONFIG_BYTES).get(section)
        if stored is not None and not isinstance(stored, Mapping):
            raise ModelLoadError(f"{folder / _PROCESSOR}: {section} is {stored!r:.80}; it must be an object")
        found |= stored or {}
    return found
