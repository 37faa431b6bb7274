"""Converts a safetensors checkpoint to the tensors and metadata of a GGUF file, on demand."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from octavo.compress.forms import gguf_form
from octavo.compress.forms._gguf import Keys, Stored
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import MAX_CONFIG_BYTES, Checkpoint
from octavo.loader.generation_config import FILE_NAME, SAMPLING_KEYS, sampling_defaults
from octavo.loader.gguf_writer import MetadataValue
from octavo.loader.json_file import read_json_object
from octavo.loader.tensor_files import Source
from octavo.loader.tensor_names import GGUF_STEMS, ROPE_FACTORS, TensorName, renamed
from octavo.loader.transforms import restored, transformed
from octavo.models import build_graph, load_architecture, text_part, weight_table
from octavo.models._decoder import ModelConfig
from octavo.models._reading import ConfigReader
from octavo.models._rope import STILL
from octavo.models._weights import Transform
from octavo.models._wrapped import text_section
from octavo.quantization.packed import DENSE_TYPES, DenseWeight
from octavo.tokenizer.gguf_export import gguf_tokenizer

logger = logging.getLogger(__name__)

# Tables of weights name the tensors of GGUF files and of checkpoints; by these one tells the former.
_GGUF_PREFIXES = ("blk.", "position_embd", "token_embd", "per_layer_", "altup_")
_UNPREFIXED = (*ROPE_FACTORS, "xielu.")  # keys without the architecture's name before them
_TOLERANCE = 1e-6  # relative: GGUF files have float32 numbers


def gguf_form_of(checkpoint: Checkpoint) -> tuple[dict[str, MetadataValue], dict[str, Source]]:
    """Return metadata, and tensors by GGUF name in the order of the layers.

    The configuration that a reader of the metadata gets is compared with the checkpoint's, field by field.

    Raises ModelLoadError for an architecture without a GGUF form; for a field, token or tensor that a GGUF file cannot
    express; and for a quantized checkpoint.
    """
    form, path = gguf_form(checkpoint.architecture), checkpoint.path
    stored, keys = _stored_form(checkpoint)
    checkpoint, weights, name = dataclasses.replace(checkpoint, config=stored.config), stored.weights, stored.name
    metadata: dict[str, MetadataValue] = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": model_name(path),
        **{key: value for key, value in keys.items() if key not in ROPE_FACTORS},
        **_sampling(checkpoint),
        **gguf_tokenizer(path.parent, weights["embed_tokens.weight"].shape[0]),
    }
    tensors = tensors_in_gguf(checkpoint, name, weights, form.stems_of(checkpoint.config), stored.steps)
    return metadata, _factors(keys) | tensors


def text_reader(checkpoint: Checkpoint) -> ConfigReader:
    """Return a reader of the text model's configuration as it would be in the checkpoint's GGUF file.

    Raises the same errors as `gguf_form_of`.
    """
    stored, keys = _stored_form(checkpoint)
    return ConfigReader(keys, f"{stored.name}.")


def _stored_form(checkpoint: Checkpoint) -> tuple[Stored, Keys]:
    """Return the model as its file stores it, and the keys of its configuration, after checking them."""
    path, form = checkpoint.path, gguf_form(checkpoint.architecture)
    if checkpoint.quantization is not None:
        raise ModelLoadError(f"{path} is quantized by {checkpoint.quantization}; use a checkpoint with float weights")
    reader = ConfigReader(read_json_object(path.parent / "config.json", MAX_CONFIG_BYTES))
    text = text_section(text_part(reader))
    stored = form.stored_of(checkpoint.config, text, _weights(checkpoint, is_part=bool(text.prefix)))
    keys = _prefixed(stored.name, {**form.keys(stored.config, text), **form.whole(reader)})
    shapes = {name: source.shape for name, source in stored.weights.items()}
    _check_config(dataclasses.replace(checkpoint, config=stored.config), keys, stored.name, shapes)
    return stored, keys


def model_name(path: Path) -> str:
    """Return the name of the folder or, in the hub's cache, of the repository."""
    hub = (part.split("--")[-1] for part in path.parts if part.startswith("models--"))
    return next(hub, path.parent.resolve().name)


def _prefixed(name: str, keys: Keys) -> Keys:
    return {key if key.startswith(_UNPREFIXED) else f"{name}.{key}": value for key, value in keys.items()}


def _weights(checkpoint: Checkpoint, *, is_part: bool) -> dict[str, Source]:
    """Return the weights of the model, including some that no graph uses.

    For example, some layers of Gemma 3n share the keys and values of other layers, but their own key and value weights
    are stored too, and llama.cpp requires them.

    is_part: the model is multimodal; take only the layers that read text.
    """
    found = {name: checkpoint.weights.info(name) for name in checkpoint.weights}
    further = [name for name in found if is_part or _is_further(name, checkpoint.config.num_layers)]
    if further:
        graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
        used = {parameter.name for parameter in graph.parameters}
        last = checkpoint.config.num_layers
        if left_out := [name for name in further if name not in used and not _is_of_layer(name, last)]:
            shown, kind = ", ".join(left_out[:3]), "do not read text" if is_part else "predict further tokens"
            logger.info("%s: %d tensors that %s are left out: %s", checkpoint.path, len(left_out), kind, shown)
        found = {name: source for name, source in found.items() if name not in left_out}
    for source in found.values():
        if source.type_name not in DENSE_TYPES:
            known = ", ".join(DENSE_TYPES)
            raise ModelLoadError(
                f"{checkpoint.path}: tensor {source.tensors[0]!r:.80} is {source.type_name}; it must be {known}"
            )
    return found


