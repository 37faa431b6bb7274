"""Drafts from a small model with the same vocabulary. Each step computes one token for all sequences."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.backends import Executor
from octavo.backends.sampling import SamplingError
from octavo.engine.request import Sequence
from octavo.engine.speculation.ahead_drafts import AheadChain
from octavo.engine.speculation.draft_source import DRAFT_MODEL, Draft
from octavo.engine.speculation.twin_blocks import DraftReading, TokenRun, TwinBlocks
from octavo.engine.step_times import StepTimes
from octavo.errors import OctavoError
from octavo.speculative_config import MAX_DRAFTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.batch import Batch, Float32, StepOutput
    from octavo.engine.limits import EngineLimits
    from octavo.engine.overlap import DrawnRows
    from octavo.engine.schedule import Schedule, ScheduledSequence
    from octavo.engine.speculation.speculation import Guesses

logger = logging.getLogger(__name__)

_INLINE = 16  # unread tokens that a draft step reads first
_RETRY = 64  # how often it must not pay off before it is tried again
_FIRST_ODDS = 0.7
_GAIN = 0.2  # assumed saving of an answer's time by drafts, when deciding whether to read a prompt


@dataclass(slots=True)
class Chain:
    """An unfinished draft.

    value: probability that all of it is right.
    reading: the sequence's tokens in the draft model's cache; None for a head.
    """

    sequence: Sequence
    guesses: Guesses
    reading: DraftReading | None
    limit: int
    token_ids: list[int]
    levels: list[int]
    value: float = 1.0


class ModelDrafter:
    """Implements `DraftOrigin`. A level is a tenth of a guess's probability.

    Its cache mirrors the target's blocks and has one more block per sequence. It reads prompts late, in chunks between
    steps of the target, so that first tokens do not wait for it. Until then the sequence gets no drafts.
    """

    name = DRAFT_MODEL
    reads_hidden = False  # whether it wants hidden states of all tokens of the target's steps
    is_on_device = False  # whether its guesses reach the target's next step without the host

    def __init__(
        self,
        executor: Executor,
        times: StepTimes,
        limits: EngineLimits,
        max_drafts: int = MAX_DRAFTS,
        group: int = 0,
    ) -> None:
        """times, limits: the times and limits of the target.
        max_drafts: limit per sequence in one step.
        group: the index of a group of the target's layers that keeps all blocks of a sequence.
        """
        self.executor = executor
        self.max_drafts = min(max_drafts, MAX_DRAFTS, limits.block_size)  # a spare block must have room for them
        self._group = group
        self._target_times, self._times = times, StepTimes()
        self._limits = limits
        self._twins = TwinBlocks(limits.block_size)
        self._idle = 0  # how often drafts did not pay off since the last ones

    def prior(self, level: int) -> float:
        return 0.3 + 0.06 * level

    def pays(self, num_rows: int, odds: float = _FIRST_ODDS) -> bool:
        """True if a first guess per sequence is worth its time, or if that has to be found out.

        Drafts that did not pay off are tried again now and then.
        """
        cost = self._cost(num_rows, num_rows)
        if cost is None or odds > cost:
            return True
        self._idle += 1
        return self._idle >= _RETRY

    def note_submitted(self, batch: Batch) -> None:
        """Ignore a step of the target: this model does not use it."""

    def note_result(self, schedule: Schedule, batch: Batch, output: StepOutput) -> None:
        """Ignore the result of a step of the target: this model does not use it."""

    def catch_up(self, sequences: Iterable[Sequence]) -> None:
        """Do nothing: this model reads prompts late."""

    def draft(self, wanted: list[tuple[Sequence, Guesses]], num_rows: int) -> dict[Sequence, Draft]:
        """Return drafts for the sequences whose tokens the model has read.

        If there are none, read a chunk of a prompt.
        num_rows: rows of the target's step without drafts.
        Raises OctavoError or RuntimeError if the model fails.
        """
        self._idle = 0
        chains: list[Chain] = []
        behind: list[Chain] = []
        num_left = self._limits.max_num_batched_tokens
        claimed: set[int] = set()  # blocks being written: choices share their prompt's blocks at first
        for sequence, guesses in wanted:
            chain = self._open(sequence, guesses)
            blocks = set() if chain is None else self._twins.written(_reading(chain), self._blocks(sequence))
            if chain is None or not claimed.isdisjoint(blocks):
                continue
            claimed |= blocks
            missing = len(sequence.token_ids) - _reading(chain).num_read
            if missing > _INLINE:
                behind.append(chain)
            elif missing <= num_left:
                num_left -= missing
                chains.append(chain)
        for chain in behind:
            if self._is_worth_reading(chain):
                self._read(chain)
                break
        active, first = chains, True
        while active:
            self._extend(active, is_first=first)
            first = False
            active = self._worth_more(active, num_rows)
        return self._drafts(chains)

    def _drafts(self, chains: list[Chain]) -> dict[Sequence, Draft]:
        """Return the drafts of the chains that have a guess."""
        return {each.sequence: Draft(self, each.token_ids, each.levels) for each in chains if each.token_ids}

    def _blocks(self, sequence: Sequence) -> list[int]:
        return sequence.block_tables[self._group].block_ids

    def _open(self, sequence: Sequence, guesses: Guesses) -> Chain | None:
        if guesses.reading is None:
            guesses.reading = DraftReading()
        reading, tokens = guesses.reading, sequence.token_ids
        block_ids = self._blocks(sequence)
        self._twins.find(reading, tokens, block_ids, sequence.request.num_preemptions)
        limit = self._most(sequence, guesses)
        return Chain(sequence, guesses, reading, limit, [], []) if limit > 0 else None

    def _most(self, sequence: Sequence, guesses: Guesses, num_unknown: int = 0) -> int:
        """Return the most drafts for a sequence after num_unknown more tokens."""
        most, count = guesses.options.num_speculative_tokens, len(sequence.token_ids) + num_unknown
        limit = min(
            self.max_drafts if most is None else min(self.max_drafts, most),
            sequence.request.max_total_tokens - count - 1,
            self._limits.max_model_len - count,
        )
        return 0 if guesses.barred_at == count else limit

    def odds_ahead(self, sequence: Sequence, guesses: Guesses, num_unknown: int, num_rows: int) -> list[float] | None:
        """Return the odds of the guesses worth making after the step in flight, which draws at most num_unknown tokens.

        Return None if the model has to read tokens first, or if the choice depends on tokens that are not known yet.
        """
        cost = self._cost(num_rows, num_rows)
        if cost is None or guesses.options.speculative_p_min or not self._is_ready(sequence, guesses):
            return None
        share, value = guesses.acceptance.share(self), 1.0
        odds: list[float] = []
        most = self._most(sequence, guesses, num_unknown)
        while len(odds) < most and value * share > cost:
            odds.append(share)
            value *= share
        return odds

    def _is_ready(self, sequence: Sequence, guesses: Guesses) -> bool:
        """True if the model has read all tokens of a sequence except the last."""
        reading, tokens = guesses.reading, sequence.token_ids
        if reading is None:
            return False
        self._twins.find(reading, tokens, self._blocks(sequence), sequence.request.num_preemptions)
        return reading.num_read + 1 == len(tokens)

    def chain_ahead(self, item: ScheduledSequence, drawn: DrawnRows) -> AheadChain:
        """Return the chain of guesses for an item of a step submitted ahead.

        The sequence looks as it will after the previous step.
        """
        sequence = item.sequence
        start = len(sequence.token_ids) - drawn.num_drafts - 2
        spare = self._limits.num_blocks + sequence.row
        return AheadChain(sequence, drawn, start, item.num_drafts, self._blocks(sequence), spare)

    def batch(self, runs: list[TokenRun]) -> Batch:
        """Return the batch for a step of the draft model."""
        return self._complete(self._twins.batch(runs))

    def note_ahead(self, sequence: Sequence, guesses: Guesses) -> None:
        """Record that all tokens of a sequence were read before the guesses for the step in flight."""
        if guesses.reading is not None:
            tokens = sequence.token_ids
            self._twins.note(guesses.reading, tokens, self._blocks(sequence), len(tokens))

    def _is_worth_reading(self, chain: Chain) -> bool:
        """True if drafts for the rest of the answer will save more time than reading takes."""
        tokens, step_s = chain.sequence.token_ids, self._target_times.step_s(1)
        per_token = self._times.chunk_token_s(_reading(chain).num_read)
        if step_s is None or per_token is None:
            return True
        left = chain.sequence.request.max_total_tokens - len(tokens)
        return left * _GAIN * step_s > (len(tokens) - _reading(chain).num_read) * per_token

    def _read(self, chain: Chain) -> None:
        """Read as many tokens as fit into about the time of a target's step, without computing logits."""
        reading, tokens = _reading(chain), chain.sequence.token_ids
        step_s, per_token = self._target_times.step_s(1), self._times.chunk_token_s(reading.num_read)
        count = 64 if step_s is None or per_token is None else int(step_s / per_token)
        end = min(reading.num_read + min(max(count, _INLINE), 256), len(tokens) - 1)
        self._run([self._part(chain, tokens[reading.num_read : end], reading.num_read)], end - reading.num_read)
        self._twins.note(reading, tokens, self._blocks(chain.sequence), end)

    def _extend(self, chains: list[Chain], *, is_first: bool) -> None:
        """Add one guess to each chain."""
        parts = []
        for chain in chains:
            tokens, reading = chain.sequence.token_ids, _reading(chain)
            if is_first:
                parts.append(self._part(chain, tokens[reading.num_read :], reading.num_read))
            else:
                parts.append(self._part(chain, chain.token_ids[-1:], len(tokens) + len(chain.token_ids) - 1))
        output = self._run(parts, 0)
        for chain in chains:
            tokens, block_ids, reading = chain.sequence.token_ids, self._blocks(chain.sequence), _reading(chain)
            if is_first:
                self._twins.note(reading, tokens, block_ids, len(tokens))
            elif self._twins.room(block_ids, len(tokens) + len(chain.token_ids) - 1):
                reading.guesses.append(chain.token_ids[-1])
        self._take_guesses(chains, output)

    def _take_guesses(self, chains: list[Chain], output: StepOutput) -> None:
        """Add the token of each row to its chain."""
        rows = zip(chains, output.token_ids.tolist(), output.logprobs.tolist(), strict=True)
        for chain, row, logprob in rows:
            token_id = self._token_of(row)
            if token_id >= self._limits.vocab_size:  # rows of padding
                chain.value = 0.0
                continue
            level = min(int(10 * math.exp(logprob)), 9)
            chain.token_ids.append(token_id)
            chain.levels.append(level)
            chain.value *= chain.guesses.acceptance.odds(Draft(self, [token_id], [level]))[0]

    def _token_of(self, row: int) -> int:
        """Return the target's token id for a row of logits."""
        return row

    def _part(self, chain: Chain, token_ids: list[int], start: int) -> TokenRun:
        sequence = chain.sequence
        return TokenRun(token_ids, start, self._blocks(sequence), self._limits.num_blocks + sequence.row)

    def _worth_more(self, chains: list[Chain], num_rows: int) -> list[Chain]:
        """Return the chains whose next guess is worth its time."""
        cost = self._cost(num_rows, len(chains)) or 0.0
        room = [each for each in chains if len(each.token_ids) < each.limit and each.value]
        return [each for each in room if each.value * _FIRST_ODDS > cost]

    def _cost(self, num_rows: int, num_chains: int) -> float | None:
        """Return the cost per chain of a guess and of its row, in tokens that the target would make in the same time.

        Return None if times are unknown.
        """
        draft_s, step_s = self._times.step_s(num_chains), self._target_times.step_s(num_rows)
        if draft_s is None or not step_s:
            return None
        row_s = max((self._target_times.step_s(num_rows + num_chains) or step_s) - step_s, 0.0)
        return (draft_s + row_s) / num_chains * num_rows / step_s

    def _run(self, parts: list[TokenRun], num_chunk_tokens: int, inputs: tuple[Float32, ...] = ()) -> StepOutput:
        """Run a step of the draft model. Return the most likely next tokens and their log-probabilities."""
        started_at = time.perf_counter()
        batch = self.batch(parts)
        batch.inputs = inputs
        output = self.executor.submit(batch).wait()
        rows = 0 if num_chunk_tokens else len(parts)
        self._times.observe(rows, num_chunk_tokens, parts[0].start, time.perf_counter() - started_at)
        return output

    def _complete(self, batch: Batch) -> Batch:
        """Complete the batch with the fields that this model needs."""
        return batch


def _reading(chain: Chain) -> DraftReading:
    assert chain.reading is not None
    return chain.reading


FAILURES = (OctavoError, SamplingError, RuntimeError, MemoryError)
