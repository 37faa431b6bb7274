"""Plans the size of the KV cache, and the context and number of sequences that fit into it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from octavo.backends.memory import MemoryBudget, address_space_note
from octavo.config import EngineConfig
from octavo.engine.loading.devices import backend_name, step_tokens
from octavo.engine.loading.larger_than_memory import MIN_MODEL_LEN
from octavo.engine.loading.progress_bar import size
from octavo.errors import InsufficientMemoryError
from octavo.graph.cache import STATES_PER_SEQUENCE, CacheSizes
from octavo.speculative_config import MAX_STATE_DRAFTS, SpeculativeConfig

logger = logging.getLogger(__name__)

_DRAFTING_SEQS = 4  # sequences with drafts at the same time if drafts take states; with more, few pay off


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of the cache, and the context and number of sequences that fit into it."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    num_states: int  # slots for the states of sequences
    num_draft_states: int = 0  # the part of num_states for states before drafts


def plan_cache(config: EngineConfig, model_len: int, sizes: CacheSizes, available_bytes: int) -> CachePlan:
    """Return the number of blocks in the cache, and the context that fits.

    With kv_cache_memory the cache takes exactly that much. Otherwise it takes half of the usable memory, which is the
    free memory (available_bytes) without the headroom. If one request of full length (model_len) needs more than half,
    the cache takes what that request needs, up to all of the usable memory. It never takes more than max_num_seqs full
    requests could use. Raises InsufficientMemoryError with the arithmetic.
    """
    block, step = config.block_size, step_tokens(config)
    block_bytes, request_bytes = sizes.block_bytes(block), sizes.sequence_bytes(model_len, block, step)
    blocks_per_request = sizes.layout.max_blocks(model_len, block, step)
    usable = MemoryBudget(available_bytes).usable_bytes
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
        if budget > usable:
            raise InsufficientMemoryError(
                f"kv_cache_memory is {size(budget)}, but only {size(usable)} of the {size(available_bytes)} free "
                "after loading can be used; "
                + (f"lower it to {usable >> 20}MiB" if usable >> 20 else "free some memory or use a smaller model")
                + address_space_note()
            )
    else:
        budget = max(usable // 2, min(request_bytes, usable))
    num_seqs = _plan_num_seqs(config.max_num_seqs, sizes, budget, blocks_per_request * block_bytes, available_bytes)
    spare = budget - num_seqs * sizes.bytes_per_seq - blocks_per_request * block_bytes
    num_draft_states = min(num_draft_slots(config, sizes, num_seqs), max(spare, 0) // max(sizes.state_bytes, 1))
    num_states = STATES_PER_SEQUENCE * num_seqs + num_draft_states if sizes.state_bytes else 0
    num_blocks = max(budget - num_states * sizes.state_bytes, 0) // block_bytes
    num_blocks = min(num_blocks, blocks_per_request * num_seqs)
    fitting = sizes.layout.max_tokens(num_blocks, block, step, model_len)
    states = f", the states of a sequence take {size(sizes.bytes_per_seq)}" if sizes.state_bytes else ""
    arithmetic = (
        f"one token takes {sizes.token_bytes / 1024:g} KiB of cache{states}, and {size(budget)} holds {fitting} tokens"
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
            f"not even a short request fits: {arithmetic}, but at least {least} are needed. Free "
            f"{size(sizes.sequence_bytes(least, block, step) - budget)} more or use a smaller model"
            + address_space_note()
        )
    if fitting < model_len:
        logger.warning(
            "the context is %d tokens instead of the model's %d: %s. For the full length, %s",
            fitting,
            model_len,
            arithmetic,
            _more_cache(request_bytes, available_bytes),
        )
    if sizes.token_bytes:  # an encoder has no cache
        cache_size = size(num_blocks * block_bytes)
        logger.info("KV cache: %d blocks of %d tokens in %s, %s", num_blocks, block, sizes.format, cache_size)
    return CachePlan(num_blocks, min(model_len, fitting), num_seqs, num_states, num_draft_states)


def wants_drafts(config: EngineConfig) -> bool:
    """True if the options ask for drafts, as they do by default on the CPU."""
    method = SpeculativeConfig.of(config).method
    return method != "off" and (method != "auto" or backend_name(config) == "cpu")


def num_draft_slots(config: EngineConfig, sizes: CacheSizes, num_seqs: int) -> int:
    """Return the number of slots that drafts of num_seqs running sequences can use, or 0 for a model without states."""
    if not sizes.state_bytes or not wants_drafts(config):
        return 0
    return MAX_STATE_DRAFTS * min(num_seqs, _DRAFTING_SEQS)


def _more_cache(needed: int, available_bytes: int) -> str:
    """Explain how to get a cache of `needed` bytes: by an option, if it would be accepted, or by freeing memory."""
    mebibytes = -(-needed >> 20)
    if mebibytes << 20 <= MemoryBudget(available_bytes).usable_bytes:
        return f"use kv_cache_memory {mebibytes}MiB"
    return f"free {size(MemoryBudget.with_usable(needed) - available_bytes)} more"


def _plan_num_seqs(wanted: int, sizes: CacheSizes, budget: int, request_blocks: int, available_bytes: int) -> int:
    """Return the number of sequences that may run at once. Their states take at most half of the budget.

    request_blocks: bytes of one full-length request, without its states.
    """
    if not sizes.state_bytes:
        return wanted
    fitting = max(min(budget // 2, budget - request_blocks) // sizes.bytes_per_seq, 1)
    if fitting < wanted:
        states = wanted * sizes.bytes_per_seq
        logger.warning(
            "at most %d sequences run at the same time instead of %d: each needs %s for its states. To run all of "
            "them, %s",
            fitting,
            wanted,
            size(sizes.bytes_per_seq),
            _more_cache(states + max(states, request_blocks), available_bytes),
        )
    return min(wanted, fitting)
