"""`octavo plan`: the memory that a model needs, and the options that fit this machine, without loading it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import click

from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.options import Options, with_model_options
from octavo.cli.show import bits_per_weight
from octavo.cli.terminal import find_model, write_facts, write_json
from octavo.config import EngineConfig
from octavo.engine.progress import size
from octavo.errors import InsufficientMemoryError, UsageError

if TYPE_CHECKING:
    from octavo.backends.memory import MemoryBudget
    from octavo.loader.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Sizes in bytes, lengths in tokens."""

    model: str
    architecture: str
    quantization: str | None
    bits_per_weight: float  # as stored
    weight_bytes: int
    kv_dtype: str
    kv_bytes_per_token: int
    state_bytes: int  # of one sequence, whatever its length
    workspace_bytes: int
    available_bytes: int  # of this machine or its container, before loading
    headroom_bytes: int
    model_context: int
    users: int
    context: int  # of each user
    kv_bytes: int  # of all users at that context
    total_bytes: int
    fits: bool
    largest_context: int  # of each of the users; 0: not even the weights fit
    largest_users: int  # with that context
    bytes_read_per_token: int  # in a decode step of all users at that context, which reads the weights only once
    flops_per_token: int
    warnings: tuple[str, ...]  # types of weights that take more memory than in the file


@click.command(cls=HeadedCommand)
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--ctx", type=click.IntRange(min=1), help="tokens of prompt and answer per user [default: the model's context]"
)
@click.option("--users", type=click.IntRange(1, 4096), default=1, show_default=True, help="concurrent requests")
@click.option("--json", "as_json", is_flag=True, help="as JSON")
@with_model_options
def plan(*, model: str, ctx: int | None, users: int, as_json: bool, engine_options: Options) -> None:
    """Show how much memory a model needs, and how much context fits this machine. Reads only the headers.

    MODEL is a path, a hub id or a short name.
    The exit code is 3 if the context given by --ctx does not fit or, without --ctx, if no context fits.
    """
    from octavo.engine.load import free_memory
    from octavo.loader.checkpoint import open_checkpoint

    EngineConfig.resolve(model, engine_options)  # an error comes before a download
    path, options = find_model(model, engine_options)
    with closing(open_checkpoint(path)) as checkpoint:
        config = EngineConfig.resolve(model, options)
        needs = memory_needs(checkpoint, ctx, users, free_memory(config), config)
    if as_json:
        write_json(asdict(needs))
    else:
        _write(needs)
    if not (needs.fits if ctx is not None else needs.largest_context):
        raise InsufficientMemoryError(
            f"{model} does not fit: {needs.users} x {needs.context:,} tokens need {size(needs.total_bytes)}, "
            f"{size(needs.available_bytes - needs.headroom_bytes)} can be used; {_advice(needs)}"
        )