def _is_of_layer(name: str, num_layers: int) -> bool:
    stem = TensorName.parse(name)
    return stem.stem.startswith("layers.*.") and stem.numbers[0] < num_layers


def _is_further(name: str, num_layers: int) -> bool:
    """Return True for tensors of multi-token prediction: in layers after the last, or under their own name."""
    stem = TensorName.parse(name)
    return stem.stem.startswith("mtp") or (stem.stem.startswith("layers.*.") and stem.numbers[0] >= num_layers)


def tensors_in_gguf(
    checkpoint: Checkpoint,
    name: str,
    weights: Mapping[str, Source],
    own: Mapping[str, str] | None = None,
    steps: Sequence[Transform] = (),
) -> dict[str, Source]:
    """Return the tensors by GGUF name: the embedding, the layers, and what comes after them.

    name: the architecture's GGUF name.
    own: the file's stem for each graph stem for which the weight table has several, as in `GGUFForm.stems`.
    steps: transforms of the tensors, under checkpoint names.
    """
    table = weight_table(load_architecture(name))
    known = {**GGUF_STEMS, **table.names}
    stems = {stem: name for name, stem in known.items() if _is_gguf_stem(name)} | dict(own or {})
    found = {}
    tensors = restored(weights, table.transforms, checkpoint.config)
    for name, source in transformed(tensors, steps, checkpoint.config, "gguf").items():
        if (new := renamed(name, stems)) is None:
            raise ModelLoadError(f"{checkpoint.path}: tensor {source.tensors[0]!r:.80} has no name in GGUF files")
        found[new] = float_vector(source)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def float_vector(source: Source) -> Source:
    """Convert a vector to float32, as GGUF files store it, whatever the checkpoint's type."""
    if len(source.shape) != 1 or source.type_name == "F32":
        return source
    return dataclasses.replace(source, type_name="F32", make=lambda: DenseWeight(source.make().dequantize()))


def _is_gguf_stem(name: str) -> bool:
    return name.startswith(_GGUF_PREFIXES) or name in GGUF_STEMS


def _order(name: str) -> tuple[float, str]:
    numbers = TensorName.parse(name).numbers
    return (numbers[0] if numbers else -1 if name.startswith("token_embd") else math.inf, name)


def _factors(keys: Keys) -> dict[str, Source]:
    """Return the tensors of rotary factors among the keys."""
    found = {}
    for name in ROPE_FACTORS:
        if name in keys:
            weight = DenseWeight(np.asarray(keys[name], np.float32))
            found[name] = Source(weight.type_name, weight.shape, weight.nbytes, (), lambda weight=weight: weight)  # type: ignore[misc]
    return found


def _sampling(checkpoint: Checkpoint) -> dict[str, MetadataValue]:
    """Convert generation_config.json to `general.sampling.*`. Raises ModelLoadError for a value without a key."""
    path = checkpoint.path.parent / FILE_NAME
    if not path.is_file():
        return {}
    keys: dict[str, MetadataValue] = {}
    for name, value in sampling_defaults(checkpoint, str(path)).numbers.items():
        key = SAMPLING_KEYS[name][1]
        if key is not None:
            keys[f"general.sampling.{key}"] = np.int32(value) if key == "top_k" else float(value)
        elif value != 1.0:
            raise ModelLoadError(f"{path}: GGUF files have no key for {name}, {value}")
    return keys


def _check_config(checkpoint: Checkpoint, metadata: Keys, name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a reader of the file gets the same configuration.

    Raises ModelLoadError naming the fields that differ.
    """
    read: ModelConfig = load_architecture(name).Config.from_gguf(ConfigReader(metadata, f"{name}."), shapes)
    if different := list(differences(checkpoint.config, read, "")):
        raise ModelLoadError(f"{checkpoint.path}: GGUF files cannot express this model's {', '.join(different[:5])}")


def differences(a: object, b: object, name: str) -> Iterator[str]:
    """Yield the names of fields with different values."""
    if dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b):
        # A field that the other architecture lacks must have its default; one that counts only at load is not compared.
        for field in dataclasses.fields(a):
            if not field.compare:
                continue
            other = getattr(b, field.name, field.default)
            yield from differences(getattr(a, field.name), other, f"{name}.{field.name}".strip("."))
    elif not _is_equal(a, b):
        yield name


def _is_equal(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=2 / STILL)
    return a == b
