"""Loads a model by name into a ready engine."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from octavo import env
from octavo.backends import CHECKING, Executor, ExecutorLimits, KeepJob
from octavo.backends.memory import MemoryBudget, address_space_note, host_memory
from octavo.backends.split import SplitBackend
from octavo.config import EngineConfig, LoadProgress, parse_bytes
from octavo.engine.engine import Engine
from octavo.engine.kv.block_tier import BlockStore
from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.limits import NO_IMAGES, EngineLimits
from octavo.engine.loading.adapters import adapter_registry
from octavo.engine.loading.cache_plan import CachePlan, plan_cache
from octavo.engine.loading.compile_graph import compile_graph
from octavo.engine.loading.devices import backend_of, has_own_memory, memory_of_rank
from octavo.engine.loading.draft_head import DraftHead
from octavo.engine.loading.draft_model import DraftModel, beside_draft, beside_head, found_draft_model, share_threads
from octavo.engine.loading.encoder import image_limits, load_encodings, vision_of, why_no_images
from octavo.engine.loading.larger_than_memory import (
    memory_for_cache,
)
from octavo.engine.loading.model_graph import executor_limits, model_graph
from octavo.engine.loading.model_identity import cache_identity
from octavo.engine.loading.progress_bar import size
from octavo.engine.loading.source_encoder import check_options, encoder_graph, load_sources, source_limits
from octavo.engine.speculation.open_sources import draft_sources, why_no_drafts
from octavo.engine.texts.prompt_encoder import template_eos_id
from octavo.engine.texts.text_heads import text_heads
from octavo.engine.texts.text_model import text_model
from octavo.errors import InsufficientMemoryError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.source import source_width
from octavo.graph.spans import span_width
from octavo.loader.checkpoint import Checkpoint, open_checkpoint, warn_unused_weights
from octavo.loader.generation_config import SamplingDefaults, sampling_defaults
from octavo.loader.hub import resolve_model
from octavo.platform import processors
from octavo.platform.memory import address_space_limit
from octavo.speculative_config import SpeculativeConfig
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.distributed.executor import GroupExecutor
    from octavo.engine.encoding.encodings import Encodings
    from octavo.loader.vision import VisionPart

logger = logging.getLogger(__name__)

_LEAST_MEMORY = 192 << 20  # bytes


@dataclass(slots=True)
class LoadedModel:
    """A ready engine and everything that belongs to it."""

    engine: Engine
    executor: Executor
    name: str
    architecture: str
    eos_token_id: int | None  # the token written by a chat template
    path: Path
    hidden_size: int  # width of a vector of a text
    draft_executor: Executor | None = None
    no_drafts: str = ""  # see `ModelInfo`
    no_images: str = ""  # the same
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    keep_jobs: tuple[KeepJob, ...] = ()  # see `PackCacheOptions.later`


def load_engine(config: EngineConfig, progress: LoadProgress | None = None, *, is_replica: bool = False) -> LoadedModel:
    """Find, open and compile the model, and allocate its cache.

    progress: called with (phase, bytes loaded, total bytes) while weights are packed.
    is_replica: this is the first of `data_parallel_size` replicas. It leaves the other ones their share of cores and
    memory.
    Raises ModelLoadError, GraphError, InsufficientMemoryError (with the arithmetic) or UsageError.
    """
    if config.trust_remote_code:
        logger.warning(
            "trust_remote_code: Octavo never runs code from a repository. It has its own code for each architecture "
            "in docs/models.md; choose a model with one of these, or a GGUF file of the same model"
        )
    if config.node_rank > 0:
        raise UsageError(f"node_rank {config.node_rank} serves another machine's engine: start it with `octavo serve`")
    if config.data_parallel_size > 1 and not is_replica:
        raise UsageError(
            f"data_parallel_size is {config.data_parallel_size}; only `octavo serve` runs replicas: leave it out, or "
            "start a server and send requests to it"
        )
    with _no_collections():
        return _load_checkpoint(config, progress)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Disable garbage collection.

    Loading creates many long-lived objects, and scanning them takes a tenth of the time of a short start.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _load_checkpoint(config: EngineConfig, progress: LoadProgress | None) -> LoadedModel:
    report = progress and (lambda file, done, total: progress(f"downloading {file}", done, total))
    checkpoint = open_checkpoint(resolve_model(config.model, revision=config.revision, progress=report))
    vision: VisionPart | None = None
    try:
        _check_address_space()
        # Raise errors before the long work.
        defaults = sampling_defaults(checkpoint, config.generation_config).overridden(config.sampling_overrides)
        with ThreadPoolExecutor(1, "octavo-tokenizer") as background:
            tokenizer = _TokenizerInMaking(background, checkpoint, progress)
            model_len = config.max_model_len or checkpoint.config.max_position_embeddings
            _warn_excess(config, checkpoint.config.max_position_embeddings)
            vision = vision_of(config, checkpoint)
            if vision is not None:
                checkpoint = checkpoint.with_sight(vision.config.sight)
            graph = model_graph(checkpoint, model_len)
            check_options(config, graph)
            with found_draft_model(config, checkpoint, graph, tokenizer.result, model_len) as draft:
                return _load(config, checkpoint, vision, graph, tokenizer, defaults, draft)
    finally:
        checkpoint.close()
        if vision is not None:
            vision.close()


class _TokenizerInMaking:
    """Loads the tokenizer on a thread while the weights are packed.

    Packing runs mostly without the GIL, but the tokenizer library holds it for a long time. The tokenizer is therefore
    loaded once the packing threads are at work, or while packed weights are checked, because that does not need the
    GIL. If the address space is limited, it is loaded earlier, while there is room for it: a failed allocation would
    end the process.
    """

    def __init__(self, background: ThreadPoolExecutor, checkpoint: Checkpoint, progress: LoadProgress | None) -> None:
        self._background, self._checkpoint, self._progress = background, checkpoint, progress
        self._made: Future[Tokenizer] | None = None
        if address_space_limit() is not None:
            self._begin().exception()

    def report(self, phase: str, done: int, total: int) -> None:
        """Report the progress of the weights, and start the tokenizer when it is time."""
        if done or phase == CHECKING:
            self._begin()
        if self._progress is not None:
            self._progress(phase, done, total)

    def result(self) -> Tokenizer:
        """Wait for the tokenizer and return it. Raises ModelLoadError."""
        return self._begin().result()

    def _begin(self) -> Future[Tokenizer]:
        if self._made is None:
            self._made = self._background.submit(load_tokenizer, self._checkpoint)
        return self._made


def _check_address_space() -> None:
    """Check that the address space has room for the tokenizer. Its library ends the process if an allocation fails."""
    if address_space_limit() is not None and (available := host_memory().available_bytes) < _LEAST_MEMORY:
        raise InsufficientMemoryError(
            f"only {size(available)} of memory is free, but loading needs {size(_LEAST_MEMORY)} in addition to the "
            "weights: free some or raise the limit" + address_space_note()
        )


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    vision: VisionPart | None,
    graph: Graph,
    tokenizer: _TokenizerInMaking,
    defaults: SamplingDefaults,
    draft_model: DraftModel | None,
) -> LoadedModel:
    trained: int = checkpoint.config.max_position_embeddings
    model_len = config.max_model_len or trained
    limits = executor_limits(config, model_len, graph)
    compiled, used = limits, {parameter.name for parameter in graph.parameters}
    computed, head = graph, None if draft_model is None else draft_model.head
    if draft_model is not None and head is not None:
        used |= {parameter.name for parameter in draft_model.graph.parameters}
        compiled, computed = beside_head(limits), head.tapped(graph)
    reader = _reader(checkpoint, graph, used)
    warn_unused_weights(checkpoint, used, () if vision is None else vision.tensors)
    with ExitStack() as opened:
        executor, keep_jobs = _executor(config, checkpoint, computed, compiled, tokenizer.report, head)
        opened.callback(executor.close)
        vocabulary = tokenizer.result()
        encodings = _encodings(config, checkpoint, vision, reader, executor, opened, model_len)
        draft = None if draft_model is None else opened.enter_context(closing(draft_model.load(executor)))
        available = beside_draft(config, _cache_memory(config, executor, model_len), executor.cache_sizes, draft)
        plan = plan_cache(config, model_len, executor.cache_sizes, available)
        executor.allocate_cache(plan.num_blocks, config.block_size, plan.num_states)
        engine_limits = replace(
            _engine_limits(config, plan, limits, graph),
            vocab_size=checkpoint.config.vocab_size,
            longer_context=_longer_context(model_len, plan.max_model_len, trained),
            images=NO_IMAGES if vision is None else image_limits(vision),
            sources=source_limits(config, checkpoint, graph, model_len),
        )
        texts = text_model(graph, checkpoint.pooling, vocabulary, _vector_width(graph, checkpoint))
        heads = text_heads(graph, checkpoint, texts, vocabulary)
        identity = cache_identity(config, checkpoint, graph, executor)
        store = _store(config, identity, executor) if engine_limits.enable_prefix_caching else None
        engine = Engine(executor, vocabulary, engine_limits, texts, heads, identity, store)
        if encodings is not None:
            engine.see(encodings)
        engine.adapt_with(adapter_registry(config, checkpoint, graph, executor, limits))
        _use_drafts(engine, config, graph, draft, head)
        opened.pop_all()
    return LoadedModel(
        engine=engine,
        executor=executor,
        name=config.model,
        architecture=checkpoint.architecture,
        eos_token_id=template_eos_id(engine.tokenizer),
        path=checkpoint.path,
        hidden_size=texts.width,
        draft_executor=draft,
        no_images=why_no_images(config, checkpoint, vision),
        no_drafts=why_no_drafts(config, graph, plan.num_draft_states),
        sampling_defaults=defaults,
        keep_jobs=keep_jobs,
    )


def _reader(checkpoint: Checkpoint, graph: Graph, used: set[str]) -> Graph | None:
    """Return the graph of the encoder whose rows a decoder reads, or None if it reads none.

    used: receives the names of the encoder's weights.
    """
    if not source_width(graph):
        return None
    reader = encoder_graph(checkpoint)
    used |= {parameter.name for parameter in reader.parameters}
    return reader


def _engine_limits(config: EngineConfig, plan: CachePlan, limits: ExecutorLimits, graph: Graph) -> EngineLimits:
    """Return the engine's limits, derived from the options and the graph."""
    return EngineLimits(
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        num_states=plan.num_states,
        num_draft_states=plan.num_draft_states,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_outputs=limits.max_num_outputs,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        vocab_size=graph.output.cols,
        # An answer's first tokens carry the keys of its source, which is not one of them.
        enable_prefix_caching=config.enable_prefix_caching and not (graph.takes_whole_texts or source_width(graph)),
        max_itl_s=config.max_itl / 1e3 if graph.generates else 0.0,
        span_width=span_width(graph),
        adapter_slots=0 if limits.adapters is None else limits.adapters.slots,
    )


