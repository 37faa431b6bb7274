"""The arrays of one step: the engine's input to an executor, and the executor's output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Array = NDArray[np.floating[Any]]


SamplingRows = NDArray[np.void]

# Sampling options of one output row; csrc/sampling.h defines the same struct.
SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_k", np.int32),  # 0: off
        ("top_p", np.float32),  # 1: off
        ("min_p", np.float32),  # 0: off
        ("typical_p", np.float32),  # 1: off
        ("repetition_penalty", np.float32),  # 1: off
        ("presence_penalty", np.float32),  # 0: off
        ("frequency_penalty", np.float32),  # 0: off
        ("seed", np.uint64),
        ("counter", np.uint64),  # index of the token in its sequence; with the seed it determines all randomness
        ("target", np.int32),  # -1: sample; otherwise compute only this token's log-probability
        ("num_logprobs", np.int32),  # -1: none, 0: the chosen token's, n: also the n most likely
    ]
)


def greedy_rows(num_rows: int) -> SamplingRows:
    """Return rows [num_rows] of SAMPLING_ROW for greedy sampling, with every option off."""
    rows = np.zeros(num_rows, SAMPLING_ROW)
    for name in ("top_p", "typical_p", "repetition_penalty"):
        rows[name] = 1
    for name in ("target", "num_logprobs"):
        rows[name] = -1
    return rows


def token_mask(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """Return a mask [ceil(vocab_size / 32)] that allows only these tokens; bit i of word w is token 32 w + i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    mask: NDArray[np.uint32] = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    return mask


