"""Loads a model by name into a ready engine, and computes the memory that a model will take."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from octavo.backends import CHECKING, PACKING, Backend, Executor, ExecutorLimits, PackCacheOptions, Paging, RankGroup
from octavo.backends.memory import MemoryBudget, Sizes, address_space_limit, address_space_note, host_memory
from octavo.backends.split import SplitBackend, SplitSizes
from octavo.config import EngineConfig, LoadProgress
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.engine.loading.devices import backend_of, has_own_memory, own_memory, step_tokens
from octavo.engine.loading.held_weights import held_weights
from octavo.engine.loading.larger_than_memory import (
    MIN_MODEL_LEN,
    memory_for_cache,
    paging_note,
    part_in_main_memory,
    resident_bytes,
)
from octavo.engine.loading.model_identity import cache_identity
from octavo.engine.loading.progress_bar import size
from octavo.engine.loading.weight_notes import size_notes
from octavo.engine.texts.text_heads import text_heads
from octavo.engine.texts.text_model import text_model
from octavo.errors import GraphError, InsufficientMemoryError, ModelLoadError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.cache import STATES_PER_SEAT, CacheSizes
from octavo.loader.checkpoint import Checkpoint, open_checkpoint, warn_unused_weights
from octavo.loader.generation_config import SamplingDefaults, sampling_defaults
from octavo.loader.hub import resolve_model
from octavo.loader.tensor_files import Weights
from octavo.models import build_graph
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.distributed.executor import GroupExecutor

logger = logging.getLogger(__name__)

_LEAST_MEMORY = 192 << 20  # bytes
_EXTRA_OUTPUTS = 16  # beside those of the running sequences
_MAX_LOGITS_ROWS = 128  # rows of logits that are held at once: a step of log-probabilities of a prompt has more
_RACY_S = 2.1  # after which the time stamps of a file identify its content


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of the cache, and the context and the number of sequences that it allows."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    num_states: int  # slots for the states of sequences


@dataclass(slots=True)
class LoadedModel:
    """An engine with what belongs to it."""

    engine: Engine
    executor: Executor
    name: str
    architecture: str
    eos_token_id: int | None  # the one that a chat template writes
    path: Path
    hidden_size: int  # width of a vector of a text
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def load_engine(config: EngineConfig, progress: LoadProgress | None = None, *, is_replica: bool = False) -> LoadedModel:
    """Finds, opens and compiles the model, and gives it a cache.

    progress: called with (phase, bytes loaded, bytes in all) while weights are packed.
    is_replica: the first of `data_parallel_size`, which leaves the others their share of cores and memory.
    Raises ModelLoadError, GraphError, InsufficientMemoryError (with the arithmetic) or UsageError.
    """
    if config.trust_remote_code:
        logger.warning(
            "trust_remote_code: code from a repository is never run. Octavo has its own code for each architecture of "
            "docs/models.md; take a model of one of these, or a GGUF file of the same model"
        )
    if config.node_rank > 0:
        raise UsageError(f"node_rank {config.node_rank} helps another machine: start it with `octavo serve`")
    if config.data_parallel_size > 1 and not is_replica:
        raise UsageError(
            f"data_parallel_size is {config.data_parallel_size}; only `octavo serve` has replicas: leave it out, or "
            "start a server and send it the requests"
        )
    checkpoint = open_checkpoint(resolve_model(config.model, revision=config.revision))
    try:
        _check_address_space()
        defaults = sampling_defaults(checkpoint, config.generation_config)  # an error comes before the long work
        with ThreadPoolExecutor(1, "octavo-tokenizer") as background:
            tokenizer = _TokenizerInMaking(background, checkpoint, progress)
            return _load(config, checkpoint, tokenizer, defaults)
    finally:
        checkpoint.close()


class _TokenizerInMaking:
    """The vocabulary, made on a thread while the weights are packed, which mostly runs without the GIL.

    The library keeps the GIL for long, so it begins when the threads that pack are at work; those that check packed
    weights need no GIL. With a limit on the address space it begins before, while there is room for what it takes: it
    would end the process.
    """

    def __init__(self, background: ThreadPoolExecutor, checkpoint: Checkpoint, progress: LoadProgress | None) -> None:
        self._background, self._checkpoint, self._progress = background, checkpoint, progress
        self._made: Future[Tokenizer] | None = None
        if address_space_limit() is not None:
            self._begin().exception()

    def report(self, phase: str, done: int, total: int) -> None:
        """The progress of the weights."""
        if done or phase == CHECKING:
            self._begin()
        if self._progress is not None:
            self._progress(phase, done, total)

    def result(self) -> Tokenizer:
        """Raises ModelLoadError."""
        return self._begin().result()

    def _begin(self) -> Future[Tokenizer]:
        if self._made is None:
            self._made = self._background.submit(load_tokenizer, self._checkpoint)
        return self._made


def _check_address_space() -> None:
    """The tokenizer's library ends the process if an allocation fails, which a limit on the address space provokes."""
    if address_space_limit() is not None and (available := host_memory().available_bytes) < _LEAST_MEMORY:
        raise InsufficientMemoryError(
            f"only {size(available)} of memory is free, and {size(_LEAST_MEMORY)} are needed beside the weights"
            + address_space_note()
        )


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: _TokenizerInMaking,
    defaults: SamplingDefaults,
) -> LoadedModel:
    trained: int = checkpoint.config.max_position_embeddings
    model_len = config.max_model_len or trained
    graph = model_graph(checkpoint, model_len)
    limits = executor_limits(config, model_len, graph)
    warn_unused_weights(checkpoint, {parameter.name for parameter in graph.parameters})
    executor = _executor(config, checkpoint, graph, limits, tokenizer.report)
    try:
        plan = plan_cache(config, model_len, executor.cache_sizes, _cache_memory(config, executor, model_len))
        executor.allocate_cache(plan.num_blocks, config.block_size, plan.num_states)
        engine_limits = EngineLimits(
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            num_states=plan.num_states,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_outputs=limits.max_num_outputs,
            block_size=config.block_size,
            num_blocks=plan.num_blocks,
            vocab_size=checkpoint.config.vocab_size,
            enable_prefix_caching=config.enable_prefix_caching and not graph.takes_whole_texts,
            longer_context=_longer_context(model_len, plan.max_model_len, trained),
            max_itl_s=config.max_itl / 1e3 if graph.generates else 0.0,
        )
        vocabulary = tokenizer.result()
        texts = text_model(graph, checkpoint.pooling, vocabulary)
        heads = text_heads(graph, checkpoint, texts, vocabulary)
        identity = cache_identity(config, checkpoint, graph, executor)
        engine = Engine(executor, vocabulary, engine_limits, texts, heads, identity)
    except BaseException:
        executor.close()
        raise
    if model_len > trained:
        logger.warning("max_model_len %d exceeds the %d that the model was made for", model_len, trained)
    return LoadedModel(
        engine=engine,
        executor=executor,
        name=config.model,
        architecture=checkpoint.architecture,
        eos_token_id=_eos_token_id(checkpoint, engine.tokenizer),
        path=checkpoint.path,
        hidden_size=checkpoint.pooling.width(checkpoint.config.hidden_size),
        sampling_defaults=defaults,
    )


