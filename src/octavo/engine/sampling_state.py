"""The sampling state of a sequence that changes from token to token: seen and forbidden tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Float32, Int32
from octavo.engine.request import Sequence


class SamplingState:
    """The sampling state of a running sequence, for the batch builder at each step.

    It is a function of the sequence's tokens, which it follows by itself; after a preemption it is created again.
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
        """Writes the constant parameters of the sequence into its row, an element of SAMPLING_ROW."""
        params, sequence, vocab_size = self._params, self._sequence, self._vocab_size
        row["temperature"] = 0.0 if params.is_greedy else params.temperature
        row["top_k"] = min(max(params.top_k, 0), vocab_size)
        row["top_p"] = params.top_p
        row["min_p"] = params.min_p
        row["typical_p"] = params.typical_p
        row["repetition_penalty"] = params.repetition_penalty
        row["presence_penalty"] = params.presence_penalty
        row["frequency_penalty"] = params.frequency_penalty
        row["seed"] = sequence.seed
        row["target"] = -1
        row["num_logprobs"] = min(sequence.group.consumers[-1].num_logprobs(sequence.request), vocab_size)

    def _make_mask(self) -> NDArray[np.uint32] | None:
        if self._params.allowed_token_ids is None:
            return None
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[list(self._params.allowed_token_ids)] = 1
        mask: NDArray[np.uint32] = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
        return mask

    def history(self, num_drafts: int = 0) -> tuple[Int32, Int32]:
        """Distinct token ids so far, with the first num_drafts drafts, and the number of times each was generated."""
        sequence = self._sequence
        if num_drafts:
            return self._with_drafts(sequence.draft_token_ids[:num_drafts])
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

    def _with_drafts(self, drafts: list[int]) -> tuple[Int32, Int32]:
        """The history with drafts. It is not kept, because drafts may be refused."""
        ids, counts = self.history()
        new_ids = [token_id for token_id in dict.fromkeys(drafts) if token_id not in self._position]
        counts = np.concatenate([counts, np.zeros(len(new_ids), np.int32)])
        places = self._position | {token_id: len(ids) + i for i, token_id in enumerate(new_ids)}
        for token_id in drafts:
            counts[places[token_id]] += 1
        return np.concatenate([ids, np.array(new_ids, np.int32)]), counts

    def bias(self, num_drafts: int = 0) -> tuple[Int32, Float32]:
        """Distinct token ids and the values added to their logits, for the token after the first num_drafts drafts."""
        request, bias = self._sequence.request, dict(self._static_bias)
        if self._sequence.num_output_tokens + num_drafts < self._params.min_tokens:
            for token_id in (*request.eos_token_ids, *self._params.stop_token_ids):
                bias[token_id] = -math.inf
        if request.bad_words_ids:
            output = self._sequence.output_token_ids + self._sequence.draft_token_ids[:num_drafts]
            for word in request.bad_words_ids:
                num_before = len(word) - 1
                if num_before == 0 or tuple(output[-num_before:]) == word[:-1]:
                    bias[word[-1]] = -math.inf
        return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)
