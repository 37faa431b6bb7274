"""An opened model: its configuration, and its weights under checkpoint names, for GGUF and safetensors files alike."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from octavo import models
from octavo.errors import ModelLoadError
from octavo.graph.spans import Sight
from octavo.loader.gguf import open_gguf
from octavo.loader.json_file import read_json_object
from octavo.loader.model_file import find_model_file, is_gguf
from octavo.loader.pooling_config import PoolingConfig, pooling_of_directory, pooling_of_gguf
from octavo.loader.safetensors import open_safetensors
from octavo.loader.tensor_files import Source, TensorFiles, Weights
from octavo.loader.tensor_names import GGUF_STEMS, ROPE_FACTORS, renamed
from octavo.loader.transforms import transformed
from octavo.models import Architecture, weight_table
from octavo.models._decoder import ModelConfig
from octavo.models._heads import head_name
from octavo.models._reading import ConfigReader
from octavo.models._sizes import check_sizes
from octavo.models._weights import FileFormat, WeightTable
from octavo.models._wrapped import text_section
from octavo.quantization.checkpoints import check_unscaled, lowered
from octavo.quantization.packed import DENSE_TYPES, WeightInfo

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20
MAX_ROPE_FACTORS = 1 << 12
# Files next to config.json in which older tools describe a quantized checkpoint, and their methods.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_COMPARED_BYTES = 1 << 24  # compared at a time, per tensor
# Tensors that checkpoints keep besides their weights: rotary frequencies, causal masks, constants of activations,
# position ids, and tensors that are only needed for training with pairs of texts and images.
_BUFFERS = (
    *("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", ".act_fn.beta", ".act_fn.eps"),
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    *(".position_ids", "logit_scale", "logit_bias"),
    # Adapters of tasks are read by `octavo.adapters.tasks`.
    *(".parametrizations.weight.0.lora_A", ".parametrizations.weight.0.lora_B"),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. Close it once its weights are packed."""

    path: Path
    format: FileFormat
    architecture: str  # module under `octavo.models`
    config: ModelConfig  # the `Config` of that module
    weights: Weights
    file: TensorFiles
    stored: Sequence[WeightInfo]  # the weights as stored in the files
    quantization: str | None = None  # method of a quantized safetensors checkpoint
    pooling: PoolingConfig = field(default_factory=PoolingConfig)  # how to compute vectors and scores of texts
    sight: Sight | None = None  # None if it reads only text

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the files."""
        return sum(math.prod(weight.shape) for weight in self.stored)

    @property
    def bits_per_weight(self) -> float:
        """Mean number of bits per parameter, as stored in the files."""
        return 8 * sum(weight.nbytes for weight in self.stored) / max(self.num_parameters, 1)

    def with_weights(self, weights: Weights) -> Checkpoint:
        """Return the same model with other weights, which must have the same names and shapes."""
        return replace(self, weights=weights)

    def with_sight(self, sight: Sight) -> Checkpoint:
        """Return the same model, but with `sight`, so that it accepts rows of images as well."""
        return replace(self, sight=sight)

    def close(self) -> None:
        """Close the files. Weights that are still in use keep their files mapped. May be called twice."""
        self.file.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file (any part of a split one), a safetensors file, or the directory of either.

    Raises ModelLoadError naming file, offset and reason.
    """
    path = find_model_file(path)
    gguf = is_gguf(path)
    file = open_gguf(path) if gguf else open_safetensors(path)
    try:
        return _from_gguf(path, file) if gguf else _from_safetensors(path, file)
    except BaseException:
        file.close()
        raise


def warn_unused_weights(checkpoint: Checkpoint, used: Container[str], others: Iterable[str] = ()) -> None:
    """Warn about weights that a graph does not use.

    The graph itself has already checked that the weights it needs are present.

    others: tensors that belong to another graph of the model.
    """
    table = weight_table(models.load_architecture(checkpoint.architecture))
    known = {checkpoint_name(tensor, table) for tensor in others}
    warn_unused_tensors(
        checkpoint.path, [name for name in checkpoint.weights if name not in used and name not in known]
    )


