"""Drafts from Gemma 4's assistant, whose layers read the target model's cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from octavo.batch import Batch, DomainRows, Float32, SamplingBatch, StepOutput, greedy_rows
from octavo.engine.speculation.draft_source import ASSISTANT, Draft
from octavo.engine.speculation.head_drafter import HiddenRows
from octavo.engine.speculation.model_drafter import Chain, ModelDrafter
from octavo.graph.values import TOKENS
from octavo.speculative_config import MAX_DRAFTING, MAX_DRAFTS

if TYPE_CHECKING:
    from octavo.engine.request import Sequence
    from octavo.engine.schedule import Schedule
    from octavo.engine.speculation.speculation import Guesses


class AssistantDrafter(ModelDrafter):
    """A head without a cache of its own: it reads no prompts and only needs a sequence's last hidden state.

    All guesses of a step are computed at the position of the last token, and attend to the tokens before that position.
    """

    name = ASSISTANT
    reads_hidden = True

    def note_result(self, schedule: Schedule, batch: Batch, output: StepOutput) -> None:
        """Store the last few hidden states of each sequence, because its last drafts may be rejected."""
        hidden = output.hidden_states if len(schedule.scheduled) <= MAX_DRAFTING else None
        first, count = 0, len(batch.token_ids)
        for item in schedule.scheduled.values():
            rows, kept = None, min(item.num_tokens, MAX_DRAFTS + 1)
            first += item.num_tokens
            if hidden is not None:
                last = hidden[-count:][first - kept : first].copy()
                rows = HiddenRows(item.start + item.num_tokens - kept, last)
            for sequence in (item.sequence, *(use.sequence for use in item.rows)):
                sequence.hidden_rows = rows

    def draft(self, wanted: list[tuple[Sequence, Guesses]], num_rows: int) -> dict[Sequence, Draft]:
        self._idle = 0
        chains: list[Chain] = []
        hidden: dict[Sequence, Float32] = {}
        for sequence, guesses in wanted:
            row, limit = _last_row(sequence), self._most(sequence, guesses)
            if row is not None and limit > 0:
                hidden[sequence] = row
                chains.append(Chain(sequence, guesses, None, limit, [], []))
        active = chains
        while active:
            output = self._step(active, np.stack([hidden[each.sequence] for each in active]))
            assert output.taps is not None
            self._take_guesses(active, output)
            hidden = {each.sequence: row for each, row in zip(active, output.taps, strict=True)}
            active = self._worth_more(active, num_rows)
        return self._drafts(chains)

    def _step(self, chains: list[Chain], hidden: Float32) -> StepOutput:
        """Compute a guess for each chain, and the hidden states after it."""
        started_at = time.perf_counter()
        output = self.executor.submit(_batch(chains, hidden, self._limits.block_size)).wait()
        self._times.observe(len(chains), 0, 0, time.perf_counter() - started_at)
        return output


def _last_row(sequence: Sequence) -> Float32 | None:
    """Return the hidden state that produced the last token, or None if it is not known."""
    known, position = sequence.hidden_rows, len(sequence.token_ids) - 2
    if known is None or not known.start <= position < known.start + len(known.rows):
        return None
    row: Float32 = known.rows[position - known.start]
    return row


def _batch(chains: list[Chain], hidden: Float32, block_size: int) -> Batch:
    """Return a batch with one row per sequence.

    The row attends to the tokens before the last one, and is rotated by the last one's position.
    """
    count, sequences = len(chains), [chain.sequence for chain in chains]
    lengths = np.array([len(sequence.token_ids) - 1 for sequence in sequences], np.int32)
    width, num_groups = -(-int(lengths.max()) // block_size), len(sequences[0].block_tables)
    tables = np.zeros((num_groups, count, width), np.int32)
    for row, (sequence, length) in enumerate(zip(sequences, lengths.tolist(), strict=True)):
        num_blocks = -(-length // block_size)
        for group, table in enumerate(sequence.block_tables):
            tables[group, row, :num_blocks] = table.block_ids[:num_blocks]
    last = [(chain.token_ids or chain.sequence.token_ids)[-1] for chain in chains]
    rows, options = np.arange(count, dtype=np.int32), greedy_rows(count)
    options["num_logprobs"] = 0
    return Batch(
        token_ids=np.array(last, np.int32),
        positions=lengths - 1,
        query_start_loc=np.arange(count + 1, dtype=np.int32),
        seq_lens=lengths,
        block_tables=tables,
        slot_mapping=np.zeros((num_groups, count), np.int32),  # nothing is written
        logits_indices=rows,
        hidden_indices=rows,
        sampling=SamplingBatch.plain(options),
        inputs=(hidden,),
        domains={TOKENS.name: DomainRows(count, positions=np.stack([lengths - 1, lengths]))},
    )
