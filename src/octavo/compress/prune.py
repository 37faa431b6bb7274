"""Removes parts of a model: layers, heads, feed-forward columns, or single weights. The result is an ordinary model.

Layers are ranked by block influence: one minus the mean cosine between a layer's input and output (Men et al., arXiv
2403.03853). Heads and feed-forward columns are ranked by activation-weighted magnitude: the mean square of a column's
input times the sum of the squares of its weights, summed over the heads that share a key. Single weights are ranked in
each row by |w| times the norm of the input (Sun et al., Wanda, arXiv 2306.11695), or removed column by column while the
remaining weights compensate (Frantar and Alistarh, SparseGPT, arXiv 2301.00774). Both of these methods remove either a
fraction of each row or two of every four neighbours.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.backends.layers import Tokens, Values, layers_of, run_layer
from octavo.batch import Array
from octavo.compress.to_gguf import differences, tensors_in_gguf
from octavo.errors import ModelLoadError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.values import Parameter
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.gguf_writer import MetadataValue
from octavo.loader.tensor_files import Source
from octavo.loader.tensor_names import ROPE_FACTORS
from octavo.models import build_graph, load_architecture
from octavo.models._reading import ConfigReader
from octavo.quantization.packed import DenseWeight

Method = Literal["wanda", "sparsegpt"]
_LAYER = re.compile(r"^layers\.(\d+)\.")
_DAMPING = 0.01  # relative to the mean diagonal of the inputs' products
_SPARSE_BLOCK = 128  # columns whose errors SparseGPT hands on at once
_OF_FOUR = 4

WorkReport = Callable[[str, int, int], None]
"""Called with the name of the work, the amount done, and the total."""


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """The parts to remove.

    layers: number of layers.
    heads, ffn: fraction of each layer's heads and feed-forward columns.
    sparsity: fraction of single weights, or `2:4`; None removes none.
    multiple: the number of feed-forward columns that stay is a multiple of this, so that every block type fits.
    """

    layers: int = 0
    heads: float = 0.0
    ffn: float = 0.0
    sparsity: float | Literal["2:4"] | None = None
    method: Method = "wanda"
    multiple: int = 32


@dataclass(frozen=True, slots=True)
class PrunedModel:
    """A pruned model.

    metadata, sources: the metadata and tensors of its GGUF file, by GGUF key and name.
    removed: descriptions of what was removed, one line each.
    """

    metadata: Mapping[str, MetadataValue]
    sources: Mapping[str, Source]
    removed: tuple[str, ...]


def prune(
    checkpoint: Checkpoint,
    metadata: Mapping[str, MetadataValue],
    texts: Sequence[Tokens],
    options: PruneOptions,
    report: WorkReport = lambda _what, _done, _total: None,
) -> PrunedModel:
    """Remove parts of a model: layers first, then heads and columns, and single weights last.

    metadata: metadata of the model as a GGUF file.
    texts: calibration texts; each is used in full.

    Raises UsageError if nothing would be left or if the model has no such parts. Raises ModelLoadError if a GGUF file
    cannot express the result.
    """
    _check_names(checkpoint)
    model = _Model(checkpoint, {**metadata}, [])
    if options.layers:
        model = _without_layers(model, texts, options.layers, report)
    if options.heads or options.ffn:
        model = _without_columns(model, texts, options, report)
    if options.sparsity is not None:
        model = _sparse(model, texts, options, report)
    name = str(model.metadata["general.architecture"])
    weights = {name: model.checkpoint.weights.info(name) for name in model.checkpoint.weights}
    _check_config(model, name, weights)
    return PrunedModel(model.metadata, tensors_in_gguf(model.checkpoint, name, weights), tuple(model.removed))


@dataclass(frozen=True, slots=True)
class _Model:
    checkpoint: Checkpoint
    metadata: dict[str, MetadataValue]
    removed: list[str]

    def with_config(self, weights: Mapping[str, Source], keys: Mapping[str, MetadataValue], **fields: Any) -> _Model:
        """Return the model with these weights, and with some configuration fields and metadata keys changed.

        keys: new values of metadata keys, without the architecture's prefix.
        fields: new values of configuration fields.
        """
        config = dataclasses.replace(self.checkpoint.config, **fields)
        kept = type(self.checkpoint.weights)(weights, self.checkpoint.file)
        prefix = f"{self.metadata['general.architecture']}."
        metadata = self.metadata | {prefix + key: value for key, value in keys.items()}
        return replace(self, checkpoint=replace(self.checkpoint, config=config, weights=kept), metadata=metadata)

    @property
    def weights(self) -> dict[str, Source]:
        return {name: self.checkpoint.weights.info(name) for name in self.checkpoint.weights}

    @property
    def graph(self) -> Graph:
        checkpoint = self.checkpoint
        return build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)


def _check_names(checkpoint: Checkpoint) -> None:
    needed = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    if missing := [name for name in needed if f"layers.0.{name}.weight" not in checkpoint.weights]:
        name = checkpoint.architecture
        raise UsageError(f"{checkpoint.path}: {name} has no {missing[0]}; only decoders without experts can be pruned")


def _check_config(model: _Model, name: str, weights: Mapping[str, Source]) -> None:
    """Check that a reader of the file would see the same model. Raises ModelLoadError."""
    file = model.checkpoint.file
    factors = {n: file.weight(n).dequantize() for n in ROPE_FACTORS if n in file.tensors}
    shapes = {n: source.shape for n, source in weights.items()}
    reader = ConfigReader({**model.metadata, **factors}, f"{name}.")
    read = load_architecture(name).Config.from_gguf(reader, shapes)
    if found := list(differences(model.checkpoint.config, read, "")):
        raise ModelLoadError(
            f"{model.checkpoint.path}: GGUF files cannot express the pruned model's {', '.join(found[:5])}"
        )


def block_influence(
    checkpoint: Checkpoint,
    graph: Graph,
    texts: Sequence[Tokens],
    report: WorkReport = lambda _what, _done, _total: None,
) -> NDArray[np.float64]:
    """Return the influence of each layer, [layers].

    An influence of 0 means that a layer's output has the same direction as its input, so removing it should change
    little. The first layer has an infinite influence, because its output differs from the embedding in length and
    meaning.

    Raises UsageError if layers pass on more than one value, and NumericalError for values that are not finite.
    """
    layers = layers_of(graph)
    values: list[Values] = [()] * len(texts)
    found = [np.inf]
    for i, layer in enumerate(layers):
        before = values
        values = run_layer(_up_to_head(layer), checkpoint.weights, texts, values)
        if any(len(value) != 1 for value in values):
            raise UsageError(
                "the layers of this model pass on several values, so block influence is undefined; leave --layers out"
            )
        if i:
            cosines = [_cosines(a[0], b[0]) for a, b in zip(before, values, strict=True)]
            found.append(1 - float(np.concatenate(cosines).mean()))
        report("measuring layers", i + 1, len(layers))
    return np.array(found)


def _up_to_head(layer: Graph) -> Graph:
    """Return the segment without what follows its layers: the selection of rows, the final norm and the head."""
    names = [node.op.name for node in layer.nodes]
    if "gather" not in names:
        return layer
    at = names.index("gather")
    return Graph.from_nodes(layer, layer.nodes[:at], layer.nodes[at].op.inputs)


def _cosines(a: Array, b: Array) -> NDArray[np.float64]:
    dots = np.einsum("ij,ij->i", a, b, dtype=np.float64)
    norms = np.linalg.norm(a.astype(np.float64), axis=1) * np.linalg.norm(b.astype(np.float64), axis=1)
    return np.asarray(dots / np.maximum(norms, 1e-30))


def _without_layers(model: _Model, texts: Sequence[Tokens], count: int, report: WorkReport) -> _Model:
    config = model.checkpoint.config
    total = config.num_layers
    if not 0 < count < total:
        raise UsageError(f"--layers {count}: the model has {total} layers, and at least one must remain")
    influence = block_influence(model.checkpoint, model.graph, texts, report)
    gone = sorted(int(i) for i in np.argsort(influence, kind="stable")[:count])
    kept = [i for i in range(total) if i not in gone]
    places = {old: new for new, old in enumerate(kept)}
    weights = {}
    for name, source in model.weights.items():
        found = _LAYER.match(name)
        if found is None:
            weights[name] = source
        elif int(found[1]) in places:
            weights[f"layers.{places[int(found[1])]}.{name[found.end() :]}"] = source
    keys: dict[str, MetadataValue] = {"block_count": np.uint32(len(kept))}
    prefix = f"{model.metadata['general.architecture']}."
    for key, value in model.metadata.items():
        if key.startswith(prefix) and isinstance(value, np.ndarray) and len(value) == total:
            keys[key.removeprefix(prefix)] = value[kept]
    fields: dict[str, Any] = {"num_layers": len(kept), **_fields_of_layers(config, total, kept)}
    for part in ("attention", "rope"):
        if changed := _fields_of_layers(getattr(config, part), total, kept):
            fields[part] = replace(getattr(config, part), **changed)
    model.removed.append(
        f"layers {', '.join(map(str, gone))}: block influence {', '.join(f'{influence[i]:.4f}' for i in gone)}"
    )
    return model.with_config(weights, keys, **fields)


def _fields_of_layers(config: Any, total: int, kept: Sequence[int]) -> dict[str, tuple[Any, ...]]:
    """Return the configuration fields that have one value per layer, reduced to the layers that are kept."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    of_layers = {name: value for name, value in values.items() if isinstance(value, tuple) and len(value) == total}
    return {name: tuple(value[i] for i in kept) for name, value in of_layers.items()}