def _from_gguf(path: Path, file: TensorFiles) -> Checkpoint:
    name = file.metadata.get("general.architecture")
    shapes_alone = {renamed(t, GGUF_STEMS) or t: info.shape for t, info in file.tensors.items()}
    architecture, module = _architecture(
        path,
        "general.architecture",
        name,
        ConfigReader(file.metadata, f"{name}."),
        lambda module, reader: module.Config.from_gguf(reader, shapes_alone),
    )
    table = weight_table(module)
    stems = {**GGUF_STEMS, **table.names}
    names = {tensor: renamed(tensor, stems) for tensor in file.tensors if tensor not in ROPE_FACTORS}
    warn_unused_tensors(path, [tensor for tensor, name in names.items() if name is None])
    _check_vectors(file)
    stored = {name: file.source(tensor) for tensor, name in names.items() if name is not None}
    shapes = MappingProxyType({name: source.shape for name, source in stored.items()})
    # Rotary factors are tensors in GGUF files, but belong to the configuration: the model reads them as metadata.
    rope = {tensor: file.weight(tensor).dequantize() for tensor in ROPE_FACTORS if tensor in file.tensors}
    with errors_of(path):
        prefix = f"{file.metadata['general.architecture']}."
        pooling = pooling_of_gguf(file.metadata, prefix)
        config = module.Config.from_gguf(ConfigReader({**file.metadata, **rope}, prefix), shapes)
        config = config.with_pooling(pooling.pooling)
        weights = Weights(transformed(stored, table.transforms, config, "gguf"), file)
        check_sizes(ConfigReader(file.metadata, prefix), config, weights.shapes)
    return Checkpoint(path, "gguf", architecture, config, weights, file, list(file.tensors.values()), None, pooling)


def _check_vectors(file: TensorFiles) -> None:
    """Refuse quantized norms and biases: they are plain numbers in every valid file."""
    for info in file.tensors.values():
        if info.name in ROPE_FACTORS and (len(info.shape) != 1 or info.shape[0] > MAX_ROPE_FACTORS):
            raise ModelLoadError(f"{info.file}: offset {info.offset}: tensor {info.name!r} has the shape {info.shape}")
        if len(info.shape) == 1 and info.type_name not in DENSE_TYPES:
            raise ModelLoadError(
                f"{info.file}: offset {info.offset}: tensor {info.name!r} of shape {list(info.shape)} has type "
                f"{info.type_name}; one of {', '.join(DENSE_TYPES)} is needed"
            )


def _from_safetensors(path: Path, file: TensorFiles) -> Checkpoint:
    config_path = path.parent / "config.json"
    config_json = read_json_object(config_path, MAX_CONFIG_BYTES)
    outer = ConfigReader(config_json)
    with errors_of(config_path):
        reader = models.text_part(outer)
    architecture, module = _architecture(
        config_path,
        reader.prefix + "model_type",
        reader.values.get(reader.prefix + "model_type"),
        reader,
        lambda module, reader: module.Config.from_hf(reader),
    )
    table = weight_table(module)
    settings_path, section = _quantization(config_path, config_json)
    with errors_of(settings_path):
        packed = {} if section is None else _packed(section, file)
        check_unscaled(file, packed, section)
    with errors_of(config_path):
        config = module.Config.from_hf(reader)
        pooling = pooling_of_directory(path.parent, config_json, config.hidden_size)
        if config.own_pooling is not None:
            pooling = replace(pooling, pooling=config.own_pooling, is_embedder=True)
        config = config.with_pooling(pooling.pooling)
    used = {tensor for source in packed.values() for tensor in source.tensors}
    names = [n for n in file.tensors if n not in used and not n.endswith(_BUFFERS)]
    sources = {name: file.source(name) for name in names} | packed
    stored = {checkpoint_name(head_name(name, config.num_layers), table): source for name, source in sources.items()}
    if _HEAD in stored and getattr(config, "tie_word_embeddings", False):
        # A quantized head is not the embedding, even if the model was made with one for both.
        if _HEAD in packed or not _is_copy(stored[_HEAD], stored.get(_EMBEDDING), file):
            config = replace(config, tie_word_embeddings=False)  # type: ignore[call-arg]
        else:
            del stored[_HEAD]
    elif _HEAD not in stored and outer.has("text_config") and outer.flag("tie_word_embeddings", False):
        # Vision models have this key outside the section about text.
        config = replace(config, tie_word_embeddings=True)  # type: ignore[call-arg]
    with errors_of(path):
        weights = Weights(transformed(stored, table.transforms, config, "safetensors"), file)
    with errors_of(config_path):
        check_sizes(text_section(reader), config, weights.shapes)
    quantization = section.text("quant_method") if section and packed else None
    if section and not packed:
        method = section.text("quant_method")
        logger.warning(
            "%s: quant_method is %r, but no weight is quantized: the weights are used as they are", path, method
        )
    stored_infos = list(sources.values())
    return Checkpoint(path, "safetensors", architecture, config, weights, file, stored_infos, quantization, pooling)


