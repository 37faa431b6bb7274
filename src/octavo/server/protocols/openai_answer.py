"""What the answers of OpenAI's routes have in common: usage, timings, log-probabilities, names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from octavo import __version__
from octavo.outputs import Logprob
from octavo.server.generation.events import TokenLogprobs, Usage
from octavo.server.models.served_model import ServedModel
from octavo.tokenizer.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes this for what is all but impossible.
MIN_LOGPROB = -9999.0


@lru_cache(maxsize=64)
def _fingerprint(path: str, num_threads: int) -> str:
    return "fp_" + hashlib.sha256(f"{__version__}\n{path}\n{num_threads}".encode()).hexdigest()[:10]


def system_fingerprint(model: ServedModel) -> str:
    """Changes where the same seed may give another answer: with the program, the model and the number of threads."""
    return _fingerprint(model.info.path, model.info.num_threads)


def running_usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """What is known of the usage before the end."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def usage_object(usage: Usage, num_truncated_tokens: int | None) -> dict[str, Any]:
    """OpenAI's `usage`. num_truncated_tokens: None unless the request asked for truncation."""
    counts: dict[str, Any] = {
        **running_usage(usage.num_prompt_tokens, usage.num_completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }
    if num_truncated_tokens is not None:
        counts["truncated_tokens"] = num_truncated_tokens
    return counts


def timings_object(usage: Usage) -> dict[str, float | int]:
    """Where the time went, in milliseconds, under the names of llama.cpp's server.

    prompt_n: prompt tokens that were computed, cache_n: that came from the cache. predicted_per_second: of one choice
    after its first token.
    """
    metrics = usage.metrics
    num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
    num_after_first = max(usage.num_completion_tokens - 1, 0)
    return {
        "queue_ms": metrics.queue_s * 1e3,
        "cache_n": usage.num_cached_tokens,
        "prompt_n": num_computed,
        "prompt_ms": metrics.prefill_s * 1e3,
        "prompt_per_second": num_computed / metrics.prefill_s if metrics.prefill_s else 0.0,
        "predicted_n": usage.num_completion_tokens,
        "predicted_ms": metrics.decode_s * 1e3,
        "predicted_per_second": num_after_first / metrics.decode_s if metrics.decode_s else 0.0,
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """What a token stands for, as text and as bytes; rows of logits beyond the vocabulary stand for nothing."""
    raw = tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
    return raw.decode("utf-8", "replace"), raw


def most_likely(entries: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` most likely tokens of one position, best first."""
    top = [(token_id, entry) for token_id, entry in entries.items() if entry.rank <= num_top]
    return sorted(top, key=lambda item: item[1].rank)


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The entries of `logprobs.content`."""
    return [
        {
            **_chat_token(tokenizer, token.token_id, token.entries[token.token_id]),
            "top_logprobs": [_chat_token(tokenizer, *item) for item in most_likely(token.entries, num_top)],
        }
        for token in tokens
    ]


def _chat_token(tokenizer: Tokenizer, token_id: int, entry: Logprob) -> dict[str, Any]:
    text, raw = token_text(tokenizer, token_id)
    return {"token": text, "logprob": max(entry.logprob, MIN_LOGPROB), "bytes": list(raw)}


def prompt_logprobs(
    positions: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's `prompt_logprobs`: of each position, token id -> its log-probability, rank and text; None of the first."""
    if positions is None:
        return None
    return [None if entries is None else _prompt_position(entries) for entries in positions]


def _prompt_position(entries: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {str(token_id): _prompt_token(entry) for token_id, entry in entries.items()}


def _prompt_token(entry: Logprob) -> dict[str, Any]:
    logprob = max(entry.logprob, MIN_LOGPROB)
    return {"logprob": logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