@dataclass(slots=True)
class SamplingBatch:
    """Sampling options of the R output rows, in the order of `Batch.logits_indices`.

    `octavo.backends.sampling` defines the options and the order of the stages.
    """

    rows: SamplingRows  # [R], of SAMPLING_ROW
    # Tokens seen so far as compressed rows: entries history_start[r] to history_start[r + 1] belong to row r.
    history_start: Int32  # [R + 1]
    history_ids: Int32  # distinct token ids within a row
    history_counts: Int32  # occurrences among the generated tokens (0: only in the prompt)
    # Added to the logits first (logit_bias; -inf for bad_words and min_tokens), as compressed rows.
    bias_start: Int32  # [R + 1]
    bias_ids: Int32
    bias_values: Float32
    allowed_mask: NDArray[np.uint32] | None = None  # [R, ceil(vocab / 32)]; bit i of word w allows token 32 w + i

    @classmethod
    def plain(cls, rows: SamplingRows) -> SamplingBatch:
        """Make a batch from `rows` with no history, bias or mask."""
        starts, none = np.zeros(len(rows) + 1, np.int32), np.zeros(0, np.int32)
        return cls(rows, starts, none, none, starts, none, np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class DomainRows:
    """Rows of one domain in a step, for S sequences with C components per position.

    A field is None if the step has no such array.
    """

    count: int
    starts: Int32 | None = None  # [S + 1], start of each sequence; the last is `count`
    positions: Int32 | None = None  # [C, count]
    # By name (`octavo.graph.values.IndexArray`): `width` rows of another domain for each row [count * width].
    indices: Mapping[str, Int32] = field(default_factory=dict)
    # For domains with caches (`octavo.graph.cache.KVCache.domain`): cached rows of each sequence after this step [N],
    # including sequences without rows in it; and the slots to write keys and values to [G, count], as in
    # `Batch.slot_mapping`. Only the groups of this domain are read.
    lengths: Int32 | None = None
    slots: Int32 | None = None


@dataclass(slots=True)
class BlockBytes:
    """Cache blocks, and memory outside the cache that holds their bytes in all layers, laid out as in the cache.

    Only an executor whose engine has the same `CacheIdentity` can read the bytes. For states, block_ids are slots.
    """

    block_ids: Int32  # [B]
    data: NDArray[np.uint8]  # [B, bytes], each row contiguous; bytes is `CacheSizes.moved_bytes` or `moved_state_bytes`


class LateTokens(NamedTuple):
    """The N sequences whose step is submitted while the previous step is still verifying their drafts.

    The batch assumes that all drafts are accepted. For each rejected draft, the device decrements the sequence's
    positions and lengths, shifts its slots, and takes its tokens from an earlier row and its random draws from an
    earlier number.
    """

    rows: Int32  # [N], previous step: first row that draws a token for the sequence
    tokens: Int32  # [N], previous step: token of that row
    num_drafts: Int32  # [N], drafts after that token; 0: none
    only_outputs: bool = False  # move only the output rows; the tokens include rejected drafts


@dataclass(slots=True)
class Batch:
    """One step of T scheduled tokens for N sequences.

    R is the number of rows with logits and H the number of rows with hidden states; together they are the outputs of
    the step. G is the number of layer groups with their own block tables (`octavo.graph.cache.CacheLayout`).
    """

    token_ids: Int32  # [T], grouped by request
    positions: Int32  # [T], position of each token in its sequence
    query_start_loc: Int32  # [N + 1], start of each sequence's tokens
    seq_lens: Int32  # [N], tokens in the cache after this step
    block_tables: Int32  # [G, N, max_blocks]; entries outside a sequence's blocks or window are not read
    slot_mapping: Int32  # [G, T], where to write each token's K and V: block_id * block_size + offset; not read for
    # groups of another domain (`DomainRows.slots`)
    logits_indices: Int32  # [R], index into the T tokens
    # [H], the same for hidden states (inputs of the output head). Without logits the head is skipped.
    hidden_indices: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    # Blocks to copy to memory before the step changes any; complete once `wait` returns, so that saving a block does
    # not take a step of its own. Then blocks to copy from memory, in this order.
    block_saves: BlockBytes | None = None
    block_loads: BlockBytes | None = None
    # The same for state slots (`octavo.graph.cache.StateCache`), before any state is copied.
    snapshot_saves: BlockBytes | None = None
    snapshot_loads: BlockBytes | None = None
    # [copies, 2], source and destination of cache blocks, copied next in this order, before computing
    block_copies: Int32 = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    # For graphs with states: slot of each sequence [N]; copies of slots [copies, 2], made first, in this order; and
    # [N, S, 2], ascending: a number of the sequence's tokens in this step after which to save its states to another
    # slot, and that slot (-1: nothing more to save).
    state_slots: Int32 | None = None
    state_copies: Int32 = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    state_saves: Int32 | None = None
    sampling: SamplingBatch | None = None  # None: no sampling; only logits
    return_logits: bool = False
    inputs: tuple[Float32, ...] = ()  # for a graph segment: values of `Input` operations, by slot
    token_types: Int32 | None = None  # [T], text (0 or 1) of a pair that each token belongs to; None: all 0
    # [T], row of the previous step whose token this is; -1: `token_ids` holds it, -2 - n: draft n of a draft model.
    # None: `token_ids` holds all. The previous step may still be running (executors with `max_in_flight` above 1).
    token_sources: Int32 | None = None
    late: LateTokens | None = None  # only for executors that resolve rejected drafts
    # For a draft head, in place of `inputs` [T]: token of the model's previous step whose hidden states each of its
    # tokens takes; -1 - n: row n of the head's own previous step.
    hidden_at: Int32 | None = None
    guesses_at: int = -1  # for a draft model: index of the draft that its first token becomes; -1: none
    # Rows of further domains by name; a missing domain has none. Those of `tokens` have only indices, and positions to
    # rotate with in place of `positions`. Without them all components are `positions`.
    domains: Mapping[str, DomainRows] = field(default_factory=dict)

    @property
    def output_indices(self) -> Int32:
        """Token indices of the output rows [R + H]: `logits_indices`, then `hidden_indices`."""
        if not len(self.hidden_indices):
            return self.logits_indices
        return np.concatenate([self.logits_indices, self.hidden_indices])


@dataclass(slots=True)
class StepOutput:
    """Results of a step, in the order of `Batch.logits_indices` and, for hidden states, `Batch.hidden_indices`.

    Log-probabilities are the model's own, before bias, penalties and temperature.
    """

    token_ids: Int32  # [R]; the sampled token, or the target
    logprobs: Float32  # [R]; log-probability of that token; NaN where num_logprobs is -1
    ranks: Int32  # [R]; 1 = most likely; 0 where num_logprobs is -1
    top_ids: Int32  # [R, max(num_logprobs, 0)], most likely first, -1 beyond a row's num_logprobs
    top_logprobs: Float32  # same shape
    logits: Float32 | None = None  # [R, vocab] if return_logits
    values: tuple[Float32, ...] = ()  # for a segment without logits: its outputs, the inputs of the next one
    hidden_states: Float32 | None = None  # [H, hidden] if there are hidden_indices: inputs of the output head
    taps: Float32 | None = None  # [H, cols], the same for `Graph.tap`, if the graph has one
    computed_ids: Int32 | None = None  # [T], the computed tokens, if some were drafts from the device

    @classmethod
    def unsampled(cls, num_rows: int, num_top: int = 0) -> StepOutput:
        """Return output arrays for `num_rows` rows, with token -1 and no probabilities.

        Sampling fills in every element.
        """
        tops = (num_rows, num_top)
        return cls(
            token_ids=np.full(num_rows, -1, np.int32),
            logprobs=np.full(num_rows, np.nan, np.float32),
            ranks=np.zeros(num_rows, np.int32),
            top_ids=np.full(tops, -1, np.int32),
            top_logprobs=np.full(tops, np.nan, np.float32),
        )