def _is_copy(head: Source, embedding: Source | None, file: TensorFiles) -> bool:
    """Return True if both tensors have the same values.

    If they differ, the caller uses the stored head, whatever config.json specifies.
    """
    if embedding is None or head.shape != embedding.shape:
        return False
    a, b = head.make(), embedding.make()
    step = max(1, _COMPARED_BYTES * head.shape[0] // max(head.nbytes, 1))
    pieces = (slice(begin, begin + step) for begin in range(0, head.shape[0], step))
    is_same = all(np.array_equal(a.rows(piece).dequantize(), b.rows(piece).dequantize()) for piece in pieces)
    for tensor in (*head.tensors, *embedding.tensors):
        file.release(tensor)
    return is_same


def _architecture(
    path: Path, key: str, name: object, reader: ConfigReader, read: Callable[[Architecture, ConfigReader], object]
) -> tuple[str, Architecture]:
    """Return the name of the module under `octavo.models` for an architecture, and the module itself.

    name: the architecture's name in a GGUF file or in config.json.
    """
    if not isinstance(name, str):
        found = "is missing" if name is None else f"is {name!r:.40}"
        raise ModelLoadError(f"{path}: {key} {found}; it must name an architecture from docs/models.md")
    with errors_of(path):
        module = models.find_architecture(name, reader, read)
    return models.architecture_name(name, reader), module


def _quantization(config_path: Path, config_json: Mapping[str, object]) -> tuple[Path, ConfigReader | None]:
    """Return the path and the content of a quantized checkpoint's configuration. The content is None if there is none.

    It is in config.json or, if an older tool wrote the checkpoint, in a separate file.
    """
    key = "quantization_config"
    if config_json.get(key) is not None:
        with errors_of(config_path):
            return config_path, ConfigReader(config_json).section(key)
    for name, method in QUANTIZATION_FILES.items():
        if (beside := config_path.with_name(name)).is_file():
            return beside, ConfigReader({"quant_method": method, **read_json_object(beside, MAX_CONFIG_BYTES)})
    return config_path, None


def _packed(section: ConfigReader, file: TensorFiles) -> dict[str, Source]:
    """Return the quantized weights by their names in the file."""
    settings = zlib.crc32(repr(section.values).encode())
    found: dict[str, Source] = {}
    for weight in lowered(section, file):
        nbytes = sum(file.tensors[tensor].nbytes for tensor in weight.tensors)
        steps = f"{weight.name} {settings}"
        like = weight.like
        found[weight.name] = Source(like.type_name, like.shape, nbytes, weight.tensors, weight.make, steps)
    return found


def config_beside(path: Path) -> Mapping[str, object]:
    """Return the content of config.json in a folder or next to a file. Raises ModelLoadError.

    The result is empty for a GGUF file, or if there is no config.json.
    """
    config_path = (path if path.is_dir() else path.parent) / "config.json"
    if not config_path.is_file() or (path.is_file() and is_gguf(path)):
        return {}
    return read_json_object(config_path, MAX_CONFIG_BYTES)


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Add the file's name to errors about its content."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: the configuration is inconsistent: {error!r:.200}") from error


def checkpoint_name(name: str, table: WeightTable) -> str:
    """Return the name of a safetensors tensor without its prefix, translated by the architecture's table."""
    prefix = next((prefix for prefix in table.prefixes if name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    return renamed(name, table.names) or name


def warn_unused_tensors(path: Path, names: list[str]) -> None:
    """Warn about these unused tensors in a file, if there are any."""
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        logger.warning("%s: %d tensors are not used: %s", path, len(names), shown)
