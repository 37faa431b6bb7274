"""The memory that a model needs with an engine's options: in main memory, on a GPU, on several ranks or from disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.backends.memory import MemoryBudget, Sizes
from octavo.backends.split import SplitBackend
from octavo.backends.split_sizes import SplitSizes, cache_room
from octavo.config import EngineConfig
from octavo.engine.loading.cache_plan import num_draft_slots
from octavo.engine.loading.compile_graph import expected_paging
from octavo.engine.loading.device_needs import DeviceNeeds, device_needs
from octavo.engine.loading.devices import backend_of, step_tokens
from octavo.engine.loading.draft_needs import DraftNeeds
from octavo.engine.loading.encoder import ImageNeeds, image_needs
from octavo.engine.loading.larger_than_memory import disk_problem, part_in_main_memory, resident_bytes
from octavo.engine.loading.model_graph import model_sizes
from octavo.engine.loading.rank_needs import RankNeeds, rank_needs
from octavo.engine.loading.source_encoder import encoder_bytes
from octavo.engine.loading.weight_notes import size_notes
from octavo.errors import InsufficientMemoryError
from octavo.graph.cache import CacheSizes
from octavo.graph.cost import Cost, ExpertCost, expert_cost, graph_cost
from octavo.graph.ops.adapted_moe import AdaptedMoE
from octavo.graph.ops.base import StepSizes
from octavo.graph.ops.low_rank import AddToEmbedding, BesideWeights
from octavo.loader.checkpoint import Checkpoint

_DEFAULTS = EngineConfig()


@dataclass(frozen=True, slots=True)
class FromDisk:
    """A model larger than memory whose weights are read from disk. Sizes are in bytes."""

    memory_bytes: int  # memory that the weights may take
    resident_bytes: int  # size of the weights that stay in memory
    resident_layers: int  # layers that are never read from the disk
    num_layers: int
    bytes_per_token: int  # read from the disk
    disk_bytes_per_s: float  # measured
    tokens_per_s: float  # at most, for a single user


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The needs of a model. Sizes are in bytes, lengths in tokens.

    With several replicas, these are the needs of one replica with its share of the memory.
    """

    model: str
    architecture: str
    quantization: str | None
    num_parameters: int
    num_active_parameters: int  # without the experts that a token does not use
    experts: ExpertCost | None  # cost of a mixture's experts
    bits_per_weight: float  # as stored
    weight_bytes: int
    kv_dtype: str  # as requested
    kv_format: str  # actual format, which may differ in some layers
    kv_bytes_per_token: int
    state_bytes: int  # per sequence, whatever its length
    workspace_bytes: int
    available_bytes: int  # on this machine or its container, before loading
    headroom_bytes: int
    model_context: int
    replicas: int
    users: int  # per replica
    context: int  # per user
    kv_bytes: int  # for all users at that context
    total_bytes: int
    fits: bool  # everything is in memory
    from_disk: FromDisk | None  # if it does not fit but can run
    problem: str | None  # why it cannot run from disk either
    largest_context: int  # for each of the users; 0 if not even the weights fit
    largest_users: int  # with that context
    bytes_read_per_token: int  # in a decode step of all users at that context; weights are read once
    flops_per_token: int
    warnings: tuple[str, ...]  # about weight types that take more memory than in the file
    ranks: tuple[RankNeeds, ...]  # needs of each process; empty if one computes everything
    gpu: DeviceNeeds | None  # with a GPU
    draft: DraftNeeds | None = None  # included in the sums
    adapter_bytes: int = 0  # for max_loras adapters of max_lora_rank, included in the sums
    images: ImageNeeds | None = None  # needs of the vision part, included in the sums
    reader_bytes: int = 0  # size of a source encoder, included in the sums