def _without_columns(model: _Model, texts: Sequence[Tokens], options: PruneOptions, report: WorkReport) -> _Model:
    config: Any = model.checkpoint.config
    squares = _mean_squares(model, texts, ("self_attn.o_proj", "mlp.down_proj"), report)
    groups = config.num_kv_heads
    heads_kept = groups - round(options.heads * groups)
    width = config.mlp.intermediate_size
    ffn_kept = max(round((1 - options.ffn) * width / options.multiple), 0) * options.multiple if options.ffn else width
    if not 0 < heads_kept <= groups or not 0 < ffn_kept <= width:
        raise UsageError(
            f"{heads_kept} groups of heads and {ffn_kept} feed-forward columns would remain; lower --heads or --ffn"
        )
    weights = model.weights
    for i in range(config.num_layers):
        p = f"layers.{i}."
        output, down = p + "self_attn.o_proj", p + "mlp.down_proj"
        if options.heads:
            scores = _column_scores(weights[f"{output}.weight"], squares[f"{output}.weight"])
            kept = _best(scores.reshape(groups, -1).sum(axis=1), heads_kept)
            per_group = config.num_heads // groups
            _keep_rows(weights, p + "self_attn.q_proj", _spread(kept, per_group * config.head_dim))
            _keep_rows(weights, p + "self_attn.k_proj", _spread(kept, config.head_dim))
            _keep_rows(weights, p + "self_attn.v_proj", _spread(kept, config.value_dim))
            _keep_columns(weights, output, _spread(kept, per_group * config.value_dim))
        if options.ffn:
            scores = _column_scores(weights[f"{down}.weight"], squares[f"{down}.weight"])
            kept = _best(scores, ffn_kept)
            for part in ("gate_proj", "up_proj"):
                _keep_rows(weights, f"{p}mlp.{part}", kept)
            _keep_columns(weights, down, kept)
    keys: dict[str, MetadataValue] = {}
    fields: dict[str, Any] = {}
    if options.heads:
        fields |= {"num_kv_heads": heads_kept, "num_heads": config.num_heads // groups * heads_kept}
        keys |= {
            "attention.head_count": np.uint32(fields["num_heads"]),
            "attention.head_count_kv": np.uint32(heads_kept),
            "attention.key_length": np.uint32(config.head_dim),
            "attention.value_length": np.uint32(config.value_dim),
            "rope.dimension_count": np.uint32(config.rope.rotary_dim),
        }
        model.removed.append(
            f"heads: {fields['num_heads']} of {config.num_heads} remain in each layer, and {heads_kept} of keys"
        )
    if options.ffn:
        fields["mlp"] = replace(config.mlp, intermediate_size=ffn_kept)
        keys["feed_forward_length"] = np.uint32(ffn_kept)
        model.removed.append(f"feed-forward columns: {ffn_kept} of {width} remain in each layer")
    return model.with_config(weights, keys, **fields)


def _mean_squares(
    model: _Model, texts: Sequence[Tokens], parts: tuple[str, ...], report: WorkReport
) -> dict[str, NDArray[np.float64]]:
    """Return the sums of squares of the inputs of the matrices with these names, [columns], by weight."""
    sums: dict[str, NDArray[np.float64]] = {}

    def observe(parameter: Parameter, x: Array, index: int | None) -> None:
        if index is None and any(part in parameter.name for part in parts):
            found = np.einsum("ij,ij->j", x, x, dtype=np.float64)
            sums[parameter.name] = sums.get(parameter.name, 0.0) + found

    values: list[Values] = [()] * len(texts)
    layers = layers_of(model.graph)
    for i, layer in enumerate(layers):
        values = run_layer(layer, model.checkpoint.weights, texts, values, observe=observe, all_logits=False)
        report("measuring columns", i + 1, len(layers))
    return sums


def _column_scores(source: Source, squares: NDArray[np.float64]) -> NDArray[np.float64]:
    matrix = source.make().dequantize().astype(np.float64)
    return np.asarray((matrix**2).sum(axis=0) * squares)


def _best(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the indices of the highest scores, in ascending order."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def _spread(kept: NDArray[np.intp], size: int) -> NDArray[np.intp]:
    """Return the indices of all rows in the kept groups of `size` rows."""
    return (kept[:, None] * size + np.arange(size)).reshape(-1)


def _keep_rows(weights: dict[str, Source], stem: str, kept: NDArray[np.intp]) -> None:
    for kind in (".weight", ".bias"):
        if stem + kind in weights:
            source = weights[stem + kind]
            weights[stem + kind] = _part(source, lambda x: x[kept], (len(kept), *source.shape[1:]))


def _keep_columns(weights: dict[str, Source], stem: str, kept: NDArray[np.intp]) -> None:
    source = weights[f"{stem}.weight"]
    weights[f"{stem}.weight"] = _part(source, lambda x: x[:, kept], (source.shape[0], len(kept)))


def dense_source(source: Source, make: Callable[[], NDArray[np.float32]], shape: tuple[int, ...], step: str) -> Source:
    """Return the source of a float32 weight that replaces another one.

    make: returns the new numbers.
    step: description of the change, added to the steps of `source`.
    """
    return replace(
        source,
        type_name="F32",
        shape=shape,
        nbytes=4 * int(np.prod(shape)),
        make=lambda: DenseWeight(np.ascontiguousarray(make())),
        steps=f"{source.steps} {step}",
    )


def _part(source: Source, kept: Callable[[NDArray[np.float32]], NDArray[np.float32]], shape: tuple[int, ...]) -> Source:
    return dense_source(source, lambda: kept(source.make().dequantize()), shape, "pruned")


def _sparse(model: _Model, texts: Sequence[Tokens], options: PruneOptions, report: WorkReport) -> _Model:
    """Prune layer by layer.

    Each layer is pruned according to the inputs that it gets from the pruned layers before it. Then its outputs are
    computed again.
    """
    sparsity = options.sparsity
    if isinstance(sparsity, float) and not 0 < sparsity < 1:
        raise UsageError(f"--sparsity {sparsity:g} must be between 0 and 1")
    layers, weights = layers_of(model.graph), model.weights
    values: list[Values] = [()] * len(texts)
    for i, layer in enumerate(layers):
        inputs: dict[str, NDArray[np.float64]] = {}

        def observe(parameter: Parameter, x: Array, index: int | None, found: dict[str, Any] = inputs) -> None:
            if index is None and _LAYER.match(parameter.name) and len(parameter.shape) == 2:
                wide = x.astype(np.float64)
                product = wide.T @ wide if options.method == "sparsegpt" else np.einsum("ij,ij->j", wide, wide)
                found[parameter.name] = found.get(parameter.name, 0.0) + product

        checkpoint = model.checkpoint
        run_layer(layer, checkpoint.weights, texts, values, observe=observe, all_logits=False)
        for name, product in inputs.items():
            matrix = weights[name].make().dequantize()
            pruned = sparse_matrix(matrix, product, sparsity or 0.0, options.method)
            weights[name] = dense_source(weights[name], lambda pruned=pruned: pruned, pruned.shape, "pruned")  # type: ignore[misc]
        model = model.with_config(weights, {})
        values = run_layer(layer, model.checkpoint.weights, texts, values, all_logits=False)
        report("pruning layers", i + 1, len(layers))
    how = "2 of every 4 weights" if sparsity == "2:4" else f"{sparsity:.0%} of the weights of each row"
    model.removed.append(f"{how} of the layers' matrices are zero ({options.method}); no kernel skips them")
    return model


def sparse_matrix(
    matrix: NDArray[np.float32], inputs: NDArray[np.float64], sparsity: float | Literal["2:4"], method: Method
) -> NDArray[np.float32]:
    """Return the matrix [out, in] with some weights set to zero.

    inputs: X^T X [in, in] for sparsegpt, or its diagonal [in] for wanda, where the rows of X are inputs.
    """
    if method == "sparsegpt":
        return _sparsegpt(matrix, inputs, sparsity)
    scores = np.abs(matrix) * np.sqrt(inputs)[None]
    return np.where(_kept(scores, sparsity), matrix, np.float32(0))


def _kept(scores: NDArray[np.floating], sparsity: float | Literal["2:4"]) -> NDArray[np.bool_]:
    """Return True for the weights that stay: the highest scores of each row, or of every four neighbours."""
    rows, columns = scores.shape
    if sparsity == "2:4":
        if columns % _OF_FOUR:
            raise UsageError(f"rows have {columns} weights, but 2:4 needs a multiple of 4")
        fours = scores.reshape(rows, -1, _OF_FOUR)
        order = np.argsort(np.argsort(-fours, axis=2, kind="stable"), axis=2, kind="stable")
        return np.asarray((order < _OF_FOUR // 2).reshape(rows, columns))
    gone = round(sparsity * columns)
    kept = np.ones(scores.shape, np.bool_)
    np.put_along_axis(kept, np.argsort(scores, axis=1, kind="stable")[:, :gone], False, axis=1)
    return kept


def _sparsegpt(
    matrix: NDArray[np.float32], products: NDArray[np.float64], sparsity: float | Literal["2:4"]
) -> NDArray[np.float32]:
    """Apply algorithm 1 of arXiv 2301.00774, choosing the mask of a block of columns when it is reached."""
    w, h = matrix.astype(np.float64), products.copy()
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    h[np.diag_indices_from(h)] += _DAMPING * np.diag(h).mean()
    upper = np.linalg.cholesky(np.linalg.inv(h)).T  # inverse = U^T U
    columns = w.shape[1]
    for begin in range(0, columns, _SPARSE_BLOCK):
        end = min(begin + _SPARSE_BLOCK, columns)
        block, u = w[:, begin:end], upper[begin:end, begin:end]
        errors = np.zeros_like(block)
        kept = _kept(block**2 / np.diag(u)[None] ** 2, sparsity)
        for j in range(end - begin):
            errors[:, j] = np.where(kept[:, j], 0.0, block[:, j]) / u[j, j]
            block[:, j:] -= errors[:, j : j + 1] * u[j : j + 1, j:]
            block[~kept[:, j], j] = 0.0
        w[:, end:] -= errors @ upper[begin:end, end:]
    return w.astype(np.float32)
