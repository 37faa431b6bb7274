"""`octavo plan`: show the memory a model needs and the options that fit this machine, without loading it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from octavo.cli import simulate
from octavo.cli.command import HeadedCommand
from octavo.cli.completion import complete_model
from octavo.cli.options import Options, with_plan_options
from octavo.cli.show import experts_read, parameters
from octavo.cli.terminal import find_headers, write_facts, write_json
from octavo.config import EngineConfig
from octavo.engine.loading.progress_bar import size
from octavo.errors import InsufficientMemoryError, ModelLoadError, UsageError
from octavo.loader.catalogue import draft_for

if TYPE_CHECKING:
    from octavo.engine.loading.device_needs import DeviceNeeds
    from octavo.engine.loading.draft_needs import DraftNeeds
    from octavo.engine.loading.encoder import ImageNeeds
    from octavo.engine.loading.memory_needs import FromDisk, MemoryNeeds
    from octavo.engine.loading.rank_needs import RankNeeds
    from octavo.loader.checkpoint import Checkpoint


@click.command(cls=HeadedCommand)
@click.argument("model", shell_complete=complete_model)
@click.option(
    "--ctx", type=click.IntRange(min=1), help="tokens of prompt and answer per user [default: the model's context]"
)
@click.option("--users", type=click.IntRange(1, 4096), default=1, show_default=True, help="concurrent requests")
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@click.option("--simulate", "simulated", metavar="NAME=NUMBER,...", help=simulate.HELP)
@with_plan_options
def plan(
    *, model: str, ctx: int | None, users: int, as_json: bool, simulated: str | None, engine_options: Options
) -> None:
    """Show how much memory a model needs and how much context fits.

    MODEL is a path, a hub id or a short name. Only the headers of its files are read; for a model that is not on this
    machine, only these are downloaded. A model larger than the memory runs from disk; the plan measures the disk and
    shows how fast that is. The exit code is 3 if the model cannot run with the context given by --ctx or, without
    --ctx, with any context.
    """
    from octavo.engine.loading.devices import free_memory
    from octavo.engine.loading.memory_needs import memory_needs

    if simulated is not None:  # the simulation tries numbers of ranks itself
        whole_experts = bool(engine_options.pop("enable_expert_parallel", False))
    EngineConfig.resolve(model, engine_options)  # reports errors before a download
    with _headers(model, engine_options) as (checkpoint, place, options):
        config = EngineConfig.resolve(model, options)
        context = _checked_context(ctx or checkpoint.config.max_position_embeddings)
        if simulated is not None:
            simulate.write_simulation(
                checkpoint, config, simulated, context, users, whole_experts=whole_experts, as_json=as_json
            )
            return
        draft = _draft(config, checkpoint, context)
        needs = memory_needs(checkpoint, ctx, users, free_memory(config), config, draft)
        needs = needs if place is None else replace(needs, model=place)
        suggestion = _suggestion(config, checkpoint, model, context)
    if as_json:
        suggested = {"model": suggestion} if isinstance(suggestion, str) else suggestion and asdict(suggestion)
        write_json({**asdict(needs), "draft_model": suggested})
    else:
        _write(needs, suggestion)
    if needs.from_disk is None and not (needs.fits if ctx is not None else needs.largest_context):
        raise InsufficientMemoryError(
            f"{model} does not fit: {needs.users} x {needs.context:,} tokens need {size(needs.total_bytes)}, but "
            f"{size(needs.available_bytes - needs.headroom_bytes)} is available; {_advice(needs)}"
        )


def _checked_context(wanted: int) -> int:
    if wanted > 1 << 30:
        raise UsageError(f"--ctx is {wanted}; it must be from 1 to {1 << 30}")
    return wanted


@contextmanager
def _headers(model: str, options: Options) -> Iterator[tuple[Checkpoint, str | None, Options]]:
    """Open a model's headers. See `find_headers`."""
    from octavo.loader.checkpoint import open_checkpoint

    with find_headers(model, options) as (path, place, left), closing(open_checkpoint(path)) as checkpoint:
        yield checkpoint, place, left


