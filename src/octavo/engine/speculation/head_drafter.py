"""Drafts from a head that reads the hidden states of every token the model computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.batch import Batch, Float32, StepOutput
from octavo.engine.speculation.draft_source import MTP, Draft
from octavo.engine.speculation.model_drafter import Chain, ModelDrafter
from octavo.engine.speculation.twin_blocks import TokenRun
from octavo.speculative_config import MAX_DRAFTING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.backends import Executor
    from octavo.engine.limits import EngineLimits
    from octavo.engine.request import Sequence
    from octavo.engine.schedule import Schedule
    from octavo.engine.speculation.speculation import Guesses
    from octavo.engine.step_times import StepTimes

_INLINE = 16  # unread tokens of a sequence that its next draft reads first


@dataclass(slots=True)
class HiddenRows:
    """Hidden states of consecutive tokens that the head has not read yet.

    start: position of the first one.
    """

    start: int
    rows: Float32  # [tokens, hidden]

    def drop_before(self, position: int) -> None:
        self.rows, self.start = self.rows[position - self.start :], position


class HeadDrafter(ModelDrafter):
    """Drafts with a head that predicts a token from a hidden state and the token after it.

    For further guesses it uses its own hidden states. Its cache mirrors the target's blocks. Hidden states are not
    kept, so it reads each prompt together with the target, chunk by chunk. It cannot catch up on tokens that it missed,
    and sequences with such tokens get no drafts.
    """

    name = MTP
    reads_hidden = True

    def __init__(
        self, executor: Executor, times: StepTimes, limits: EngineLimits, max_drafts: int, group: int = 0
    ) -> None:
        super().__init__(executor, times, limits, max_drafts, group)
        size = limits.block_size
        self._is_read = np.zeros((limits.num_blocks + limits.max_num_seqs, size), bool)  # by block and offset
        self._copies: list[
            np.ndarray[tuple[int, int], np.dtype[np.int32]]
        ] = []  # block copies still to be made in its cache

    def note_submitted(self, batch: Batch) -> None:
        """Record what a step of the target does to blocks. Steps must be recorded in order."""
        if len(batch.block_copies):
            self._copies.append(batch.block_copies)
            for source, target in batch.block_copies.tolist():
                self._is_read[target] = self._is_read[source]
        if batch.block_loads is not None:
            self._is_read[batch.block_loads.block_ids] = False
        self._is_read.reshape(-1)[batch.slot_mapping[self._group]] = False

    def note_result(self, schedule: Schedule, batch: Batch, output: StepOutput) -> None:
        """Store the hidden states of all tokens of a step, which come last in its output. A large step returns none."""
        first, count = 0, len(batch.token_ids)
        hidden_states = self._hidden_of(output) if len(schedule.scheduled) <= MAX_DRAFTING else None
        hidden_states = None if hidden_states is None else hidden_states[-count:]
        for item in schedule.scheduled.values():
            sequence, end = item.sequence, first + item.num_tokens
            rows = None if hidden_states is None else hidden_states[first:end]
            first, known = end, sequence.hidden_rows
            if rows is not None and known is not None and known.start <= item.start <= known.start + len(known.rows):
                rows = np.concatenate([known.rows[: item.start - known.start], rows])
                sequence.hidden_rows = HiddenRows(known.start, rows)
            else:
                sequence.hidden_rows = None if rows is None else HiddenRows(item.start, rows.copy())
            for use in item.rows:
                if use.sequence is not sequence and sequence.hidden_rows is not None:
                    use.sequence.hidden_rows = HiddenRows(sequence.hidden_rows.start, sequence.hidden_rows.rows)

    def catch_up(self, sequences: Iterable[Sequence]) -> None:
        """Read the unread tokens of prompts, except the last one, which is read with its draft. Raises like `draft`."""
        for sequence in sequences:
            unread = sequence.hidden_rows
            while unread is not None and (count := self._num_readable(sequence)) > _INLINE:
                count = min(count - 1, self._limits.max_num_batched_tokens)
                run = self._run_of(sequence, sequence.token_ids[unread.start + 1 :][:count], unread.start)
                self._run([run], count, self._inputs(unread.rows[:count], are_own=False))
                self._note_read(sequence, count)

    def draft(self, wanted: list[tuple[Sequence, Guesses]], num_rows: int) -> dict[Sequence, Draft]:
        self._idle = 0
        chains: list[Chain] = []
        claimed: set[int] = set()
        num_left = self._limits.max_num_batched_tokens
        for sequence, guesses in wanted:
            chain, count = self._begin(sequence, guesses), self._num_readable(sequence)
            if chain is None or sequence.hidden_rows is None or count > num_left:
                continue
            blocks = set(self._blocks(sequence)[sequence.hidden_rows.start // self._limits.block_size :])
            if claimed.isdisjoint(blocks):
                claimed |= blocks
                num_left -= count
                chains.append(chain)
        if chains:
            rows = self._guess_first(chains)
            active = self._worth_more(chains, num_rows)
            while active:
                rows = self._guess_more(active, rows)
                active = self._worth_more(active, num_rows)
        return self._drafts(chains)

    def _begin(self, sequence: Sequence, guesses: Guesses) -> Chain | None:
        """Return a chain for a sequence, or None.

        All tokens of the sequence except the last must have hidden states, read or unread.
        """
        unread, limit = sequence.hidden_rows, self._most(sequence, guesses)
        count = self._num_readable(sequence)
        if unread is None or limit <= 0 or count <= 0 or unread.start + count + 1 != len(sequence.token_ids):
            return None
        return Chain(sequence, guesses, None, limit, [], []) if self._has_read(sequence, unread.start) else None

    def _has_read(self, sequence: Sequence, position: int) -> bool:
        """True if the hidden states of all earlier positions were read."""
        blocks, (full, rest) = self._blocks(sequence), divmod(position, self._limits.block_size)
        return bool(self._is_read[blocks[:full]].all() and (not rest or self._is_read[blocks[full], :rest].all()))

    def _is_ready(self, sequence: Sequence, guesses: Guesses) -> bool:  # noqa: ARG002
        """True if the hidden states of all tokens of a sequence except the last were read."""
        unread, position = sequence.hidden_rows, len(sequence.token_ids) - 1
        return unread is not None and unread.start == position and self._has_read(sequence, position)

    def note_ahead(self, sequence: Sequence, guesses: Guesses) -> None:  # noqa: ARG002
        """Record that the hidden states before the last token were read on the device."""
        if sequence.hidden_rows is not None:
            self._note_read(sequence, self._num_readable(sequence))

    def _num_readable(self, sequence: Sequence) -> int:
        """Return the number of unread hidden states whose next tokens are known."""
        unread = sequence.hidden_rows
        return 0 if unread is None else min(len(unread.rows), len(sequence.token_ids) - 1 - unread.start)

    def _guess_first(self, chains: list[Chain]) -> dict[Sequence, Float32]:
        """Read the unread tokens, and add a guess to each chain. Return the hidden states to continue from."""
        runs, rows = [], []
        for chain in chains:
            sequence, unread = chain.sequence, chain.sequence.hidden_rows
            assert unread is not None
            runs.append(self._run_of(sequence, sequence.token_ids[unread.start + 1 :], unread.start))
            rows.append(unread.rows[: len(runs[-1].token_ids)])
        found = self._add_guesses(chains, runs, self._inputs(np.concatenate(rows), are_own=False))
        for chain, run in zip(chains, runs, strict=True):
            self._note_read(chain.sequence, len(run.token_ids))
        return found

    def _guess_more(self, chains: list[Chain], hidden: dict[Sequence, Float32]) -> dict[Sequence, Float32]:
        """Add another guess to each chain.

        hidden: from `_guess_first`.
        """
        runs = [
            self._run_of(each.sequence, each.token_ids[-1:], len(each.sequence.token_ids) + len(each.token_ids) - 2)
            for each in chains
        ]
        rows = np.concatenate([hidden[each.sequence] for each in chains])
        return self._add_guesses(chains, runs, self._inputs(rows, are_own=True))

    def _add_guesses(
        self, chains: list[Chain], runs: list[TokenRun], inputs: tuple[Float32, ...]
    ) -> dict[Sequence, Float32]:
        output = self._run(runs, 0, inputs)
        hidden = self._hidden_of(output)
        assert hidden is not None
        self._take_guesses(chains, output)
        return {each.sequence: hidden[i : i + 1] for i, each in enumerate(chains)}

    def _hidden_of(self, output: StepOutput) -> Float32 | None:
        """Return the hidden states in the output of a step of the model or the head, or None if it returned none."""
        return output.hidden_states

    def _inputs(self, rows: Float32, *, are_own: bool) -> tuple[Float32, ...]:  # noqa: ARG002
        """Return the inputs of a step of the head.

        are_own: the rows are hidden states of the head itself.
        """
        return (rows,)

    def _run_of(self, sequence: Sequence, token_ids: list[int], start: int) -> TokenRun:
        return TokenRun(token_ids, start, self._blocks(sequence), self._limits.num_blocks + sequence.row)

    def _note_read(self, sequence: Sequence, count: int) -> None:
        unread, size = sequence.hidden_rows, self._limits.block_size
        assert unread is not None
        blocks, positions = np.array(self._blocks(sequence)), np.arange(unread.start, unread.start + count)
        self._is_read[blocks[positions // size], positions % size] = True
        unread.drop_before(unread.start + count)

    def _complete(self, batch: Batch) -> Batch:
        """Request the hidden states that the next guesses need, and add the block copies that are still to be made."""
        batch.hidden_indices = batch.logits_indices
        if self._copies:
            batch.block_copies, self._copies = np.concatenate(self._copies), []
        return batch
