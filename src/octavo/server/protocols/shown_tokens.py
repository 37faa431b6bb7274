"""Tokens, their log-probabilities and the times of a request, in the forms that several protocols share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.outputs import Logprob
from octavo.server.generation.events import (
    PromptProgress,
    TokenLogprobs,
    Usage,
)
from octavo.tokenizer.tokenizer import Tokenizer


def timings(usage: Usage) -> dict[str, Any]:
    """Return the times of a request in milliseconds, under the names of llama.cpp's server.

    prompt_n: number of prompt tokens that were computed
    cache_n: number of prompt tokens from the cache
    predicted_ms, predicted_per_*: for one choice, after its first token
    draft_n, draft_n_accepted: only present if there were drafts
    """
    metrics = usage.metrics
    num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
    num_after_first = max(usage.num_completion_tokens - 1, 0)
    drafts = {"draft_n": metrics.num_draft_tokens, "draft_n_accepted": metrics.num_accepted_draft_tokens}
    return {
        "queue_ms": metrics.queue_s * 1e3,
        "cache_n": usage.num_cached_tokens,
        "prompt_n": num_computed,
        "prompt_ms": metrics.prefill_s * 1e3,
        "prompt_per_token_ms": metrics.prefill_s * 1e3 / max(num_computed, 1),
        "prompt_per_second": num_computed / metrics.prefill_s if metrics.prefill_s else 0.0,
        "predicted_n": usage.num_completion_tokens,
        "predicted_ms": metrics.decode_s * 1e3,
        "predicted_per_token_ms": metrics.decode_s * 1e3 / max(num_after_first, 1),
        "predicted_per_second": num_after_first / metrics.decode_s if metrics.decode_s else 0.0,
        **(drafts if metrics.num_draft_tokens else {}),
    }


def progress(event: PromptProgress) -> dict[str, int | float]:
    """Return a prompt's progress under the names of llama.cpp's server."""
    return {
        "total": event.num_tokens,
        "cache": event.num_cached,
        "processed": event.num_processed,
        "time_ms": event.seconds * 1e3,
    }


def finite(logprob: float) -> float:
    """Return a log-probability, with OpenAI's value for a probability of zero because JSON has no infinity."""
    return max(logprob, -9999.0)


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """Return a token's text and bytes. Both are empty for an id beyond the vocabulary; logits may have rows for such
    ids.
    """
    raw = tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
    return raw.decode("utf-8", "replace"), raw


def most_likely(entries: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """Return the `num_top` most likely tokens at one position, best first."""
    top = [(token_id, entry) for token_id, entry in entries.items() if entry.rank <= num_top]
    return sorted(top, key=lambda item: item[1].rank)


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """Return the entries of `logprobs.content`."""

    def shown(token_id: int, entry: Logprob) -> dict[str, Any]:
        text, raw = token_text(tokenizer, token_id)
        return {"token": text, "logprob": finite(entry.logprob), "bytes": list(raw)}

    return [
        {
            **shown(token.token_id, token.entries[token.token_id]),
            "top_logprobs": [shown(*item) for item in most_likely(token.entries, num_top)],
        }
        for token in tokens
    ]


def prompt_details(usage: Usage) -> dict[str, int]:
    """Return the number of a prompt's tokens from the cache. The numbers of image tokens and of tokens that pins have
    added to the cache are included if they are not zero.
    """
    written = sum(usage.created_tokens.values())
    images = {"image_tokens": usage.num_image_tokens} if usage.num_image_tokens else {}
    return {"cached_tokens": usage.num_cached_tokens, **({"cache_write_tokens": written} if written else {}), **images}
