"""Loads a draft model for a target: it has the same vocabulary, and a cache that mirrors the target's blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.backends import Executor, ExecutorLimits
from octavo.config import EngineConfig
from octavo.engine.loading.cache_plan import wants_drafts
from octavo.engine.loading.compile_graph import compile_graph
from octavo.engine.loading.devices import backend_name
from octavo.engine.loading.draft_head import DraftHead
from octavo.engine.loading.model_graph import executor_limits, model_graph
from octavo.errors import GraphError, ModelLoadError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.cache import CacheSizes
from octavo.loader.assistant import is_assistant_folder, open_assistant
from octavo.loader.checkpoint import Checkpoint, open_checkpoint, warn_unused_tensors
from octavo.loader.eagle_head import EagleHead, is_eagle_head, open_eagle_head
from octavo.loader.hub import resolve_model
from octavo.models import build_draft_graph, gemma4
from octavo.models._assistant import AssistantConfig, assistant_graph
from octavo.models._eagle3 import eagle3_graph
from octavo.speculative_config import SpeculativeConfig
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

_MAX_PADDING = 1024  # how much the rows of logits of two sizes of a model may differ


@dataclass(frozen=True, slots=True)
class DraftModel:
    """An opened draft model that fits its target.

    config: options of the draft model.
    head: set for a head that reads the target's hidden states, whether part of the target or trained for it.
    """

    config: EngineConfig
    checkpoint: Checkpoint
    graph: Graph
    model_len: int
    head: DraftHead | None = None

    def close(self) -> None:
        """Close the draft model's files."""
        self.checkpoint.close()

    def load(self, target: Executor) -> Executor:
        """Compile the draft model. Raises ModelLoadError or InsufficientMemoryError."""
        limits = executor_limits(self.config, self.model_len, self.graph)
        beside = None if self.head is None else target
        return compile_graph(self.config, self.checkpoint, self.graph, limits, None, beside=beside)


@contextmanager
def found_draft_model(
    config: EngineConfig, checkpoint: Checkpoint, target: Graph, tokenizer: Callable[[], Tokenizer], model_len: int
) -> Iterator[DraftModel | None]:
    """Open the draft model or head named by the options, or else the target's own head.

    Yields None if there is neither. The draft model is checked before the target is loaded.
    checkpoint, target: the target's checkpoint and graph.
    tokenizer: returns the target's tokenizer.
    Raises UsageError for a model that cannot draft for the target, and ModelLoadError.
    """
    options = SpeculativeConfig.of(config)
    if options.model is None:
        yield own_head(config, checkpoint, model_len)
        return
    if None not in [group.window for group in target.cache_layout.groups]:
        raise UsageError("draft_model needs a model with full-attention layers; leave it out")
    path = resolve_model(options.model, revision=options.revision)
    if options.method == "eagle3" and not is_eagle_head(path):
        raise UsageError(
            f"speculative_config: method eagle3: {options.model} is not an EAGLE-3 head; choose draft_model"
        )
    if is_separate_head(path):
        with closing(separate_head(config, checkpoint, target, path, model_len)) as head:
            yield head
        return
    with closing(open_checkpoint(path)) as draft:
        check_vocabulary(tokenizer(), load_tokenizer(draft), options.model)
        graph = model_graph(draft, model_len)
        check_draft(draft, graph, checkpoint.config.vocab_size, options.model)
        yield DraftModel(draft_config(config, options.model, options.revision), draft, graph, model_len)


def own_head(config: EngineConfig, checkpoint: Checkpoint, model_len: int) -> DraftModel | None:
    """Return the model's own head for predicting further tokens.

    Return None if the model has none or the options do not use it. Raises UsageError if the options ask for a head that
    does not exist, and ModelLoadError if its weights do not fit.
    """
    method = SpeculativeConfig.of(config).method
    if method not in ("auto", "mtp") or not wants_drafts(config):
        return None
    try:
        own = checkpoint.config.for_length(model_len)
        graph = build_draft_graph(checkpoint.architecture, own, checkpoint.weights.shapes)
    except GraphError as error:
        raise ModelLoadError(f"{checkpoint.path}: the prediction head: {error}") from error
    if graph is None:
        if method == "mtp":
            raise UsageError(
                "speculative_config: method mtp: the model has no prediction head that Octavo supports; choose auto "
                "or ngram"
            )
        return None
    own_config = dataclasses.replace(
        draft_config(config, config.model, config.revision), quantization=config.quantization
    )
    return DraftModel(own_config, checkpoint, graph, model_len, DraftHead())


def is_separate_head(path: Path) -> bool:
    """True for an EAGLE-3 head or Gemma 4's assistant, given its folder or a file in it."""
    return is_eagle_head(path) or is_assistant_folder(path)


def separate_head(
    config: EngineConfig, checkpoint: Checkpoint, target: Graph, path: Path, model_len: int
) -> DraftModel:
    """Return the EAGLE-3 head or Gemma 4's assistant in a folder, opened for its target.

    Raises UsageError if it cannot draft, and ModelLoadError if it was trained for another model.
    """
    opened = eagle_model if is_eagle_head(path) else assistant_model
    return opened(config, checkpoint, target, path, model_len)