def _draft(config: EngineConfig, checkpoint: Checkpoint, context: int) -> DraftNeeds | None:
    """Return the memory that drafting needs, or None if nothing drafts.

    This is the memory of the draft model or head given by the options, or else of the model's own head. Raises
    UsageError and ModelLoadError.
    """
    # These imports load the engine.
    from octavo.engine.loading.draft_model import check_vocabulary
    from octavo.engine.loading.draft_needs import draft_needs, head_needs, separate_head_needs
    from octavo.loader.checkpoint import open_checkpoint
    from octavo.tokenizer import load_tokenizer

    if config.draft_model is None:
        return head_needs(config, checkpoint, context)
    with find_headers(config.draft_model, {}) as (path, _, _):
        if (needs := separate_head_needs(config, checkpoint, path, config.draft_model, context)) is not None:
            return needs
        with closing(open_checkpoint(path)) as draft:
            check_vocabulary(load_tokenizer(checkpoint), load_tokenizer(draft), config.draft_model)
            return draft_needs(config, checkpoint, draft, config.draft_model, context)


def _suggestion(config: EngineConfig, checkpoint: Checkpoint, model: str, context: int) -> DraftNeeds | str | None:
    """Return the memory needs of the draft model that the catalogue suggests.

    If its headers cannot be read, only its name is returned. The result is None if there is no suggestion, or if the
    options already name a draft model.
    """
    from octavo.engine.loading.draft_needs import draft_needs
    from octavo.loader.checkpoint import open_checkpoint
    from octavo.loader.hub import resolve_model
    from octavo.loader.remote_headers import remote_headers

    name = draft_for(model)
    if name is None or config.draft_model is not None:
        return None
    try:
        with (
            remote_headers(name) as path,
            closing(open_checkpoint(path or resolve_model(name, offline=True))) as draft,
        ):
            return draft_needs(config, checkpoint, draft, name, context)
    except (ModelLoadError, UsageError):
        return name


def _draft_facts(draft: DraftNeeds) -> str:
    name = "the model's own head" if draft.is_head else f"-md {draft.model}"
    return (
        f"{name}: {size(draft.weight_bytes + draft.workspace_bytes)} more, "
        f"{size(draft.kv_bytes_per_token)} of cache per token; a draft token costs {draft.cost:.2f} of a step; "
        f"{draft.gain:.1f} times as fast if 8 of 10 draft tokens are right"
    )


def _suggestion_facts(needs: MemoryNeeds, suggestion: DraftNeeds | str | None) -> dict[str, str]:
    """Return the line about the draft model in use, or about a suggested one that would speed up generation."""
    if needs.draft is not None:
        cache = f"its cache for these users, {size(needs.draft.kv_bytes)}, is counted above"
        return {"draft model": f"{_draft_facts(needs.draft)}; {cache}, as it is"}
    if isinstance(suggestion, str):
        return {"draft model": f"-md {suggestion}: no estimate, because its header cannot be read now"}
    return {"draft model": _draft_facts(suggestion)} if suggestion is not None and suggestion.gain > 1 else {}


def _write(needs: MemoryNeeds, suggestion: DraftNeeds | str | None) -> None:
    fit = "fits" if needs.fits else "does not fit" if needs.from_disk is None else "runs from disk"
    write_facts(
        {
            "model": f"{needs.model} ({needs.architecture})",
            "parameters": parameters(needs.num_parameters, needs.num_active_parameters, needs.experts),
            "weights": f"{size(needs.weight_bytes)}; {needs.bits_per_weight:.2f} bits per weight in the file"
            + (f", {needs.quantization}" if needs.quantization else ""),
            "workspace": size(needs.workspace_bytes),
            "KV cache": f"{needs.kv_format}, {size(needs.kv_bytes_per_token)} per token"
            + (f", {size(needs.state_bytes)} per sequence for states; " if needs.state_bytes else "; ")
            + f"{size(needs.kv_bytes)} for {needs.users} x {needs.context:,} tokens",
            "in all": f"{size(needs.total_bytes)} of {size(needs.available_bytes)} free, "
            f"{size(needs.headroom_bytes)} kept free: {fit}",
            "largest context": f"{needs.largest_context:,} tokens for {_count(needs.users)} "
            f"(the model's own: {needs.model_context:,})",
            "max users": f"{needs.largest_users:,} with {needs.context:,} tokens each",
            **({"from disk": _disk_facts(needs.from_disk)} if needs.from_disk else {}),
            "one token": f"reads {size(needs.bytes_read_per_token)}, computes {needs.flops_per_token / 1e9:.3g} GFLOP "
            f"at {needs.context:,} tokens of context"
            + (f"; experts: {experts_read(needs.experts)}" if needs.experts else ""),
            **_suggestion_facts(needs, suggestion),
            **({"adapters": _adapter_facts(needs)} if needs.adapter_bytes else {}),
            **({"images": _image_facts(needs.images)} if needs.images else {}),
            **({"encoder": f"{size(needs.reader_bytes)}, counted above"} if needs.reader_bytes else {}),
            **({"GPU": _gpu_facts(needs.gpu)} if needs.gpu else {}),
            **{f"rank {each.rank}": _rank_facts(each) for each in needs.ranks},
            **({"replicas": _replica_facts(needs)} if needs.replicas > 1 else {}),
            **({"warning": "; ".join(needs.warnings)} if needs.warnings else {}),
            **({"options": _options(needs)} if needs.fits or needs.from_disk else {}),
        }
    )