def memory_needs(
    checkpoint: Checkpoint,
    context: int | None,
    users: int,
    memory: MemoryBudget,
    config: EngineConfig = _DEFAULTS,
    draft: DraftNeeds | None = None,
) -> MemoryNeeds:
    """Calculate a model's memory needs from its graph and the files' headers, with `max_num_seqs` raised to `users`.

    context: tokens of each user, by default the model's own limit.
    """
    model_context: int = checkpoint.config.max_position_embeddings
    wanted, (config, users, memory) = context or model_context, _of_replica(config, users, memory)
    sizes = _sizes(checkpoint, config, wanted, users if context else 0)
    images, own, reader = image_needs(config, checkpoint), sizes.cache, encoder_bytes(config, checkpoint, sizes, wanted)
    memory = _both_memories(config, sizes, memory).without(beside := _beside(images, draft, config, sizes) + reader)
    sizes = sizes if draft is None else _with_twins(sizes, draft)
    cache, block, most = sizes.cache, config.block_size, step_tokens(config)
    room = _room(checkpoint, config, sizes, memory, context, users)
    longest = cache.layout.max_tokens(room.num_blocks // users, block, most, model_context)
    kv_bytes, both_bytes = (_kv_bytes(config, each, wanted, users, room) for each in (own, cache))
    experts, step = expert_cost(sizes.graph, sizes.weights), _step_cost(sizes, users, wanted)
    return MemoryNeeds(
        model=str(checkpoint.path),
        architecture=checkpoint.architecture,
        quantization=checkpoint.quantization,
        num_parameters=checkpoint.num_parameters,
        num_active_parameters=checkpoint.num_parameters - (experts.inactive_parameters if experts else 0),
        experts=experts,
        bits_per_weight=checkpoint.bits_per_weight,
        weight_bytes=sizes.weight_bytes,
        kv_dtype=config.kv_dtype,
        kv_format=cache.format,
        kv_bytes_per_token=cache.token_bytes,
        state_bytes=cache.bytes_per_seq,
        workspace_bytes=sizes.workspace_bytes,
        available_bytes=memory.available_bytes + beside,
        headroom_bytes=room.headroom_bytes,
        model_context=model_context,
        replicas=config.data_parallel_size,
        users=users,
        context=wanted,
        kv_bytes=kv_bytes,
        total_bytes=sizes.weight_bytes + sizes.workspace_bytes + both_bytes + beside,
        fits=room.fits,
        from_disk=room.from_disk,
        problem=room.problem,
        largest_context=min(longest, model_context),
        largest_users=room.cache_bytes // cache.sequence_bytes(wanted, block, most),
        bytes_read_per_token=step.bytes_read // users,
        flops_per_token=step.flops // users,
        warnings=tuple(size_notes(config, sizes)),
        ranks=tuple(rank_needs(checkpoint, config, wanted)) if config.num_ranks > 1 else (),
        gpu=_with_disk(device_needs(config, sizes, users, wanted), room.from_disk, users),
        adapter_bytes=_adapter_bytes(config, sizes),
        draft=None if draft is None else replace(draft, kv_bytes=both_bytes - kv_bytes),
        images=images,
        reader_bytes=reader,
    )


def _step_cost(sizes: Sizes, users: int, context: int) -> Cost:
    """Return the cost of a step that computes one token per user."""
    return graph_cost(sizes.graph, StepSizes(users, users, users, context, sizes.kv_element_bytes), sizes.weights)


def _adapter_bytes(config: EngineConfig, sizes: Sizes) -> int:
    """Return the bytes of the adapters that steps may read.

    All are assumed to have the highest rank on all weights, in 16-bit numbers.
    """
    if not config.takes_adapters:
        return 0
    ops = [node.op for node in sizes.graph.nodes if isinstance(node.op, BesideWeights)]
    # Few adapters change embeddings or experts; these are counted once they are read.
    ops = [op for op in ops if not isinstance(op, AddToEmbedding | AdaptedMoE)]
    widths = sum(op.heads * (weight.shape[-1] + weight.shape[-2]) for op in ops for weight in op.weights)
    return 2 * widths * config.max_lora_rank * config.max_loras


def _kv_bytes(config: EngineConfig, sizes: CacheSizes, context: int, users: int, room: _Room) -> int:
    """Return the bytes of the cache for `users`, including states kept before drafts, as far as they fit."""
    taken = users * sizes.sequence_bytes(context, config.block_size, step_tokens(config))
    drafts = num_draft_slots(config, sizes, users) * sizes.state_bytes
    return taken + min(drafts, max(room.cache_bytes - taken, 0))


def _beside(images: ImageNeeds | None, draft: DraftNeeds | None, config: EngineConfig, sizes: Sizes) -> int:
    """Return the bytes of the vision part, of the draft model without its cache, and of the adapters."""
    seeing = 0 if images is None else images.total_bytes
    return seeing + _adapter_bytes(config, sizes) + (0 if draft is None else draft.weight_bytes + draft.workspace_bytes)


def _with_twins(sizes: Sizes, draft: DraftNeeds) -> Sizes:
    """Return the sizes when each block of the cache has a twin in the draft model's cache."""
    both = sizes.cache.block_token_bytes + draft.block_token_bytes
    return replace(sizes, cache=replace(sizes.cache, block_token_bytes=both))


def _with_disk(gpu: DeviceNeeds | None, disk: FromDisk | None, users: int) -> DeviceNeeds | None:
    """Return the GPU's needs with the speed adjusted if the CPU's layers run from disk. All users share each read."""
    if gpu is None or disk is None:
        return gpu
    seconds = users / gpu.tokens_per_s + disk.bytes_per_token / disk.disk_bytes_per_s
    return replace(gpu, tokens_per_s=users / seconds)


def _sizes(checkpoint: Checkpoint, config: EngineConfig, context: int, users: int) -> Sizes:
    """Return the sizes of the model.

    users: number of users for whose caches a GPU must leave room; 0 for the room that a start without options leaves.
    """
    sizes = model_sizes(checkpoint, config, context)
    if not users or not isinstance(backend_of(config), SplitBackend):
        return sizes
    kv_bytes = users * sizes.cache.sequence_bytes(context, config.block_size, step_tokens(config))
    return model_sizes(checkpoint, replace(config, kv_cache_memory=kv_bytes or None), context)


def _of_replica(config: EngineConfig, users: int, memory: MemoryBudget) -> tuple[EngineConfig, int, MemoryBudget]:
    """Return the options for `users`, and the users and memory of each replica."""
    users = -(-users // config.data_parallel_size)
    sequences = max(users, config.max_num_seqs)
    step = max(step_tokens(config), sequences)
    share = memory.without(memory.available_bytes - memory.available_bytes // config.data_parallel_size)
    return replace(config, max_num_seqs=sequences, max_num_batched_tokens=step), users, share


def _both_memories(config: EngineConfig, sizes: Sizes, memory: MemoryBudget) -> MemoryBudget:
    """Return the usable memory: `memory` without a GPU, the GPU's memory, or both together for a split model."""
    backend = backend_of(config)
    if not isinstance(backend, SplitBackend):
        return memory
    if not isinstance(sizes, SplitSizes):
        return backend.device_limit()
    places = ((backend.device_limit(), True), (backend.cpu_memory(), False))
    left = []
    for budget, is_device in places:
        here = sizes.on(device=is_device)
        left.append(budget.usable_bytes - here.weight_bytes - here.workspace_bytes)
    room = cache_room(sizes, *left) if min(left) >= 0 else 0
    return MemoryBudget(MemoryBudget.with_usable(room)).without(-sizes.weight_bytes - sizes.workspace_bytes)


@dataclass(frozen=True, slots=True)
class _Room:
    """The room that the weights leave for the KV cache.

    fits, from_disk, problem: as in `MemoryNeeds`.
    cache_bytes: bytes for blocks and states.
    num_blocks: number of blocks after the users' states are allocated.
    """

    cache_bytes: int
    num_blocks: int
    headroom_bytes: int
    fits: bool
    from_disk: FromDisk | None = None
    problem: str | None = None


def _room(
    checkpoint: Checkpoint, config: EngineConfig, sizes: Sizes, memory: MemoryBudget, context: int | None, users: int
) -> _Room:
    """Return the room for the cache.

    If the model does not fit into memory, this is the room that is left when its weights are read from disk.
    """
    cache, block, most = sizes.cache, config.block_size, step_tokens(config)
    wanted = context or checkpoint.config.max_position_embeddings

    def num_blocks(cache_bytes: int) -> int:
        return max(cache_bytes - users * cache.bytes_per_seq, 0) // cache.block_bytes(block)

    left = memory.without(sizes.weight_bytes + sizes.workspace_bytes)
    blocks = num_blocks(left.usable_bytes)
    fits = users * cache.layout.max_blocks(wanted, block, most) <= blocks
    if fits or (context is None and blocks >= users * cache.layout.max_blocks(1, block, most)):
        return _Room(left.usable_bytes, blocks, left.headroom_bytes, fits)
    if context is not None:
        kv_bytes = users * cache.sequence_bytes(context, block, most)
        config = replace(config, max_model_len=max(context, 2), kv_cache_memory=kv_bytes or None)
    from_disk, problem = _from_disk(checkpoint, config, sizes, memory, wanted)
    if from_disk is None:
        return _Room(left.usable_bytes, blocks, left.headroom_bytes, False, None, problem)
    cache_bytes = _cache_beside(config, sizes, memory, from_disk.memory_bytes)
    return _Room(cache_bytes, num_blocks(cache_bytes), memory.headroom_bytes, False, from_disk)


def _cache_beside(config: EngineConfig, sizes: Sizes, memory: MemoryBudget, matrix_bytes: int) -> int:
    """Return the bytes left for the cache if matrices are read from disk and take matrix_bytes of main memory."""
    backend = backend_of(config)
    if not isinstance(sizes, SplitSizes) or not isinstance(backend, SplitBackend):
        return max(memory.usable_bytes - sizes.workspace_bytes - matrix_bytes, 0)
    on_device, on_cpu = sizes.on(device=True), sizes.on(device=False)
    device_bytes = backend.device_limit().usable_bytes - on_device.weight_bytes - on_device.workspace_bytes
    return cache_room(sizes, device_bytes, backend.cpu_memory().usable_bytes - on_cpu.workspace_bytes - matrix_bytes)


def _from_disk(
    checkpoint: Checkpoint, config: EngineConfig, sizes: Sizes, memory: MemoryBudget, model_len: int
) -> tuple[FromDisk | None, str | None]:
    """Return the speed and memory of the model when it runs from disk, or the reason why it cannot.

    config: the options with which it starts.
    For a split model this concerns the part on the CPU; the part on the GPU stays there.
    """
    num_layers, whole = checkpoint.config.num_layers, sizes
    if isinstance(sizes, SplitSizes):
        backend = backend_of(config)
        assert isinstance(backend, SplitBackend)
        memory = backend.cpu_memory()
        num_layers -= 0 if sizes.placement.streamed_layers else sizes.placement.device_layers
        config, sizes = part_in_main_memory(config, sizes)
    try:
        resident = resident_bytes(config, checkpoint.path, sizes, memory, model_len)
    except InsufficientMemoryError:
        resident = None
    if resident is None:
        return None, "it does not run from disk either, because workspace and KV cache alone do not fit"
    if problem := disk_problem(config, whole):
        return None, f"it does not run from disk either: {problem}"
    streams = isinstance(whole, SplitSizes) and bool(whole.placement.streamed_layers)
    paging = expected_paging(checkpoint, config, whole if streams else sizes, resident)
    return FromDisk(
        memory_bytes=paging.memory_bytes,
        resident_bytes=paging.resident_bytes,
        resident_layers=paging.resident_layers,
        num_layers=num_layers,
        bytes_per_token=paging.bytes_per_token,
        disk_bytes_per_s=paging.bytes_per_s,
        tokens_per_s=paging.tokens_per_s,
    ), None
