"""A model in the form of a GGUF file, as tensors and metadata, whatever format it is stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.compress.encode import plain
from octavo.compress.mixtures import ModelFacts, kind_of
from octavo.loader.gguf import open_gguf
from octavo.loader.gguf_writer import MetadataValue, typed_metadata
from octavo.loader.model_file import find_model_file
from octavo.loader.tensor_files import Source, TensorFiles
from octavo.quantization.packed import DenseWeight, GGMLWeight


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor under its name in GGUF files.

    make: returns its numbers, as stored.
    release: lets the system reclaim the mapped pages of its numbers.
    stored: names of the source tensors that it is made from.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    make: Callable[[], DenseWeight | GGMLWeight]
    release: Callable[[], None]
    stored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model in the form of a GGUF file.

    metadata: as in a GGUF file of the model, with each number in the type that it has there.
    tensors: in the order of the file.
    """

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Sequence[SourceTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def facts(self, has_importance: bool) -> ModelFacts:
        """Return the model facts that the rules of mixtures depend on.

        If metadata keys are missing, the number of layers and `gqa` default to 1, and the number of experts to 0.
        """

        def largest(key: str, default: int) -> int:
            numbers = np.atleast_1d(np.asarray(self.metadata.get(f"{self.architecture}.{key}", default)))
            return int(numbers.max()) if numbers.size and numbers.dtype.kind in "iu" else default

        heads = largest("attention.head_count", 1)
        names = [tensor.name for tensor in self.tensors]
        return ModelFacts(
            architecture=self.architecture,
            num_layers=largest("block_count", 1),
            gqa=heads // max(largest("attention.head_count_kv", heads), 1),
            num_experts=largest("expert_count", 0),
            is_tied="output.weight" not in names,
            num_values=sum(kind_of(name) in ("v", "qkv", "kv_b") for name in names),
            has_importance=has_importance,
        )


@contextmanager
def open_source(path: Path) -> Iterator[SourceModel]:
    """Open a GGUF file (any part of a split one), or a safetensors checkpoint in the form of a GGUF file.

    Raises ModelLoadError naming file and reason.
    """
    path = find_model_file(path)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        # Reading an architecture and a tokenizer takes imports as long as quantizing a small model.
        from octavo.compress.to_gguf import gguf_form_of
        from octavo.loader.checkpoint import open_checkpoint

        with closing(open_checkpoint(path)) as checkpoint:
            metadata, sources = gguf_form_of(checkpoint)
            yield as_source(path, metadata, checkpoint.file, sources)
        return
    with closing(open_gguf(path)) as file:
        metadata = typed_metadata(file.metadata, file.number_types)
        yield SourceModel(path, metadata, [_tensor(file, name, file.source(name)) for name in file.tensors])


def as_source(
    path: Path, metadata: Mapping[str, MetadataValue], file: TensorFiles, sources: Mapping[str, Source]
) -> SourceModel:
    """Make a model from the given tensors.

    file: the file from whose tensors they are made.
    sources: the tensors by GGUF name.
    """
    return SourceModel(path, metadata, [_tensor(file, *item) for item in sources.items()])


def _tensor(file: TensorFiles, name: str, source: Source) -> SourceTensor:
    def make() -> DenseWeight | GGMLWeight:
        return plain(source.make())

    def release() -> None:
        for tensor in source.tensors:
            file.release(tensor)

    return SourceTensor(name, source.type_name, source.shape, make, release, source.tensors)
