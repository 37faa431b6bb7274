"""Writes a model as a folder for transformers.

The source is a GGUF file, or a safetensors checkpoint whose numbers become another type.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.quantizers import compute_threads
from octavo.compress.encode import Encoding, encode, plain
from octavo.compress.forms import hf_form
from octavo.compress.quantize import Report
from octavo.compress.to_gguf import differences
from octavo.errors import ModelLoadError
from octavo.loader.atomic_file import write_text
from octavo.loader.atomic_folder import new_folder
from octavo.loader.checkpoint import MAX_CONFIG_BYTES, Checkpoint, open_checkpoint
from octavo.loader.generation_config import FILE_NAME, SAMPLING_KEYS, sampling_defaults
from octavo.loader.json_file import read_json_object
from octavo.loader.safetensors_writer import SafeTensor, write_model
from octavo.loader.tensor_files import Source
from octavo.loader.tensor_names import TensorName, renamed
from octavo.loader.transforms import restored
from octavo.models import load_architecture, weight_table
from octavo.models._reading import ConfigReader
from octavo.quantization.packed import DENSE_TYPES
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.directory_export import check_files, main_eos, tokenizer_files
from octavo.tokenizer.template_files import named_template_paths

TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DEFAULT_SHARD_BYTES = 5 * 10**9


def write_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    type_name: str | None,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    threads: int = 0,
    report: Report = lambda _done, _total: None,
    adapters: Sequence[tuple[Path, float]] = (),
) -> int:
    """Write the model to a new folder, replacing one with the same name, and return the size of its tensors in bytes.

    type_name: type of all tensors, `F32`, `F16` or `BF16`; None keeps the type of each tensor.
    adapters: adapters to merge into the weights, each with a factor for its effect.

    The folder appears once it is complete and has been read back. Raises ModelLoadError if such a folder cannot express
    the model, and ModelWriteError naming a file or tensor.
    """
    if checkpoint.quantization is not None:
        raise ModelLoadError(
            f"{checkpoint.path} is quantized by {checkpoint.quantization}; use a checkpoint with float weights"
        )
    is_gguf = checkpoint.format == "gguf"
    sources = _merged(checkpoint, adapters) if adapters else _sources(checkpoint)
    config = _config_of_gguf(checkpoint) if is_gguf else config_of_folder(checkpoint)
    types = {name: type_name or source.type_name for name, source in sources.items()}
    config["dtype"] = config["torch_dtype"] = TORCH_NAMES[max(types.values(), key=[*types.values()].count)]
    count = compute_threads(threads)
    with new_folder(folder) as new, ThreadPoolExecutor(count, "convert") as pool:
        if is_gguf:
            original = load_tokenizer(checkpoint)
            for name, text in tokenizer_files(original, config["max_position_embeddings"]).items():
                (new / name).parent.mkdir(exist_ok=True)
                write_text(new / name, text)
            write_text(new / FILE_NAME, _as_json(_generation_config(checkpoint)))
        else:
            _copy_others(checkpoint.path.parent, new)
        write_text(new / "config.json", _as_json(config))
        tensors = _tensors(sources, types, pool, count, report)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        write_model(new, tensors, max_shard_bytes)
        _check(checkpoint, new)
    return nbytes


def _tensors(
    sources: Mapping[str, Source], types: Mapping[str, str], pool: ThreadPoolExecutor, threads: int, report: Report
) -> list[SafeTensor]:
    tensors: list[SafeTensor] = []
    done = 0

    def chunks(name: str, source: Source) -> Iterator[NDArray[np.uint8]]:
        nonlocal done
        encoding = Encoding(name, source.shape, lambda: plain(source.make()), types[name])
        for chunk in next(encode([encoding], pool, threads)):
            yield chunk
            done += chunk.nbytes
            report(done, total)

    for name, source in sources.items():
        tensors.append(SafeTensor(name, types[name], source.shape, partial(chunks, name, source)))
    total = sum(tensor.nbytes for tensor in tensors)
    return tensors


def _as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _sources(checkpoint: Checkpoint) -> dict[str, Source]:
    """Return the tensors under their names in transformers, or in the source's files if those are safetensors."""
    if checkpoint.format == "safetensors":
        return _stored(checkpoint)
    return names_in_transformers(checkpoint, {name: checkpoint.weights.info(name) for name in checkpoint.weights})


def _merged(checkpoint: Checkpoint, adapters: Sequence[tuple[Path, float]]) -> dict[str, Source]:
    """Return the tensors of `_sources` with adapters merged in."""
    # Adapters are read by a part of the package that most conversions do not need.
    from octavo.compress.merge import changed_tensors, merged

    changed = merged(checkpoint, adapters)
    if checkpoint.format == "gguf":
        return _sources(changed)
    return _stored(checkpoint) | changed_tensors(checkpoint, changed)