def _cache_memory(config: EngineConfig, executor: Executor, model_len: int) -> int:
    """The available bytes from which the cache of a loaded model takes its part."""
    if config.num_ranks > 1:
        return _cache_memory_of_ranks(config, cast("GroupExecutor", executor))
    backend = backend_of(config)
    of_replica = executor.weight_bytes + executor.workspace_bytes - executor.mapped_bytes
    if isinstance(backend, SplitBackend):
        budget = backend.cpu_memory()
    else:
        budget = memory_of_rank(config, of_replica, executor.weight_bytes)
    # Weights in a mapped file count as available memory, but a cache in their place would have them read again.
    available = max(budget.available_bytes - executor.mapped_bytes, 0)
    if executor.paging is not None:
        available = memory_for_cache(config, executor.paging, executor.cache_sizes, budget, model_len)
    if isinstance(backend, SplitBackend):
        return backend.cache_memory(executor, MemoryBudget(available)).available_bytes
    return available


def _cache_memory_of_ranks(config: EngineConfig, group: GroupExecutor) -> int:
    """As `_cache_memory`. All ranks have as many blocks: the one with the least memory decides."""
    of_replica = group.weight_bytes + group.workspace_bytes - group.mapped_bytes
    here = memory_of_rank(config, of_replica, group.own_weight_bytes).available_bytes - group.mapped_bytes
    if has_own_memory(config):
        here -= group.workspace_bytes
    return max(min(here, group.available_bytes), 0)


