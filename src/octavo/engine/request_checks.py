"""Checks of a request that need the model or its cache: its tokens and its length."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence

from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.request import Request
from octavo.errors import UsageError
from octavo.generation_request import Params
from octavo.sampling_params import SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer


def check_prompt(
    prompt_token_ids: Sequence[int], vocab_size: int, max_model_len: int, *, is_text: bool, is_answered: bool = True
) -> list[int]:
    """The prompt as a list of ints. Raises UsageError if it is empty, too long, or has an invalid token id.

    is_answered: True if at least one token follows it; False for texts to embed.
    """
    if not prompt_token_ids:
        code = "invalid_value" if is_text else "empty_array"
        raise UsageError("the prompt is empty; give at least one token", param="prompt", code=code)
    longest = max_model_len - is_answered
    if len(prompt_token_ids) > longest:
        raise UsageError(
            f"the prompt has {len(prompt_token_ids)} tokens; with a context of {max_model_len} tokens it can have at "
            f"most {longest}{', so that one new token has room' if is_answered else ''}. Shorten it, or raise "
            "max_model_len",
            param="prompt",
            code="context_length_exceeded",
        )
    wrong = [item for item in prompt_token_ids if isinstance(item, bool) or not isinstance(item, numbers.Integral)]
    if wrong:
        raise UsageError(
            f"prompt token ids must be integers, not {wrong[0]!r:.80}", param="prompt", code="invalid_type"
        )
    token_ids = [int(item) for item in prompt_token_ids]
    _check_range("prompt", (min(token_ids), max(token_ids)), vocab_size)
    return token_ids


def check_params(params: Params, vocab_size: int, room: int) -> None:
    """Raises UsageError if the parameters name a token that the model lacks, or exceed its limits.

    vocab_size: number of token ids. room: tokens of an answer that fit into the context.
    """
    if params.num_seats > vocab_size:
        raise UsageError(
            f"beam_width is {params.num_seats}; the model has only {vocab_size} tokens",
            param="beam_width",
            code="integer_above_max_value",
        )
    sampling = params.sampling
    if sampling.min_tokens > room:
        raise UsageError(
            f"min_tokens is {sampling.min_tokens}, but the context has room for only {room} after this prompt; "
            "lower it",
            param="min_tokens",
            code="integer_above_max_value",
        )
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
        _check_range(name, getattr(sampling, name) or (), vocab_size)


def check_fits(request: Request, cache: KVCacheManager, max_num_seqs: int) -> None:
    """Raises UsageError with the arithmetic if the request could not run even alone."""
    seats = request.num_seats
    if seats > max_num_seqs:
        raise UsageError(
            f"beam_width is {seats}, but only {max_num_seqs} sequences run at once; lower it or raise max_num_seqs",
            param="beam_width",
            code="integer_above_max_value",
        )
    # The last token of an answer is never computed, and beams share the full blocks of their prompt.
    shared = cache.num_shared_blocks(request.num_prompt_tokens) if seats > 1 else 0
    needed = shared + seats * (cache.max_blocks(request.max_total_tokens - request.params.is_answered) - shared)
    if needed > cache.pool.num_blocks:
        raise UsageError(
            f"a request of {request.num_prompt_tokens} prompt tokens and up to "
            f"{request.max_total_tokens - request.num_prompt_tokens} new ones in {seats} sequence(s) needs "
            f"{needed} cache blocks of {cache.block_size} tokens; the cache has {cache.pool.num_blocks}. "
            f"Lower max_tokens{' or beam_width' if seats > 1 else ''}, or give the cache more memory",
            param="max_tokens",
            code="context_length_exceeded",
        )


def find_bad_words(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The token sequences of the bad words, each with and without a leading space."""
    spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
    encoded = [tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings]
    for token_ids in encoded:
        _check_range("bad_words", token_ids, vocab_size)
    return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))


def _check_range(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            shown = token_id if abs(token_id) < 2**256 else "with thousands of digits"
            raise UsageError(
                f"{name} holds token id {shown}; this model has ids 0 to {vocab_size - 1}",
                param=name,
                code="token_out_of_range",
            )