def _adapter_facts(needs: MemoryNeeds) -> str:
    return f"{size(needs.adapter_bytes)} for max_loras adapters of max_lora_rank on all weights, counted above"


def _replica_facts(needs: MemoryNeeds) -> str:
    return (
        f"{needs.replicas}, {size(needs.replicas * needs.total_bytes)} in total; the lines above are for one, with its "
        "share of the users and of the memory"
    )


def _rank_facts(rank: RankNeeds) -> str:
    exchange = (
        f"; sends its stage {size(rank.exchanged_bytes_per_token)} per token in {rank.exchanges} exchanges per step"
    )
    logits = (
        f", and {size(rank.logits_bytes_per_row)} per row of logits that cannot be sampled from the best candidates"
    )
    return (
        f"stage {rank.stage}, part {rank.part}: weights {size(rank.weight_bytes)}, workspace "
        f"{size(rank.workspace_bytes)}, KV cache {size(rank.kv_bytes_per_token)} per token"
        + (exchange if rank.exchanges else "")
        + (logits if rank.logits_bytes_per_row else "")
        + (f"; experts {rank.experts[0]} to {sum(rank.experts) - 1}" if rank.experts else "")
        + (f"; passes on {size(rank.handed_on_bytes_per_token)} per token" if rank.handed_on_bytes_per_token else "")
    )


def _image_facts(images: ImageNeeds) -> str:
    return (
        f"encoder {size(images.weight_bytes)}, its workspace {size(images.workspace_bytes)}, at most "
        f"{size(images.cache_bytes)} of encoded images, all included above; 1024 x 1024 pixels take "
        f"{images.square_tokens:,} tokens"
    )


def _gpu_facts(gpu: DeviceNeeds) -> str:
    text = (
        f"{gpu.gpu_layers} of {gpu.num_layers} layers, weights {size(gpu.gpu_weight_bytes)}, workspace "
        f"{size(gpu.gpu_workspace_bytes)}, KV cache {size(gpu.gpu_kv_bytes_per_token)} per token, within "
        f"{size(gpu.limit_bytes)}; "
    )
    if gpu.streamed_layers:
        text += f"{gpu.streamed_layers} are copied there in each step, {size(gpu.cpu_weight_bytes)}; "
    elif gpu.cpu_weight_bytes:
        what = f"the experts of {gpu.cpu_experts} layers" if gpu.cpu_experts else "the other layers"
        text += (
            f"the CPU runs {what}, weights {size(gpu.cpu_weight_bytes)}, KV cache "
            f"{size(gpu.cpu_kv_bytes_per_token)} per token; "
        )
    reason = f"; {gpu.reason}" if gpu.reason else ""
    return f"{text}at most {gpu.tokens_per_s:.3g} tokens/s from rates measured just now{reason}"


def _disk_facts(disk: FromDisk) -> str:
    return (
        f"{disk.resident_layers} of {disk.num_layers} layers ({size(disk.resident_bytes)}) stay in memory; a token "
        f"reads {size(disk.bytes_per_token)} at {size(disk.disk_bytes_per_s)}/s, measured: at most "
        f"{disk.tokens_per_s:.2g} tokens/s for each user"
    )


def _options(needs: MemoryNeeds) -> str:
    """Return the options that reserve the whole cache. By default it gets at most half of the free memory."""
    mebibytes = -(-needs.kv_bytes // (1 << 20))
    kv_dtype = "" if needs.kv_dtype == EngineConfig.kv_dtype else f" --kv-dtype {needs.kv_dtype}"
    draft = "" if needs.draft is None or needs.draft.is_head else f" -md {needs.draft.model}"
    return f"--max-model-len {needs.context} --kv-cache-memory {mebibytes}MiB{kv_dtype}{draft}"


def _count(users: int) -> str:
    return "one user" if users == 1 else f"each of {users} users"


def _advice(needs: MemoryNeeds) -> str:
    if needs.largest_context:
        return f"{needs.largest_context:,} tokens for {_count(needs.users)} would fit"
    return f"{needs.problem}; use a smaller model or quantization, a shorter --ctx or fewer users, or free memory"