def _longer_context(wanted: int, fitting: int, trained: int) -> str:
    """The end of an error about the length of a prompt."""
    if fitting < wanted:
        return ", or raise kv_cache_memory or free memory: the model itself allows more"
    return f", or raise max_model_len, for this model up to {trained}" if fitting < trained else ""


def _eos_token_id(checkpoint: Checkpoint, tokenizer: Tokenizer) -> int | None:
    named = checkpoint.file.metadata.get("tokenizer.ggml.eos_token_id")
    return named if isinstance(named, int) else min(tokenizer.eos_token_ids, default=None)


def executor_limits(config: EngineConfig, model_len: int, graph: Graph) -> ExecutorLimits:
    """The limits of the engine's steps. model_len: tokens of the longest request; an encoder takes it in one step."""
    step, outputs = step_tokens(config), config.max_num_seqs + _EXTRA_OUTPUTS
    return ExecutorLimits(
        max_num_batched_tokens=max(step, model_len) if graph.takes_whole_texts else step,
        max_num_seqs=config.max_num_seqs,
        max_num_outputs=max(step, outputs) if graph.generates else outputs,
        max_model_len=model_len,
        max_logits_rows=min(outputs, _MAX_LOGITS_ROWS),
    )


def model_graph(checkpoint: Checkpoint, context: int) -> Graph:
    """The model for sequences of at most so many tokens. Raises ModelLoadError if its weights do not fit it."""
    config, classifies = checkpoint.config.for_length(context), checkpoint.pooling.is_classifier
    try:
        return build_graph(checkpoint.architecture, config, checkpoint.weights.shapes, classifies=classifies)
    except GraphError as error:  # a weight is missing or has another shape than the configuration says
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error


def model_sizes(
    checkpoint: Checkpoint,
    config: EngineConfig,
    context: int,
    graph: Graph | None = None,
    backend: Backend | None = None,
) -> Sizes:
    """The sizes on a backend; None: that of `config`. context: tokens of the longest request.

    graph: the model's, if known. Raises ModelLoadError if the weights do not fit the configuration.
    """
    if graph is None:
        graph = model_graph(checkpoint, context)
    return (backend or backend_of(config)).sizes(
        graph,
        held(checkpoint, config, graph),
        executor_limits(config, context, graph),
        num_threads=config.num_threads,
        kv_dtype=config.kv_dtype,
    )


def held(checkpoint: Checkpoint, config: EngineConfig, graph: Graph) -> Weights:
    """The weights in the types that the options ask for."""
    return held_weights(checkpoint, graph, config.dtype, config.quantization)


def free_memory(config: EngineConfig) -> MemoryBudget:
    """The free memory of the device of `config`'s backend."""
    return backend_of(config).memory()


