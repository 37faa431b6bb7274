"""What of a request only the model can judge: its tokens, its length."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

from octavo.errors import UsageError
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.tokenizer.tokenizer import Tokenizer


def check_prompt(prompt_token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt as a list of ints. Raises UsageError if it is empty, too long, or holds what is no token id."""
    if not prompt_token_ids:
        raise UsageError("the prompt is empty; give at least one token")
    if len(prompt_token_ids) >= max_model_len:
        raise UsageError(
            f"the prompt has {len(prompt_token_ids)} tokens; with a context of {max_model_len} tokens it can have at "
            f"most {max_model_len - 1}, so that one new token has room. Shorten it, or raise max_model_len"
        )
    wrong = [item for item in prompt_token_ids if isinstance(item, bool) or not isinstance(item, numbers.Integral)]
    if wrong:
        raise UsageError(f"prompt token ids must be integers, not {wrong[0]!r}")
    token_ids = [int(item) for item in prompt_token_ids]
    _check_range("the prompt", (min(token_ids), max(token_ids)), vocab_size)
    return token_ids


def check_token_ids(params: SamplingParams | BeamSearchParams, vocab_size: int) -> None:
    """Raises UsageError if the parameters name a token that the model does not have."""
    if isinstance(params, BeamSearchParams):
        if params.beam_width > vocab_size:
            raise UsageError(f"beam_width is {params.beam_width}; the model has only {vocab_size} tokens")
        return
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
        _check_range(name, getattr(params, name) or (), vocab_size)


def find_bad_words(
    params: SamplingParams | BeamSearchParams, tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The token sequences of the bad words, each at the start of a text and after a space."""
    if isinstance(params, BeamSearchParams):
        return ()
    spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
    encoded = [tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings]
    for token_ids in encoded:
        _check_range("bad_words", token_ids, vocab_size)
    return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))


def _check_range(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise UsageError(f"{name} holds token id {token_id}; this model has ids 0 to {vocab_size - 1}")
