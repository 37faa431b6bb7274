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

# Sampling options of one output row. The native sampler reads these rows as a struct, csrc/sampling.h.
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
        ("counter", np.uint64),  # number of the token within its sequence: with the seed, all of the randomness
        ("target", np.int32),  # -1: sample. Else no sampling: the log-probability of this token is wanted
        ("num_logprobs", np.int32),  # -1: none, 0: only the chosen token's, n: also the n most likely
    ]
)


def greedy_rows(num_rows: int) -> SamplingRows:
    """Rows [num_rows] of SAMPLING_ROW that take the most likely token, with every option off."""
    rows = np.zeros(num_rows, SAMPLING_ROW)
    for name in ("top_p", "typical_p", "repetition_penalty"):
        rows[name] = 1
    for name in ("target", "num_logprobs"):
        rows[name] = -1
    return rows


def token_mask(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """A mask [ceil(vocab_size / 32)] that allows these tokens; bit i of word w is token 32 w + i."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    mask: NDArray[np.uint32] = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    return mask


@dataclass(slots=True)
class SamplingBatch:
    """Sampling options of the output rows. R = rows, in the order of `Batch.logits_indices`.

    The meaning is `octavo.backends.sampling`; the order of the stages is written there.
    """

    rows: SamplingRows  # [R], of SAMPLING_ROW
    # Tokens seen so far, compressed rows: entries history_start[r] to history_start[r + 1] belong to row r.
    history_start: Int32  # [R + 1]
    history_ids: Int32  # distinct token ids within a row
    history_counts: Int32  # how often among the generated tokens (0: only in the prompt)
    # Added to the logits before everything else (logit_bias, bad_words and min_tokens as -inf), compressed rows.
    bias_start: Int32  # [R + 1]
    bias_ids: Int32
    bias_values: Float32
    allowed_mask: NDArray[np.uint32] | None = None  # [R, ceil(vocab / 32)]; bit i of word w allows token 32 w + i

    @classmethod
    def plain(cls, rows: SamplingRows) -> SamplingBatch:
        """`rows` without history, bias or mask."""
        starts, none = np.zeros(len(rows) + 1, np.int32), np.zeros(0, np.int32)
        return cls(rows, starts, none, none, starts, none, np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class DomainRows:
    """The rows of a domain in a step: S sequences, C components of a position. None: the domain has no such array."""

    count: int
    starts: Int32 | None = None  # [S + 1], where each sequence starts; the last is `count`
    positions: Int32 | None = None  # [C, count]
    # By name (`octavo.graph.values.IndexArray`): one row of another domain, or several, for each row [count * width].
    indices: Mapping[str, Int32] = field(default_factory=dict)
    # Of a domain with caches (`octavo.graph.cache.KVCache.domain`): the rows of each sequence of the step in the cache
    # after it [N], also where the step has none; and where keys and values of each row are written [G, count], as
    # `Batch.slot_mapping` has it, of which only the groups of this domain are read.
    lengths: Int32 | None = None
    slots: Int32 | None = None


@dataclass(slots=True)
class BlockBytes:
    """Blocks of the cache, and memory outside it for their bytes: of all layers, as they lie in the cache.

    What they mean depends on the executor: only one whose engine has the same `CacheIdentity` can take them. The same
    of slots for states, whose numbers are the block_ids then.
    """

    block_ids: Int32  # [B]
    data: NDArray[np.uint8]  # [B, bytes], each row contiguous: `CacheSizes.moved_bytes`, or `moved_state_bytes`


class LateTokens(NamedTuple):
    """N sequences of a step that is submitted while the step before still computes guesses for them.

    The arrays of the batch suppose that all guesses are right. For each that is not, and for those behind it, the
    device takes one off the positions and lengths of the sequence, moves its slots, and takes its tokens from a row
    before and its draws from a number before.
    """

    rows: Int32  # [N], of the step before: the first that draws a token for the sequence
    tokens: Int32  # [N], of the step before: the token of that row
    num_drafts: Int32  # [N], the tokens behind it that are guesses; 0: it had none
    only_outputs: bool = False  # only the rows that are wanted move: the tokens are right and wrong ones


@dataclass(slots=True)
class Batch:
    """One step. T = scheduled tokens, N = requests (sequences).

    R = rows whose logits are wanted, H = rows whose hidden states are; both together are the outputs of the step.

    G = groups of layers with block tables of their own (`octavo.graph.cache.CacheLayout`).
    """

    token_ids: Int32  # [T], grouped by request
    positions: Int32  # [T], position of each token in its sequence
    query_start_loc: Int32  # [N + 1], where each request's tokens start
    seq_lens: Int32  # [N], tokens in the cache after this step
    block_tables: Int32  # [G, N, max_blocks]; entries beyond a sequence's blocks or before its window are not read
    slot_mapping: Int32  # [G, T], block_id * block_size + offset where each token's K and V are written; not read of
    # groups of another domain (`DomainRows.slots`)
    logits_indices: Int32  # [R], index into the T tokens
    # [H], the same for hidden states: the input of the output head, which is skipped if no logits are wanted
    hidden_indices: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    # Blocks that are read into memory before the step changes any, complete once `wait` has returned: so a block that
    # is about to be overwritten needs no step of its own. Then those that are written from memory, in their order.
    block_saves: BlockBytes | None = None
    block_loads: BlockBytes | None = None
    # Of a graph with states (`octavo.graph.cache.StateCache`): the same of slots, before any state is copied.
    snapshot_saves: BlockBytes | None = None
    snapshot_loads: BlockBytes | None = None
    # [copies, 2], source and destination of cache blocks, then copied in this order before anything is computed
    block_copies: Int32 = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    # Of a graph with states: the slot of each sequence [N]; copies of slots [copies, 2], made first and in this order;
    # and [N, S, 2], ascending, numbers of a sequence's tokens of this step after which its states are also written to
    # another slot, and that slot (-1: no more are written).
    state_slots: Int32 | None = None
    state_copies: Int32 = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    state_saves: Int32 | None = None
    sampling: SamplingBatch | None = None  # None: no sampling; only logits
    return_logits: bool = False
    inputs: tuple[Float32, ...] = ()  # of a segment of a graph: the values of `Input` operations, by slot
    token_types: Int32 | None = None  # [T], which of a pair's two texts each token belongs to; None: all 0
    # [T], the row of the step before whose token this is, -1: `token_ids` holds it. None: it holds all. That step may
    # still run; only for executors with `max_in_flight` above 1. -2 - n: guess n of a draft model.
    token_sources: Int32 | None = None
    late: LateTokens | None = None  # only for executors that settle drafts
    # Of a head that drafts [T], in place of `inputs`: the token of the model's step before whose hidden states each of
    # its tokens takes; -1 - n: those of row n of its own step before.
    hidden_at: Int32 | None = None
    guesses_at: int = -1  # of a draft model: the first of its tokens becomes this guess, and so on; -1: none does
    # Rows of further domains by their names; a domain that is missing has none. Those of `tokens` have only positions,
    # with which tokens rotate in place of `positions`, and indices. Without them all components are `positions`.
    domains: Mapping[str, DomainRows] = field(default_factory=dict)

    @property
    def output_indices(self) -> Int32:
        """[R + H], the tokens of the output rows: those of `logits_indices`, then those of `hidden_indices`."""
        if not len(self.hidden_indices):
            return self.logits_indices
        return np.concatenate([self.logits_indices, self.hidden_indices])


@dataclass(slots=True)
class StepOutput:
    """The results of a step, in the order of `Batch.logits_indices` and, for hidden states, `Batch.hidden_indices`.

    Log-probabilities are the model's own: before bias, penalties and temperature.
    """

    token_ids: Int32  # [R]; the sampled token, or the target
    logprobs: Float32  # [R]; of that token; NaN where num_logprobs is -1
    ranks: Int32  # [R]; 1 = most likely; 0 where num_logprobs is -1
    top_ids: Int32  # [R, max(num_logprobs, 0)], most likely first, -1 beyond a row's own number
    top_logprobs: Float32  # same shape
    logits: Float32 | None = None  # [R, vocab] if return_logits
    values: tuple[Float32, ...] = ()  # of a segment that makes no logits: its outputs, the inputs of the next one
    hidden_states: Float32 | None = None  # [H, hidden] if there are hidden_indices: the input of the output head
    taps: Float32 | None = None  # [H, cols], the same of `Graph.tap`, for a graph that has one
    computed_ids: Int32 | None = None  # [T], the tokens that were computed, if some were guesses from the device

    @classmethod
    def unsampled(cls, num_rows: int, num_top: int = 0) -> StepOutput:
        """The arrays of so many rows: token -1, no probabilities. Sampling writes every element."""
        tops = (num_rows, num_top)
        return cls(
            token_ids=np.full(num_rows, -1, np.int32),
            logprobs=np.full(num_rows, np.nan, np.float32),
            ranks=np.zeros(num_rows, np.int32),
            top_ids=np.full(tops, -1, np.int32),
            top_logprobs=np.full(tops, np.nan, np.float32),
        )