def memory_of_rank(config: EngineConfig, replica_bytes: int = 0, held_bytes: int = 0) -> MemoryBudget:
    """The share of the free memory that one of the ranks on this machine may take.

    replica_bytes: that each further replica will take before its cache. held_bytes: of the rank's weights, once loaded.
    """
    if has_own_memory(config):
        return own_memory(config, held_bytes)
    available = free_memory(config).available_bytes - (config.data_parallel_size - 1) * replica_bytes
    return MemoryBudget(available // (len(config.ranks_here) * config.data_parallel_size))


def threads_of_rank(config: EngineConfig) -> int:
    """Compute threads of each rank of this machine: as asked, or a fair share of its cores. 0: the backend decides."""
    if config.num_threads or config.num_ranks * config.data_parallel_size == 1:
        return config.num_threads
    num_processes = len(config.ranks_here) * config.data_parallel_size
    return max(backend_of(config).describe().num_threads // num_processes, 1)


def _executor(
    config: EngineConfig, checkpoint: Checkpoint, graph: Graph, limits: ExecutorLimits, progress: LoadProgress
) -> Executor:
    if config.num_ranks == 1:
        return compile_graph(config, checkpoint, graph, limits, progress)
    from octavo.engine.ranks.rank import lead  # which loads ranks with the functions of this module

    return lead(config, checkpoint, graph, limits, progress)


def compile_graph(
    config: EngineConfig,
    checkpoint: Checkpoint,
    graph: Graph,
    limits: ExecutorLimits,
    progress: LoadProgress | None,
    group: RankGroup | None = None,
) -> Executor:
    """The executor of a model, or of a rank's part of it. group: that of the rank's tensors.

    Raises InsufficientMemoryError or GraphError.
    """
    sizes = model_sizes(checkpoint, config, limits.max_model_len, graph)
    for note in size_notes(config, sizes):
        logger.warning("%s: %s", checkpoint.path, note)
    resident = _resident_bytes(config, checkpoint.path, sizes, limits.max_model_len)
    if resident is not None and config.num_ranks * config.data_parallel_size > 1:
        who = "a rank" if config.num_ranks > 1 else "a replica"
        raise InsufficientMemoryError(
            f"{checkpoint.path}: {who} needs {size(sizes.weight_bytes + sizes.workspace_bytes)}, and of the memory "
            f"{size(memory_of_rank(config).usable_bytes)} are its share; several processes cannot run a model from "
            "disk: take more machines, a smaller model, or one process"
        )
    executor = (group or backend_of(config)).compile(
        sizes,
        held(checkpoint, config, graph),
        limits,
        num_threads=threads_of_rank(config),
        progress=_quantizing(progress, config.quantization),
        pack_cache=_pack_cache(config, checkpoint, resident),
        kv_dtype=config.kv_dtype,
    )
    if executor.paging is not None:
        note = paging_note(executor.paging, executor.weight_bytes, checkpoint.config.num_layers)
        logger.warning("%s: %s", checkpoint.path, note)
    return executor


def _resident_bytes(config: EngineConfig, path: Path, sizes: Sizes, model_len: int) -> int | None:
    """Of the weights in main memory or, without any there, of all: see `resident_bytes`."""
    backend = backend_of(config)
    if not isinstance(sizes, SplitSizes) or not isinstance(backend, SplitBackend):
        return resident_bytes(config, path, sizes, memory_of_rank(config), model_len)
    logger.info("%s: %s%s", path, sizes.placement, f" ({sizes.reason})" if sizes.reason else "")
    config, here = part_in_main_memory(config, sizes)
    return resident_bytes(config, path, here, backend.cpu_memory(), model_len)


def _quantizing(progress: LoadProgress | None, method: str | None) -> LoadProgress | None:
    """The same reports, which say that weights are quantized before they are packed."""
    if progress is None or method is None:
        return progress
    return lambda phase, done, total: progress(f"quantizing to {method}" if phase == PACKING else phase, done, total)


def expected_paging(checkpoint: Checkpoint, config: EngineConfig, sizes: Sizes, resident: int) -> Paging:
    """The paging of a model that is not loaded. resident: see `PackCacheOptions`. Reads the disk for half a second."""
    options = _pack_cache(config, checkpoint, resident)
    assert options is not None  # a part of the weights may stay in memory
    weights, sample = held(checkpoint, config, sizes.graph), max(_files(checkpoint), key=_file_bytes)
    return backend_of(config).expected_paging(sizes, weights, options, sample)


def _files(checkpoint: Checkpoint) -> set[Path]:
    return {tensor.file for tensor in checkpoint.file.tensors.values()}


def _file_bytes(path: Path) -> int:
    return path.stat().st_size


def _pack_cache(config: EngineConfig, checkpoint: Checkpoint, resident: int | None) -> PackCacheOptions | None:
    if not config.pack_cache and resident is None:
        return None
    identity = checkpoint.file.identity()
    if identity is None and resident is not None:  # the model cannot run without
        time.sleep(_RACY_S)
        identity = checkpoint.file.identity()
    if identity is None:
        logger.info("%s changed just now: its packed weights are kept from a later start on", checkpoint.path)
        return None
    return PackCacheOptions(identity, config.pack_cache_bytes, resident)


def plan_cache(config: EngineConfig, model_len: int, sizes: CacheSizes, available_bytes: int) -> CachePlan:
    """The number of blocks of the cache, and the context that fits.

    model_len: the requested context. available_bytes: memory that the process may still take. With kv_cache_memory the
    cache takes exactly that. Otherwise it takes half of the free memory, or more if one request of full length needs it
    and leaves the headroom, but no more than max_num_seqs full requests could use.
    Raises InsufficientMemoryError with the arithmetic.
    """
    block, step = config.block_size, step_tokens(config)
    block_bytes, request_bytes = sizes.block_bytes(block), sizes.sequence_bytes(model_len, block, step)
    blocks_per_request = sizes.layout.max_blocks(model_len, block, step)
    usable = MemoryBudget(available_bytes).usable_bytes
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
        if budget > usable:
            raise InsufficientMemoryError(
                f"kv_cache_memory is {size(budget)}, but of the {size(available_bytes)} that are free after loading "
                f"only {size(usable)} can be used; "
                + (f"lower it to {usable >> 20}MiB" if usable >> 20 else "free some, or take a smaller model")
                + address_space_note()
            )
    else:
        budget = max(usable // 2, min(request_bytes, usable))
    num_seqs = _plan_seats(config.max_num_seqs, sizes, budget, blocks_per_request * block_bytes, available_bytes)
    num_blocks = max(budget - num_seqs * sizes.seat_bytes, 0) // block_bytes
    num_blocks = min(num_blocks, blocks_per_request * num_seqs)
    fitting = sizes.layout.max_tokens(num_blocks, block, step, model_len)
    states = f", the states of a sequence {size(sizes.seat_bytes)}" if sizes.state_bytes else ""
    arithmetic = (
        f"one token takes {sizes.token_bytes / 1024:g} KiB of cache{states}, and {size(budget)} hold {fitting} tokens"
    )
    if config.max_model_len is not None and fitting < model_len:
        lower = f"Lower max_model_len to {fitting}, or" if fitting > 1 else "At least"
        more = _more_cache(request_bytes, available_bytes)
        raise InsufficientMemoryError(
            f"max_model_len {model_len} does not fit: {arithmetic}. {lower} {more}{address_space_note()}"
        )
    least = min(MIN_MODEL_LEN, model_len)
    if fitting < least:
        raise InsufficientMemoryError(
            f"not even a short request fits: {arithmetic}, the least useful number is {least}. "
            f"Free {size(sizes.sequence_bytes(least, block, step) - budget)} more, or take a smaller model"
            + address_space_note()
        )
    if fitting < model_len:
        logger.warning(
            "the context is %d tokens instead of the model's %d: %s. For the full length %s",
            fitting,
            model_len,
            arithmetic,
            _more_cache(request_bytes, available_bytes),
        )
    if sizes.token_bytes:  # an encoder has no cache
        cache_size = size(num_blocks * block_bytes)
        logger.info("KV cache: %d blocks of %d tokens in %s, %s", num_blocks, block, sizes.format, cache_size)
    return CachePlan(
        num_blocks, min(model_len, fitting), num_seqs, STATES_PER_SEAT * num_seqs if sizes.state_bytes else 0
    )


def _more_cache(needed: int, available_bytes: int) -> str:
    """The way to a cache of `needed` bytes: an option, if that value would be taken, or more free memory."""
    mebibytes = -(-needed >> 20)
    if mebibytes << 20 <= MemoryBudget(available_bytes).usable_bytes:
        return f"give kv_cache_memory {mebibytes}MiB"
    return f"free {size(MemoryBudget.with_usable(needed) - available_bytes)} more"


def _plan_seats(wanted: int, sizes: CacheSizes, budget: int, request_blocks: int, available_bytes: int) -> int:
    """The number of sequences that may run at once, each with its states: at most half of the budget is for those.

    request_blocks: the bytes of one request of full length without its states.
    """
    if not sizes.state_bytes:
        return wanted
    fitting = max(min(budget // 2, budget - request_blocks) // sizes.seat_bytes, 1)
    if fitting < wanted:
        states = wanted * sizes.seat_bytes
        logger.warning(
            "at most %d sequences run at the same time instead of %d: the states of each take %s. For all of them %s",
            fitting,
            wanted,
            size(sizes.seat_bytes),
            _more_cache(states + max(states, request_blocks), available_bytes),
        )
    return min(wanted, fitting)
