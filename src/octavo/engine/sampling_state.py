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

    def fill_row(self, row: np.void) -> None:
        """Writes what stays the same over the sequence's life into its row, an element of SAMPLING_ROW."""
        params, request, vocab_size = self._params, self._sequence.request, self._vocab_size
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        if request.beam_search is not None:
            num_logprobs = request.num_seats + len(request.eos_token_ids)
        row["temperature"] = 0.0 if params.is_greedy else params.temperature
        row["top_k"] = min(max(params.top_k, 0), vocab_size)
        row["top_p"] = params.top_p
        row["min_p"] = params.min_p
        row["typical_p"] = params.typical_p
        row["repetition_penalty"] = params.repetition_penalty
        row["presence_penalty"] = params.presence_penalty
        row["frequency_penalty"] = params.frequency_penalty
        row["seed"] = self._sequence.seed
        row["target"] = -1
        row["num_logprobs"] = min(num_logprobs, vocab_size)

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