def _encodings(
    config: EngineConfig,
    checkpoint: Checkpoint,
    vision: VisionPart | None,
    reader: Graph | None,
    executor: Executor,
    opened: ExitStack,
    model_len: int,
) -> Encodings | None:
    """Return the encodings of a model that encodes images or source texts with a second graph.

    The encoder runs on the executor's threads.
    """
    if vision is not None:
        encodings = load_encodings(config, vision)
    elif reader is not None:
        encodings = load_sources(config, checkpoint, reader, executor, model_len)
    else:
        return None
    opened.callback(encodings.encoder.close)
    share_threads(encodings.encoder.executor, executor)
    return encodings


def _store(config: EngineConfig, identity: CacheIdentity, executor: Executor) -> BlockStore | None:
    below = _prompt_store(config, identity)
    if config.host_cache_memory is None:
        return below
    from octavo.engine.kv.host_store import HostStore

    limit_bytes = parse_bytes("host_cache_memory", config.host_cache_memory)
    return HostStore(limit_bytes, executor.cache_sizes.moved_bytes(config.block_size), below)


def _prompt_store(config: EngineConfig, identity: CacheIdentity) -> BlockStore | None:
    if config.prompt_cache_dir is None:
        return None
    if identity.is_unique:
        logger.warning("prompts are not kept: the model's files were modified just now and may still change")
        return None
    # Most engines have no sources.
    from octavo.engine.kv.disk_store import open_disk_store

    root, label = env.user_path(config.prompt_cache_dir), f"{config.model} ({config.kv_dtype})"
    store = open_disk_store(root, identity, config.prompt_cache_bytes, label)
    if store is not None:
        store.keeps_private = config.prompt_cache_private
    return store


