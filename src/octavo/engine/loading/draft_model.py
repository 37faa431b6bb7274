"""Loads a draft model beside its target: the same vocabulary, and a cache with the target's blocks."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

from octavo.backends import Executor
from octavo.config import EngineConfig
from octavo.engine.loading.compile_graph import compile_graph
from octavo.engine.loading.devices import backend_name
from octavo.engine.loading.model_graph import executor_limits, model_graph
from octavo.errors import UsageError
from octavo.graph.cache import CacheSizes
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.hub import resolve_model
from octavo.speculative_config import SpeculativeConfig
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

_MAX_PADDING = 1024  # rows of logits by which two sizes of a model may differ


def load_draft_model(
    config: EngineConfig, target: Tokenizer, target_vocab_size: int, model_len: int
) -> Executor | None:
    """The executor of the draft model that the options name; None: they name none.

    Raises UsageError for a model that cannot draft for the target, ModelLoadError or InsufficientMemoryError.
    """
    options = SpeculativeConfig.of(config)
    if options.model is None:
        return None
    if backend_name(config) not in ("cpu", "reference"):
        raise UsageError(f"draft_model runs on the CPU; the model is on {backend_name(config)}: leave it out")
    own = dataclasses.replace(
        config,
        model=options.model,
        revision=options.revision,
        quantization=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enable_expert_parallel=False,
        data_parallel_size=1,
        draft_model=None,
        speculative_config=None,
        speculation="off",
    )
    checkpoint = open_checkpoint(resolve_model(options.model, revision=options.revision))
    try:
        check_vocabulary(target, load_tokenizer(checkpoint), options.model)
        graph = model_graph(checkpoint, model_len)
        difference = abs(checkpoint.config.vocab_size - target_vocab_size)
        layout = graph.cache_layout
        if not graph.generates or graph.state_caches or len(layout.groups) > 1 or difference > _MAX_PADDING:
            raise UsageError(
                f"draft_model {options.model} cannot draft: it must be a decoder without states and windows, with as "
                f"many rows of logits as its target ({target_vocab_size}, it has {checkpoint.config.vocab_size})"
            )
        return compile_graph(own, checkpoint, graph, executor_limits(own, model_len, graph), None)
    finally:
        checkpoint.close()


def check_vocabulary(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raises UsageError with the first token that differs."""
    count = min(target.vocab_size, draft.vocab_size)
    for token_id in range(count):
        wanted, found = target.token_bytes(token_id), draft.token_bytes(token_id)
        if wanted != found:
            raise UsageError(
                f"draft_model {name} has another vocabulary: token {token_id} is {found!r} there and {wanted!r} in the "
                "model; take a smaller model of the same family"
            )
    if abs(target.vocab_size - draft.vocab_size) > _MAX_PADDING:
        raise UsageError(
            f"draft_model {name} has another vocabulary: {draft.vocab_size} tokens, the model has {target.vocab_size}; "
            f"token {count} is the first that only one of them has"
        )


@runtime_checkable
class _ThreadSharer(Protocol):
    def share_threads(self, other: Any) -> None: ...


def share_threads(draft: Executor, target: Executor) -> None:
    """Lets both compute on the same threads where they can: one never runs beside the other."""
    if isinstance(draft, _ThreadSharer) and isinstance(target, _ThreadSharer):
        draft.share_threads(target)


def beside_draft(available_bytes: int, target: CacheSizes, draft: Executor | None) -> int:
    """The part of the available memory for the target's cache: each token has a place in the draft's, too."""
    if draft is None or not target.token_bytes:
        return available_bytes
    return available_bytes * target.token_bytes // (target.token_bytes + draft.cache_sizes.token_bytes)