def assistant_model(
    config: EngineConfig, checkpoint: Checkpoint, target: Graph, path: Path, model_len: int
) -> DraftModel:
    """Return Gemma 4's assistant in a folder, opened for its target. Raises like `separate_head`."""
    if config.num_ranks > 1:
        raise UsageError(
            f"draft_model {path} reads the model's keys and values, but each rank holds only a part of them; run the "
            "model on one rank (tensor_parallel_size=1, pipeline_parallel_size=1), or leave draft_model out"
        )
    with ExitStack() as closed:
        opened = open_assistant(path, checkpoint)
        closed.callback(opened.close)
        own, model = (each.config.for_length(model_len) for each in (opened, checkpoint))
        assert isinstance(own, AssistantConfig)
        assert isinstance(model, gemma4.Config)
        try:
            graph = assistant_graph(own, model, opened.weights.shapes, target.cache_layout)
        except GraphError as error:
            raise ModelLoadError(f"{path}: this assistant does not fit {checkpoint.path}: {error}") from error
        used = {parameter.name for parameter in graph.parameters}
        warn_unused_tensors(path, [name for name in opened.weights if name not in used])
        closed.pop_all()
    head = DraftHead(columns=(model.hidden_size,), borrows_cache=True)
    return DraftModel(draft_config(config, str(path)), opened, graph, model_len, head)


def eagle_model(config: EngineConfig, checkpoint: Checkpoint, target: Graph, path: Path, model_len: int) -> DraftModel:
    """Return the EAGLE-3 head in a folder, opened for its target.

    Raises ModelLoadError for one that was trained for another model.
    """
    opened = open_eagle_head(path, checkpoint)
    with ExitStack() as closed:
        closed.callback(opened.checkpoint.close)
        own = dataclasses.replace(opened.config, rope=opened.config.rope.for_length(model_len))
        try:
            graph = eagle3_graph(own, opened.checkpoint.weights.shapes, opened.output_head)
            columns = tuple(value.cols for value in graph.inputs)
            head = DraftHead(own.taps, columns, opened.target_ids, _bias_of(opened))
            head.tapped(target)
        except GraphError as error:
            raise ModelLoadError(f"{path}: this EAGLE-3 head does not fit {checkpoint.path}: {error}") from error
        used = {parameter.name for parameter in graph.parameters}
        names = opened.checkpoint.weights  # including the weights it takes from its target
        warn_unused_tensors(path, [n for n in names if n.startswith(f"layers.{own.layer}.") and n not in used])
        own_config = draft_config(config, str(path))
        closed.pop_all()
    return DraftModel(own_config, opened.checkpoint, graph, model_len, head)


def _bias_of(head: EagleHead) -> NDArray[np.float32] | None:
    """Return the bias of the layer that reads the model's hidden states."""
    name, weights = f"layers.{head.config.layer}.fc.bias", head.checkpoint.weights
    return weights[name].dequantize() if name in weights else None


def beside_head(limits: ExecutorLimits) -> ExecutorLimits:
    """Return the limits for a model whose steps also return the hidden states of all tokens."""
    return dataclasses.replace(limits, max_num_outputs=limits.max_num_outputs + limits.max_num_batched_tokens)


def draft_config(config: EngineConfig, model: str, revision: str | None = None) -> EngineConfig:
    """Return the options of a draft model, derived from its target's."""
    return dataclasses.replace(
        config,
        model=model,
        revision=revision,
        quantization=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
        data_parallel_size=1,
        gpu_layers=EngineConfig.gpu_layers,
        gpu_memory=None,
        draft_model=None,
        speculative_config=None,
        speculation="off",
        enable_lora=False,
        lora_modules=None,
    )


def check_draft(checkpoint: Checkpoint, graph: Graph, target_vocab_size: int, name: str) -> None:
    """Raise UsageError for a model that cannot draft, or whose vocabulary size does not fit the target."""
    difference = abs(checkpoint.config.vocab_size - target_vocab_size)
    if not graph.generates or graph.state_caches or len(graph.cache_layout.groups) > 1 or difference > _MAX_PADDING:
        raise UsageError(
            f"draft_model {name} cannot draft: it must be a decoder without states or windows, with "
            f"{target_vocab_size} logits like its target, not {checkpoint.config.vocab_size}"
        )


def check_vocabulary(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raise UsageError naming the first token that differs."""
    count = min(target.vocab_size, draft.vocab_size)
    for token_id in range(count):
        wanted, found = target.token_bytes(token_id), draft.token_bytes(token_id)
        if wanted != found:
            raise UsageError(
                f"draft_model {name} has a different vocabulary: token {token_id} is {found!r} there and {wanted!r} "
                "in the model; use a smaller model of the same family"
            )
    if abs(target.vocab_size - draft.vocab_size) > _MAX_PADDING:
        raise UsageError(
            f"draft_model {name} has a different vocabulary: {draft.vocab_size} tokens, not the model's "
            f"{target.vocab_size}; token {count} is the first that only one of them has"
        )


@runtime_checkable
class _ThreadSharer(Protocol):
    def share_threads(self, other: Any) -> None: ...


def share_threads(draft: Executor, target: Executor) -> None:
    """Let both executors compute on the same threads if they can. They never run at the same time."""
    if isinstance(draft, _ThreadSharer) and isinstance(target, _ThreadSharer):
        draft.share_threads(target)


def beside_draft(config: EngineConfig, available_bytes: int, target: CacheSizes, draft: Executor | None) -> int:
    """Return the part of the available memory that the target's cache may take.

    Each block of the target's cache has a twin in the draft's cache.
    available_bytes: measured with the draft loaded.
    """
    if draft is None or not target.block_token_bytes:
        return available_bytes
    if backend_name(config).startswith("torch"):  # its workspace is allocated late, and `gpu_memory` covers both
        available_bytes -= draft.workspace_bytes + (0 if config.gpu_memory is None else draft.weight_bytes)
    both = target.block_token_bytes + draft.cache_sizes.block_token_bytes
    return max(available_bytes, 0) * target.block_token_bytes // both
