"""What of a sequence's sampling changes from token to token: seen tokens and forbidden ones."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Float32, Int32
from octavo.engine.request import Sequence


class SamplingState:
    """One running sequence's sampling, as the batch builder needs it at each step.

    It follows the sequence's tokens by itself, so that after a preemption it is simply made anew.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        request = sequence.request
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._params = request.params.sampling
        self.has_penalties = self._params.has_penalties
        self._static_bias = dict(self._params.logit_bias or {})
        self.has_bias = bool(self._static_bias or request.bad_words_ids or self._params.min_tokens)
        self.allowed_mask = self._make_mask()
        self.has_mask = self.allowed_mask is not None or sequence.grammar is not None
        self._num_seen = 0
        self._position: dict[int, int] = {}  # token id -> its place in the two arrays
        self._seen_ids = np.zeros(64, np.int32)
        self._seen_counts = np.zeros(64, np.int32)

    def floats(self) -> tuple[float, ...]:
        """temperature, top_p, min_p, typical_p, repetition, presence and frequency penalty."""
        params = self._params
        return (
            0.0 if params.is_greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.typical_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )

    def ints(self) -> tuple[int, int]:
        """top_k and num_logprobs, within the vocabulary."""
        sequence = self._sequence
        wanted = self._params
        if sequence.request.beam_search is not None:
            return 0, min(sequence.request.num_seats + len(sequence.request.eos_token_ids), self._vocab_size)
        num_logprobs = -1 if wanted.logprobs is None else min(wanted.logprobs, self._vocab_size)
        return min(max(wanted.top_k, 0), self._vocab_size), num_logprobs

    def _make_mask(self) -> NDArray[np.uint32] | None:
        if self._params.allowed_token_ids is None:
            return None
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[list(self._params.allowed_token_ids)] = 1
        mask: NDArray[np.uint32] = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
        return mask

    def history(self) -> tuple[Int32, Int32]:
        """Distinct token ids so far, and how often each was generated."""
        sequence = self._sequence
        num_prompt_tokens = sequence.request.num_prompt_tokens
        for i, token_id in enumerate(sequence.token_ids[self._num_seen :], self._num_seen):
            position = self._position.setdefault(token_id, len(self._position))
            if position == len(self._seen_ids):
                self._seen_ids = np.concatenate([self._seen_ids, np.zeros_like(self._seen_ids)])
                self._seen_counts = np.concatenate([self._seen_counts, np.zeros_like(self._seen_counts)])
            self._seen_ids[position] = token_id
            self._seen_counts[position] += i >= num_prompt_tokens
        self._num_seen = len(sequence.token_ids)
        return self._seen_ids[: len(self._position)], self._seen_counts[: len(self._position)]

    def bias(self) -> tuple[Int32, Float32]:
        """Distinct token ids and what is added to their logits for the next token."""
        request, bias = self._sequence.request, dict(self._static_bias)
        if self._sequence.num_output_tokens < self._params.min_tokens:
            for token_id in (*request.eos_token_ids, *self._params.stop_token_ids):
                bias[token_id] = -math.inf
        if request.bad_words_ids:
            output = self._sequence.output_token_ids
            for word in request.bad_words_ids:
                num_before = len(word) - 1
                if num_before == 0 or tuple(output[-num_before:]) == word[:-1]:
                    bias[word[-1]] = -math.inf
        return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
