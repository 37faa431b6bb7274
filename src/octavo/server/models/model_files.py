"""A model's files as Ollama and llama.cpp describe them: format, sizes, weight type and metadata."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from octavo import env
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.model_file import find_model_file
from octavo.server.models.model_manager import ModelEntry
from octavo.tokenizer.template_files import read_directory_templates, read_gguf_templates

MAX_METADATA_CHARS = 4096  # per text; longer texts, such as chat templates, are left out


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A description of a model's files.

    file_format: gguf or safetensors
    weight_type: the type that most bytes of the weights have, such as Q4_K
    modified_s: Unix time
    digest: hexadecimal SHA-256 of the file's path, size and time. It changes with the file, although the file is not
    read.
    metadata: numbers and short texts under GGUF's names
    """

    file_format: str
    architecture: str
    num_parameters: int
    weight_type: str
    num_bytes: int
    modified_s: float
    digest: str
    metadata: Mapping[str, str | int | float | bool]
    chat_template: str | None


def read_model_files(entry: ModelEntry) -> ModelFiles | None:
    """Describe a model's files, whether it is loaded or not. Return None if they are not on this machine or cannot be
    read.
    """
    path = env.user_path(entry.config.model if entry.info is None else entry.info.path)
    try:
        file = find_model_file(path)
        status = file.stat()
        return _read(file, status.st_mtime_ns)
    except (ModelLoadError, OSError):
        return None


@lru_cache(maxsize=64)
def _read(path: Path, modified_ns: int) -> ModelFiles:
    with closing(open_checkpoint(path)) as checkpoint:
        num_bytes: Counter[str] = Counter()
        for weight in checkpoint.stored:
            num_bytes[weight.type_name] += weight.nbytes
        file_bytes = sum(file.stat().st_size for file in {t.file for t in checkpoint.file.tensors.values()})
        identity = f"{path.resolve()}\0{file_bytes}\0{modified_ns}"
        is_gguf = checkpoint.format == "gguf"
        metadata = checkpoint.file.metadata
        templates = read_gguf_templates(metadata) if is_gguf else read_directory_templates(path.parent)
        return ModelFiles(
            file_format=checkpoint.format,
            architecture=checkpoint.architecture,
            num_parameters=checkpoint.num_parameters,
            weight_type=(checkpoint.quantization or num_bytes.most_common(1)[0][0]).upper(),
            num_bytes=file_bytes,
            modified_s=modified_ns / 1e9,
            digest=hashlib.sha256(identity.encode()).hexdigest(),
            metadata={**_metadata(checkpoint), "general.parameter_count": checkpoint.num_parameters},
            chat_template=None if templates is None else templates.default,
        )


def _metadata(checkpoint: Checkpoint) -> dict[str, str | int | float | bool]:
    config, architecture = checkpoint.config, checkpoint.architecture
    known: dict[str, object] = {
        "general.architecture": architecture,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.vocab_size": config.vocab_size,
        **(checkpoint.file.metadata if checkpoint.format == "gguf" else {}),
    }
    found: dict[str, str | int | float | bool] = {}
    for name, value in known.items():
        is_short = isinstance(value, str) and len(value) <= MAX_METADATA_CHARS
        if is_short or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            found[name] = value  # type: ignore[assignment]
    return found


def short_count(number: int) -> str:
    """Format a number of parameters as model authors do: `134.52M`, `1.54B`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f}".rstrip("0").rstrip(".") + unit
    return str(number)