def memory_needs(
    checkpoint: Checkpoint,
    context: int | None,
    users: int,
    memory: MemoryBudget,
    config: EngineConfig | None = None,
) -> MemoryNeeds:
    """The memory calculation, from the graph and the headers. context: None is the model's own.

    config: options of the engine; max_num_seqs is raised to `users`.
    """
    from octavo.engine.load import growth_notes, model_sizes
    from octavo.graph.cost import graph_cost
    from octavo.graph.ops import StepSizes

    model_context: int = checkpoint.config.max_position_embeddings
    wanted = context or model_context
    if wanted > 1 << 30:
        raise UsageError(f"--ctx is {wanted}; it must be from 1 to {1 << 30}")
    defaults = config or EngineConfig()
    sequences = max(users, defaults.max_num_seqs)
    config = replace(
        defaults, max_num_seqs=sequences, max_num_batched_tokens=max(defaults.max_num_batched_tokens, sequences)
    )
    sizes = model_sizes(checkpoint, config, wanted)
    weight_bytes, workspace_bytes = sizes.weight_bytes, sizes.workspace_bytes
    cache, block, step_tokens = sizes.cache, config.block_size, config.max_num_batched_tokens
    left = memory.without(weight_bytes + workspace_bytes)
    num_blocks = max(left.usable_bytes - users * cache.seat_bytes, 0) // cache.block_bytes(block)
    step_sizes = StepSizes(users, users, users, wanted, sizes.kv_element_bytes)
    step = graph_cost(sizes.graph, step_sizes, sizes.weights)
    per_request = cache.layout.max_blocks(wanted, block, step_tokens)
    kv_bytes = users * cache.sequence_bytes(wanted, block, step_tokens)
    longest = cache.layout.max_tokens(num_blocks // users, block, step_tokens, model_context)
    return MemoryNeeds(
        model=str(checkpoint.path),
        architecture=checkpoint.architecture,
        quantization=checkpoint.quantization,
        bits_per_weight=bits_per_weight(checkpoint),
        weight_bytes=weight_bytes,
        kv_dtype=config.kv_dtype,
        kv_bytes_per_token=cache.token_bytes,
        state_bytes=cache.seat_bytes,
        workspace_bytes=workspace_bytes,
        available_bytes=memory.available_bytes,
        headroom_bytes=left.headroom_bytes,
        model_context=model_context,
        users=users,
        context=wanted,
        kv_bytes=kv_bytes,
        total_bytes=weight_bytes + workspace_bytes + kv_bytes,
        fits=users * per_request <= num_blocks,
        largest_context=min(longest, model_context),
        largest_users=left.usable_bytes // cache.sequence_bytes(wanted, block, step_tokens),
        bytes_read_per_token=step.bytes_read // users,
        flops_per_token=step.flops // users,
        warnings=tuple(growth_notes(sizes)),
    )


def _write(needs: MemoryNeeds) -> None:
    fit = "fits" if needs.fits else "does not fit"
    write_facts(
        {
            "model": f"{needs.model} ({needs.architecture})",
            "weights": f"{size(needs.weight_bytes)}; {needs.bits_per_weight:.2f} bits per weight in the file"
            + (f", {needs.quantization}" if needs.quantization else ""),
            "workspace": size(needs.workspace_bytes),
            "KV cache": f"{needs.kv_dtype}, {size(needs.kv_bytes_per_token)} a token"
            + (f", {size(needs.state_bytes)} a sequence for its states; " if needs.state_bytes else "; ")
            + f"{size(needs.kv_bytes)} for {needs.users} x {needs.context:,} tokens",
            "in all": f"{size(needs.total_bytes)} of {size(needs.available_bytes)} free, "
            f"{size(needs.headroom_bytes)} of which stay free: {fit}",
            "largest context": f"{needs.largest_context:,} tokens for {_count(needs.users)} "
            f"(the model's own: {needs.model_context:,})",
            "most users": f"{needs.largest_users:,} with {needs.context:,} tokens each",
            "one token": f"reads {size(needs.bytes_read_per_token)}, computes {needs.flops_per_token / 1e9:.3g} GFLOP "
            f"at {needs.context:,} tokens of context",
            **({"warning": "; ".join(needs.warnings)} if needs.warnings else {}),
            **({"options": _options(needs)} if needs.fits else {}),
        }
    )


def _options(needs: MemoryNeeds) -> str:
    """Options that reserve the whole cache: by default it gets at most half of the free memory."""
    mebibytes = -(-needs.kv_bytes // (1 << 20))
    kv_dtype = "" if needs.kv_dtype == EngineConfig.kv_dtype else f" --kv-dtype {needs.kv_dtype}"
    return f"--max-model-len {needs.context} --kv-cache-memory {mebibytes}MiB{kv_dtype}"


def _count(users: int) -> str:
    return "one user" if users == 1 else f"each of {users} users"


def _advice(needs: MemoryNeeds) -> str:
    if needs.largest_context:
        return f"{needs.largest_context:,} tokens for {_count(needs.users)} would fit"
    return (
        "use a smaller model or quantization or fewer users, or free memory; a model larger than the memory runs from "
        "disk, slowly"
    )
