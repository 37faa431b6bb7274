"""Merges adapters into the weights of a model: each changed weight W becomes W + scale B A, computed in float32.

The result is written to a new file, and each weight is merged when the writer reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from octavo.adapters.adapter import EMBEDDING, Adapter, AdapterBase
from octavo.adapters.read import read_adapter
from octavo.compress.source import SourceModel, as_source, open_source
from octavo.compress.to_gguf import gguf_form_of, tensors_in_gguf
from octavo.errors import ModelLoadError
from octavo.graph.ops.low_rank import HEAD_PLACE, LowRank
from octavo.loader.checkpoint import Checkpoint, checkpoint_name, open_checkpoint
from octavo.loader.tensor_files import Source
from octavo.loader.transforms import restored
from octavo.models import build_graph, load_architecture, weight_table
from octavo.quantization.packed import DenseWeight, Weight


def merged(checkpoint: Checkpoint, adapters: Sequence[tuple[Path, float]]) -> Checkpoint:
    """Return the checkpoint with the adapters merged into its weights one after another, each scaled by a factor.

    Raises ModelLoadError naming the adapter's tensor or key that cannot be merged.
    """
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    base = AdapterBase.of(checkpoint.architecture, checkpoint.config, graph, checkpoint.weights)
    weights = checkpoint.weights
    for path, scale in adapters:
        adapter = read_adapter(path, base, scale=scale)
        if adapter.invocation_tokens:
            raise ModelLoadError(
                f"{path}: an activated adapter (alora_invocation_tokens) acts only after certain tokens, but a merged "
                "one would always act; serve it as an adapter"
            )
        weights = weights.replaced(
            {
                name: _merged(weights.info(name), part, adapter, is_table=name in base.tables)
                for name, part in _one_by_weight(path, adapter, base).items()
            }
        )
    return checkpoint.with_weights(weights)


def _one_by_weight(path: Path, adapter: Adapter, base: AdapterBase) -> Mapping[str, LowRank]:
    """Return the adapter's parts by the weight that they change.

    Raises ModelLoadError if the embedding and the output head are one weight but the adapter changes them differently.
    """
    parts = dict(adapter.parts)
    if HEAD_PLACE in base.weights:
        return parts
    head = parts.pop(HEAD_PLACE, None)
    table = parts.get(EMBEDDING) if EMBEDDING in base.tables else None
    if (head is None) != (table is None) or (head and table and not head.equals(table.transposed())):
        name = "the output head" if table is None else "the embedding"
        raise ModelLoadError(
            f"{path}: it changes {name}, but the embedding and the output head are one weight in this model: merging "
            "would change both; serve it as an adapter"
        )
    return parts


def _merged(source: Source, part: LowRank, adapter: Adapter, *, is_table: bool) -> Source:
    """Return a float32 weight with one part of an adapter merged in.

    Its declared type remains the type in the file, because the writer rounds the result to that type.
    """

    def make() -> Weight:
        weight = source.make().dequantize()
        return DenseWeight(np.ascontiguousarray(part.merged(weight.T).T) if is_table else part.merged(weight))

    return replace(source, make=make, steps=f"{source.steps} merged with {adapter.digest.hex()}")


@contextmanager
def open_merged(path: Path, adapters: Sequence[tuple[Path, float]]) -> Iterator[SourceModel]:
    """Open a model with adapters merged into its weights, like `open_source`. Other tensors stay as they are.

    Raises ModelLoadError, for example if an architecture's weights cannot be converted back to the tensors of a file.
    """
    with closing(open_checkpoint(path)) as checkpoint:
        changed = merged(checkpoint, adapters)
        if checkpoint.format == "safetensors":
            metadata, sources = gguf_form_of(changed)
            yield as_source(checkpoint.path, metadata, checkpoint.file, sources)
            return
        with open_source(path) as model:
            before, after = (
                tensors_in_gguf(each, model.architecture, _sources(each)) for each in (checkpoint, changed)
            )
            found = {name: source for name, source in after.items() if source.steps != before[name].steps}
            new = {tensor.name: tensor for tensor in as_source(path, {}, checkpoint.file, found).tensors}
            yield replace(model, tensors=[new.get(tensor.name, tensor) for tensor in model.tensors])


def changed_tensors(before: Checkpoint, after: Checkpoint) -> dict[str, Source]:
    """Return the tensors of a safetensors checkpoint that differ in `after`, by their names in its files."""
    table = weight_table(load_architecture(before.architecture))
    old, new = (restored(_sources(each), table.transforms, before.config, "safetensors") for each in (before, after))
    found = {}
    for tensor in before.file.tensors:
        name = checkpoint_name(tensor, table)
        if name in new and new[name].steps != old[name].steps:
            found[tensor] = new[name]
    return found


def _sources(checkpoint: Checkpoint) -> Mapping[str, Source]:
    return {name: checkpoint.weights.info(name) for name in checkpoint.weights}