def names_in_transformers(checkpoint: Checkpoint, weights: Mapping[str, Source]) -> dict[str, Source]:
    """Convert the weights of the checkpoint's graph back to the tensors of transformers, by name.

    Raises ModelLoadError for an architecture that has no transformers form.
    """
    form, table = hf_form(checkpoint.architecture), weight_table(load_architecture(checkpoint.architecture))
    stems = {stem: name for name, stem in table.names.items() if not name.startswith(("blk.", "position_embd"))}
    found = {}
    for name, source in restored(weights, table.transforms, checkpoint.config, "safetensors").items():
        prefix = "" if TensorName.parse(name).stem == "lm_head" else form.prefix
        found[prefix + (renamed(name, stems) or name)] = source
    return found


def _stored(checkpoint: Checkpoint) -> dict[str, Source]:
    found = {name: checkpoint.file.source(name) for name in checkpoint.file.tensors}
    for name, source in found.items():
        if source.type_name not in DENSE_TYPES:
            raise ModelLoadError(
                f"{checkpoint.path}: tensor {name!r:.80} is {source.type_name}; it must be a float type"
            )
    return found


def config_of_folder(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's config.json.

    If `tie_word_embeddings` is true in it although the output head is stored separately, it is false in the result.
    """
    config: dict[str, Any] = {**read_json_object(checkpoint.path.parent / "config.json", MAX_CONFIG_BYTES)}
    if not getattr(checkpoint.config, "tie_word_embeddings", True):
        for section in (config, config.get("text_config")):
            if isinstance(section, dict) and section.get("tie_word_embeddings"):
                section["tie_word_embeddings"] = False
    return config


def _config_of_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the config.json for a GGUF file, after checking that it gives the same configuration as the file.

    Raises ModelLoadError naming the fields that differ.
    """
    form = hf_form(checkpoint.architecture)
    values = {**checkpoint.file.metadata}
    for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
        if name in checkpoint.file.tensors:
            values[name] = checkpoint.file.weight(name).dequantize()
    reader = ConfigReader(values, f"{checkpoint.file.metadata['general.architecture']}.")
    keys = {"architectures": [form.class_name], "model_type": form.model_type, **form.keys(checkpoint.config, reader)}
    shapes = checkpoint.weights.shapes
    biases = {
        "self_attn.q_proj": ("attention_bias", "use_qkv_bias"),
        "mlp.gate_proj": ("mlp_bias",),
        "mlp.up_proj": ("use_bias",),
    }
    for part, names in biases.items():
        if f"layers.0.{part}.bias" in shapes:
            keys |= dict.fromkeys(names, True)
    tokenizer = load_tokenizer(checkpoint)
    # Without them transformers takes the ids of the first model of the family.
    keys |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": keys.get("pad_token_id")}
    keys["eos_token_id"] = main_eos(tokenizer) if tokenizer.eos_token_ids else None
    read = load_architecture(checkpoint.architecture).Config.from_hf(ConfigReader(keys))
    if found := list(differences(checkpoint.config, read, "")):
        raise ModelLoadError(f"{checkpoint.path}: config.json cannot express this model's {', '.join(found[:5])}")
    return keys


def _generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    tokenizer = load_tokenizer(checkpoint)
    keys: dict[str, Any] = {}
    if tokenizer.bos_token_id is not None:
        keys["bos_token_id"] = tokenizer.bos_token_id
    if tokenizer.eos_token_ids:
        first = main_eos(tokenizer)
        keys["eos_token_id"] = [first, *sorted(tokenizer.eos_token_ids - {first})]
    prefix = "general.sampling."
    if any(key.startswith(prefix) for key in checkpoint.file.metadata):
        values = sampling_defaults(checkpoint).numbers
        keys |= {SAMPLING_KEYS[name][0]: value for name, value in values.items()}
        keys["do_sample"] = values.get("temperature", 1.0) > 0
        if not keys["do_sample"]:
            keys.pop("temperature")
    return keys


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the files that accompany the weights: tokenizer, chat template, generation configuration and licence."""
    for path in [*sorted(source.iterdir()), *named_template_paths(source)]:
        is_weight = path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf"))
        if path.is_file() and not is_weight and not path.name.startswith(".") and path.name != "config.json":
            copy = folder / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _check(checkpoint: Checkpoint, folder: Path) -> None:
    """Open the result and check that it is the same model. Raises ModelLoadError."""
    written = open_checkpoint(folder)
    try:
        if written.weights.shapes != checkpoint.weights.shapes:
            raise ModelLoadError(f"{checkpoint.path}: the tensors of the result would have unexpected shapes or names")
    finally:
        written.close()
    if checkpoint.format == "gguf":
        check_files(folder, load_tokenizer(checkpoint))
