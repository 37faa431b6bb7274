"""The cache of a draft model. It uses the target's block ids, so no second manager is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.batch import Batch, SamplingBatch, greedy_rows


@dataclass(slots=True)
class DraftReading:
    """A sequence's tokens in the draft model's cache.

    keys: keys of the sequence's full blocks, each a hash of all tokens up to the block's end.
    num_read: number of tokens whose keys and values are valid.
    guesses: tokens computed after them, as guesses, in the sequence's blocks.
    """

    keys: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_read: int = 0
    guesses: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TokenRun:
    """The tokens of one sequence in a step of the draft model.

    start: position of the first token.
    spare: the block for positions beyond its block table, used for guesses.
    """

    token_ids: list[int]
    start: int
    block_ids: list[int]
    spare: int


class TwinBlocks:
    """Tracks which blocks the draft model has filled, and for which tokens.

    A wrong entry can only make guesses worse.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._filled: dict[int, int] = {}  # block id -> key

    def find(self, reading: DraftReading, token_ids: list[int], block_ids: list[int], num_preemptions: int) -> None:
        """Update num_read, because guesses may have been right and blocks may belong to another sequence now."""
        size, read = self._block_size, reading.num_read
        num_blocks = -(-read // size)
        if (
            read
            and num_preemptions == reading.num_preemptions
            and reading.block_ids[:num_blocks] == block_ids[:num_blocks]
        ):
            for guess in reading.guesses:
                if reading.num_read >= len(token_ids) or token_ids[reading.num_read] != guess:
                    break
                reading.num_read += 1
        else:
            self._extend_keys(reading, token_ids)
            pairs = zip(reading.keys, block_ids, strict=False)
            num_known = next((i for i, (key, block) in enumerate(pairs) if self._filled.get(block) != key), None)
            num_known = min(len(reading.keys), len(block_ids)) if num_known is None else num_known
            reading.num_read, reading.num_preemptions = num_known * size, num_preemptions
        reading.guesses = []
        reading.num_read = min(reading.num_read, len(token_ids) - 1)  # the last token is computed for its logits

    def note(self, reading: DraftReading, token_ids: list[int], block_ids: list[int], end: int) -> None:
        """Record that the tokens from num_read to `end` are computed.

        Tokens beyond the sequence's blocks are ignored.
        """
        size = self._block_size
        end = min(end, len(block_ids) * size)
        self._extend_keys(reading, token_ids)
        for position in range(reading.num_read // size, -(-end // size)):
            self._filled.pop(block_ids[position], None)
            if (position + 1) * size <= end:
                self._filled[block_ids[position]] = reading.keys[position]
        reading.num_read = end
        reading.block_ids = block_ids[: -(-end // size)]

    def written(self, reading: DraftReading, block_ids: list[int]) -> set[int]:
        """Return the blocks to which the sequence's next tokens are written."""
        return set(block_ids[reading.num_read // self._block_size :])

    def room(self, block_ids: list[int], position: int) -> int:
        """Return how many positions, from this one on, the sequence has blocks for."""
        return max(len(block_ids) * self._block_size - position, 0)

    def batch(self, parts: list[TokenRun]) -> Batch:
        """Return the batch for a step that returns the most likely next token after each part."""
        size, counts = self._block_size, [len(part.token_ids) for part in parts]
        starts = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        ends = [part.start + count for part, count in zip(parts, counts, strict=True)]
        tables = np.zeros((1, len(parts), -(-max(ends) // size)), np.int32)
        for row, (part, end) in enumerate(zip(parts, ends, strict=True)):
            blocks = [*part.block_ids, part.spare][: -(-end // size)]
            tables[0, row, : len(blocks)] = blocks
        positions = np.concatenate([np.arange(part.start, end) for part, end in zip(parts, ends, strict=True)])
        rows = np.repeat(np.arange(len(parts)), counts)
        slots = tables[0, rows, positions // size] * size + positions % size
        options = greedy_rows(len(parts))
        options["num_logprobs"] = 0
        none, nothing = np.zeros(0, np.int32), np.zeros(len(parts) + 1, np.int32)
        return Batch(
            token_ids=np.array([token for part in parts for token in part.token_ids], np.int32),
            positions=positions.astype(np.int32),
            query_start_loc=starts,
            seq_lens=np.array(ends, np.int32),
            block_tables=tables,
            slot_mapping=slots.astype(np.int32)[None],
            logits_indices=np.array([end - 1 for end in starts[1:].tolist()], np.int32),
            sampling=SamplingBatch(options, nothing, none, none, nothing, none, np.zeros(0, np.float32)),
        )

    def _extend_keys(self, reading: DraftReading, token_ids: list[int]) -> None:
        size, keys = self._block_size, reading.keys
        for start in range(len(keys) * size, len(token_ids) // size * size, size):
            keys.append(hash((keys[-1] if keys else 0, *token_ids[start : start + size])))