def _use_drafts(
    engine: Engine, config: EngineConfig, graph: Graph, draft: Executor | None, head: DraftHead | None
) -> None:
    sources = draft_sources(config, graph, engine.limits.num_draft_states)
    if sources or draft is not None:
        engine.speculate(sources)
    if draft is not None:
        share_threads(draft, engine.executor)
        engine.draft_with(draft, SpeculativeConfig.of(config).num_speculative_tokens, head)


def _cache_memory(config: EngineConfig, executor: Executor, model_len: int) -> int:
    """Return the bytes that are available with the model loaded. The cache gets a share of them."""
    if config.num_ranks > 1:
        return _cache_memory_of_ranks(config, cast("GroupExecutor", executor))
    backend = backend_of(config)
    of_replica = executor.weight_bytes + executor.workspace_bytes - executor.mapped_bytes
    if isinstance(backend, SplitBackend):
        budget = backend.cpu_memory()
    else:
        budget = memory_of_rank(config, of_replica, executor.weight_bytes)
    # Weights in a mapped file count as available memory, but a cache in their place would force rereading them.
    available = max(budget.available_bytes - executor.mapped_bytes, 0)
    if executor.paging is not None:
        available = memory_for_cache(config, executor.paging, executor.cache_sizes, budget, model_len)
    if isinstance(backend, SplitBackend):
        return backend.cache_memory(executor, MemoryBudget(available)).available_bytes
    return available


