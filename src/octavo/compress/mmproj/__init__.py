"""Writes the image encoder of a safetensors checkpoint as llama.cpp's mmproj file.

Each module defines `MMPROJ`, the form of a family, and has the name of the family's file in `octavo.models.towers`.
Files with a leading underscore hold shared parts.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

from octavo.compress.forms._gguf import Sources
from octavo.compress.mmproj._form import PREFIX, MmprojForm, shared_keys
from octavo.compress.quantize import TypeChoice
from octavo.compress.source import SourceModel, as_source
from octavo.compress.to_gguf import differences, float_vector, model_name, text_reader
from octavo.errors import ModelLoadError
from octavo.loader import source_changes
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.gguf_writer import MetadataValue
from octavo.loader.tensor_names import renamed
from octavo.loader.transforms import restored
from octavo.loader.vision import VisionPart, open_vision
from octavo.media.processor import read_processor
from octavo.models._reading import ConfigReader
from octavo.models.towers import Tower, tower_name
from octavo.quantization.packed import DENSE_TYPES

logger = logging.getLogger(__name__)

_GGUF_PREFIXES = ("v.", "mm.")  # in mmproj files; names in checkpoints begin differently
# llama.cpp adds learned places to float32 values, and convolves only with float32 and float16 kernels.
_PLACES, _KERNELS = ("v.position_embd.", "v.class_embd"), ("v.patch_embd.", "mm.patch_merger.")


@contextmanager
def open_mmproj_source(path: Path) -> Iterator[SourceModel]:
    """Open a safetensors checkpoint as the mmproj file of its image encoder.

    Raises ModelLoadError if Octavo does not know the encoder, or if such a file cannot express it.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        if checkpoint.format != "safetensors":
            raise ModelLoadError(f"{checkpoint.path}: an mmproj file is made from a safetensors checkpoint; name one")
        part = open_vision(checkpoint)
        if part is None:
            raise ModelLoadError(f"{checkpoint.path} has no image encoder that Octavo knows")
        metadata, tensors = _mmproj_form_of(checkpoint, part)
        yield as_source(checkpoint.path, metadata, checkpoint.file, tensors)


def choose_float_types(model: SourceModel, float_type: str) -> list[TypeChoice]:
    """Return the type of each tensor in an mmproj file with matrices of `float_type`."""
    return [TypeChoice(tensor, _type_of(tensor.name, tensor.shape, float_type)) for tensor in model.tensors]


def _type_of(name: str, shape: Sequence[int], float_type: str) -> str:
    if len(shape) < 2 or name.startswith(_PLACES):
        return "F32"
    return "F32" if name.startswith(_KERNELS) and float_type == "BF16" else float_type


def _mmproj_form_of(checkpoint: Checkpoint, part: VisionPart) -> tuple[dict[str, MetadataValue], Sources]:
    """Return metadata and tensors.

    Raises ModelLoadError if a reader of the file would get a different configuration than the checkpoint's.
    """
    path, form = checkpoint.path, _form(part.tower, checkpoint)
    weights: Sources = {name: part.weights.info(name) for name in part.weights}
    for source in weights.values():
        if source.type_name not in DENSE_TYPES:
            known = ", ".join(DENSE_TYPES)
            raise ModelLoadError(f"{path}: tensor {source.tensors[0]!r:.80} is {source.type_name}; it must be {known}")
    cfg, weights = form.stored(part.config, weights)
    tensors = {**_named(part.tower, restored(weights, part.tower.WEIGHTS.transforms, cfg), path)}
    tensors |= form.further(checkpoint)
    keys = shared_keys(form, cfg, part.processor, tensors)
    keys |= {PREFIX + key: value for key, value in form.keys(cfg, part.processor).items()}
    stored = ConfigReader(keys, PREFIX)
    shapes = {name: source.shape for name, source in weights.items()}
    read = part.tower.Config.from_gguf(stored, text_reader(checkpoint), shapes)
    if different := list(differences(cfg, read, "")):
        raise ModelLoadError(f"{path}: mmproj files cannot express this encoder's {', '.join(different[:5])}")
    processor = read_processor(*part.tower.Config.processor_settings(stored))
    if different := list(differences(part.processor, processor, "")):
        logger.warning("%s: mmproj files cannot express these image settings: %s", path, ", ".join(different))
    metadata: dict[str, MetadataValue] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": model_name(path),
    }
    return {**metadata, **keys}, tensors


def _form(tower: Tower, checkpoint: Checkpoint) -> MmprojForm:
    known = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    if (name := tower_name(tower)) not in known:
        raise ModelLoadError(
            f"{checkpoint.path}: llama.cpp does not support its image encoder, {name}; it supports {', '.join(known)}"
        )
    return cast(MmprojForm, importlib.import_module(f"{__name__}.{name}").MMPROJ)


def _named(tower: Tower, weights: Sources, path: Path) -> Sources:
    """Return the tensors by their names in the file, with vectors and single numbers as float32 vectors."""
    names = {graph: stored for stored, graph in tower.WEIGHTS.names.items() if stored.startswith(_GGUF_PREFIXES)}
    found = {}
    for name, source in weights.items():
        if (new := renamed(name, names)) is None:
            raise ModelLoadError(f"{path}: tensor {source.tensors[0]!r:.80} has no name in mmproj files")
        found[new] = float_vector(source) if source.shape else source_changes.flattened(source)
    return found