def _cache_memory_of_ranks(config: EngineConfig, group: GroupExecutor) -> int:
    """Like `_cache_memory`. All ranks have the same number of blocks, so the rank with the least memory decides."""
    of_replica = group.weight_bytes + group.workspace_bytes - group.mapped_bytes
    here = memory_of_rank(config, of_replica, group.own_weight_bytes).available_bytes - group.mapped_bytes
    if has_own_memory(config):
        here -= group.workspace_bytes
    return max(min(here, group.available_bytes), 0)


def _warn_excess(config: EngineConfig, trained: int) -> None:
    """Warn about a context longer than the model was trained for, and about more threads than CPUs."""
    if config.max_model_len is not None and config.max_model_len > trained:
        logger.warning(
            "max_model_len %d exceeds the model's context of %d tokens; leave it out to use %d",
            config.max_model_len,
            trained,
            trained,
        )
    num_cpus = len(processors.allowed_cpus())
    if config.num_threads > num_cpus:
        logger.warning(
            "num_threads %d exceeds the %d CPUs that this process may use and makes every step slower; leave it out",
            config.num_threads,
            num_cpus,
        )


def _vector_width(graph: Graph, checkpoint: Checkpoint) -> int:
    """Return the width of a text's or token's vector, after the dense layers."""
    takes_rows = graph.takes_whole_texts and not checkpoint.pooling.is_classifier
    return checkpoint.pooling.width(graph.output.cols if takes_rows else checkpoint.config.vector_width)


def _longer_context(wanted: int, fitting: int, trained: int) -> str:
    """Return the end of an error message about the length of a prompt."""
    if fitting < wanted:
        return ", or raise kv_cache_memory or free memory: the model allows more"
    return f", or raise max_model_len, up to {trained} for this model" if fitting < trained else ""


def _executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    graph: Graph,
    limits: ExecutorLimits,
    progress: LoadProgress,
    head: DraftHead | None,
) -> tuple[Executor, tuple[KeepJob, ...]]:
    """Return the executor and the job that keeps packed weights on disk.

    Ranks keep them only on request, because mapped files are slower.
    """
    if config.num_ranks == 1:
        later: list[KeepJob] = []
        return compile_graph(config, checkpoint, graph, limits, progress, later=later), tuple(later)
    # Importing it takes 50 ms, and most models have one rank.
    from octavo.engine.ranks.leading import lead

    return lead(config, checkpoint, graph, limits, progress, head.taps if head else ()), ()
