"""Chooses the drafts of each step: collects guesses from the sources and lets the policy decide over all sequences."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.engine.request import RequestStatus, Sequence
from octavo.engine.speculation.acceptance import Acceptance
from octavo.engine.speculation.ahead_drafts import AheadDrafts, guess_tokens
from octavo.engine.speculation.draft_source import Draft, DraftSource, Guesser
from octavo.engine.speculation.model_drafter import FAILURES, ModelDrafter
from octavo.engine.speculation.policy import DraftPolicy
from octavo.speculative_config import MAX_DRAFTING, MAX_DRAFTS

if TYPE_CHECKING:
    from octavo.batch import Batch, StepOutput
    from octavo.engine.metrics import EngineMetrics
    from octavo.engine.overlap import DrawnRows
    from octavo.engine.schedule import Schedule
    from octavo.engine.speculation.twin_blocks import DraftReading
    from octavo.engine.step_times import StepTimes
    from octavo.generation_request import RequestOptions

logger = logging.getLogger(__name__)

_ENOUGH = 2.0  # a draft with this many expected tokens makes the draft model unnecessary
_MEASURED = 64  # every 64th step waits for its tokens
_LIKELY = 0.5  # odds of the next token from which the following step waits for it


@dataclass(slots=True)
class Guesses:
    """The knowledge of all draft sources about a sequence, and their last draft.

    guessers: the sources' guessers, each with the most drafts it may make per step.
    position: number of tokens before the draft.
    odds: the odds of each draft token, up to the first that is too unlikely for the request.
    options: the options of the request, with its limits for drafts.
    barred_at: number of tokens after which no draft may follow, because the step with one had to be repeated.
    """

    guessers: list[tuple[Guesser, int]]
    acceptance: Acceptance
    options: RequestOptions
    position: int = 0
    draft: Draft | None = None
    odds: list[float] = field(default_factory=list)
    barred_at: int = -1
    reading: DraftReading | None = None  # by the draft model


class Speculation:
    """The drafts for an engine's sequences.

    Every guess is compared with the actual tokens, even if no step has computed it. So a source that was wrong for a
    while is used again as soon as its guesses are right.
    """

    def __init__(
        self, sources: Row[DraftSource], times: StepTimes, metrics: EngineMetrics, limit: int = MAX_DRAFTS
    ) -> None:
        """limit: most drafts for a sequence in one step, over all sources."""
        self.limit = limit
        self._sources = sources
        self._policy = DraftPolicy(times)
        self._metrics = metrics
        self._acceptance = Acceptance()
        self.drafter: ModelDrafter | None = None
        self._num_ahead = 0  # steps whose guesses were made during the previous step

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of all sources, as metrics show them."""
        drafter = () if self.drafter is None else (self.drafter.name,)
        return (*(source.name for source in self._sources), *drafter)

    @property
    def max_drafts(self) -> int:
        """The most drafts for a sequence in one step."""
        drafter = [] if self.drafter is None else [self.drafter.max_drafts]
        return min(self.limit, max([*(source.max_drafts for source in self._sources), *drafter], default=0))

    @property
    def reads_hidden(self) -> bool:
        """True if the drafter needs the hidden states of all tokens of a step. A failed drafter needs none."""
        return self.drafter is not None and self.drafter.reads_hidden

    def note_submitted(self, batch: Batch) -> None:
        """Record a step before it is submitted. Steps must be recorded in order."""
        if self.drafter is not None:
            self.drafter.note_submitted(batch)

    def note_result(self, schedule: Schedule, batch: Batch, output: StepOutput) -> None:
        """Record the result of a step before sequences get its tokens."""
        if self.drafter is not None:
            self.drafter.note_result(schedule, batch, output)

    def propose(self, running: Iterable[Sequence], max_rows: int, *, may_explore: bool) -> None:
        """Give sequences their drafts for the next step, replacing the last ones.

        running: sequences that are not in any step.
        max_rows: most rows in a step.
        may_explore: see `DraftPolicy.lengths`. Never True while prompts are being read.
        """
        sequences, num_rows, everybody = [], 0, list(running)
        for sequence in everybody:
            sequence.draft_token_ids = []
            num_missing = len(sequence.token_ids) - sequence.num_computed_tokens
            if num_missing == 1:
                num_rows += 1
                if _may_draft(sequence):
                    sequences.append(sequence)
            elif num_missing > 1:
                may_explore = False
        if num_rows > MAX_DRAFTING:
            return
        self._catch_up(everybody)
        found = [(sequence, *guess) for sequence in sequences if (guess := self._guess(sequence, ())) is not None]
        if self.drafter is not None and sequences and self.drafter.pays(num_rows):
            self._ask_model(self.drafter, sequences, num_rows)
            guesses = [(sequence, sequence.guesses) for sequence in sequences]
            found = [(each, of.draft, of.odds) for each, of in guesses if of is not None and of.draft and of.odds]
        lengths = self._policy.lengths(
            [odds for _, _, odds in found], num_rows, max_rows - num_rows, may_explore=may_explore
        )
        for (sequence, draft, _), length in zip(found, lengths, strict=True):
            if length >= sequence.request.options.min_speculative_tokens:
                sequence.draft_token_ids = draft.token_ids[:length]

    def _catch_up(self, running: list[Sequence]) -> None:
        if self.drafter is not None:
            try:
                self.drafter.catch_up(running)
            except FAILURES as error:
                self._lose_drafter(error)

    def _lose_drafter(self, error: BaseException) -> None:
        logger.error("the draft model is no longer used: %s", error)
        self.drafter = None
        self._metrics.num_lost_draft_models = 1

    def _ask_model(self, drafter: ModelDrafter, sequences: list[Sequence], num_rows: int) -> None:
        """Ask the draft model for guesses, and use them where they are better than the guesses from other sources."""
        wanted = []
        for sequence in sequences:
            guesses = sequence.guesses
            if guesses is not None and (guesses.draft is None or expected_tokens(guesses.odds) < _ENOUGH):
                wanted.append((sequence, guesses))
        try:
            drafts = drafter.draft(wanted, num_rows)
        except FAILURES as error:
            self._lose_drafter(error)
            return
        for sequence, guesses in wanted:
            draft = drafts.get(sequence)
            if draft is not None:
                odds = guesses.acceptance.odds(draft)
                if guesses.draft is None or expected_tokens(odds) > expected_tokens(guesses.odds):
                    guesses.draft, guesses.odds = draft, _likely(odds, guesses.options)

    def would_draft(self, sequences: Iterable[Sequence], token_ids: list[int]) -> bool:
        """True if the step after this one gets drafts.

        token_ids: this step's tokens, one per sequence, not yet added to the sequences.
        """
        chains = []
        if len(token_ids) > MAX_DRAFTING:
            return False
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            guess = self._guess(sequence, (token_id,)) if _may_draft(sequence, 1) else None
            if guess is not None:
                chains.append(guess[1])
        if self.drafter is not None and self.drafter.pays(len(token_ids)):
            return True
        return any(self._policy.lengths(chains, len(token_ids), MAX_DRAFTS))

    def may_draft_next(self, sequences: Iterable[Sequence]) -> bool:
        """True if the step after the one in flight will probably have drafts, once the tokens in flight are known.

        If so, it must not be submitted before then, unless the drafts come from `lengths_ahead`.
        """
        waiting = list(sequences)
        if len(waiting) > MAX_DRAFTING:
            return False
        return (self.drafter is not None and self.drafter.pays(len(waiting))) or self._may_match_next(waiting)

    def _may_match_next(self, sequences: list[Sequence]) -> bool:
        """Like `may_draft_next`, for the sources that read tokens on the host."""
        chains = []
        for sequence in sequences:
            guess = self._guess(sequence, ()) if _may_draft(sequence, 1) else None
            num_drafts = len(sequence.draft_token_ids)
            if guess is None or guess[0].source is self.drafter:
                continue
            if num_drafts and math.prod(guess[1][: num_drafts + 1]) >= _LIKELY:
                return True  # the text is likely to continue as before
            if not num_drafts and guess[1][0] >= _LIKELY:
                chains.append(guess[1][1:])
        return any(self._policy.lengths(chains, len(sequences), MAX_DRAFTS))

    def lengths_ahead(self, step: Schedule, max_rows: int) -> dict[Sequence, int] | None:
        """Return the number of the draft model's guesses per sequence for the step after `step`, which is running.

        max_rows: most rows in a step.
        Return None if the guesses need the tokens of `step`, because n-grams probably know more or the model has not
        read everything yet. Also return None now and then, because only then can the times of steps and guesses be
        measured.
        """
        drafter, is_running = self.drafter, RequestStatus.RUNNING
        running = [item for item in step.scheduled.values() if item.rows and item.sequence.status is is_running]
        if drafter is None or not drafter.is_on_device or self._may_match_next([item.sequence for item in running]):
            return None
        if drafter.reads_hidden and step.has_chunks:  # the head must read this chunk before the next one
            return None
        self._num_ahead += 1
        if self._num_ahead % _MEASURED == 0:
            return None
        chains: dict[Sequence, list[float]] = {}
        for item in running:
            sequence, guesses = item.sequence, item.sequence.guesses
            if guesses is None or not _may_draft(sequence):
                return None
            odds = drafter.odds_ahead(sequence, guesses, item.rows[-1].count, len(running))
            if odds is None:
                return None
            chains[sequence] = odds
        lengths = self._policy.lengths(
            list(chains.values()), len(chains), max_rows - len(chains), may_explore=not step.has_chunks
        )
        pairs = zip(chains, lengths, strict=True)
        return {each: length for each, length in pairs if length >= max(each.request.options.min_speculative_tokens, 1)}

    def draft_ahead(self, schedule: Schedule, drawn: Mapping[Sequence, DrawnRows]) -> AheadDrafts | None:
        """Have the draft model make a step's guesses while the previous step runs. Return None if it makes none."""
        items = [item for item in schedule.scheduled.values() if item.num_drafts and item.sequence in drawn]
        if self.drafter is None or not items:
            return None
        ahead = AheadDrafts(self.drafter, [self.drafter.chain_ahead(item, drawn[item.sequence]) for item in items])
        try:
            ahead.submit()
        except FAILURES as error:  # whatever is on the device instead of guesses is as harmless as wrong guesses
            self._lose_drafter(error)
        return ahead

    def take_ahead(self, ahead: AheadDrafts, schedule: Schedule, output: StepOutput) -> None:
        """Give sequences the guesses that a step computed for them, so that its tokens can be checked against them."""
        computed = ahead.computed(schedule, output)
        try:
            drafts = ahead.drafts(computed)
        except FAILURES as error:
            self._lose_drafter(error)
            drafts = {}
        for sequence, token_ids in computed.items():
            sequence.draft_token_ids, guesses = token_ids, sequence.guesses
            draft = drafts.get(sequence) or Draft(ahead.drafter, token_ids, [0] * len(token_ids))
            if guesses is None or sequence.status is not RequestStatus.RUNNING:
                continue
            if guesses.draft is not None and len(sequence.token_ids) > guesses.position:
                guesses.acceptance.observe(guesses.draft, sequence.token_ids[guesses.position :])
            guesses.draft, guesses.odds = draft, guesses.acceptance.odds(draft)
            guesses.position = len(sequence.token_ids)

    def note_ahead(self, ahead: AheadDrafts | None) -> None:
        """Update sequences for the guesses of the step in flight, now that the tokens before them are known."""
        for sequence, length in () if ahead is None else ahead.sequences.items():
            if sequence.status is RequestStatus.RUNNING and sequence.guesses is not None and ahead is not None:
                sequence.draft_token_ids = guess_tokens(length)
                ahead.drafter.note_ahead(sequence, sequence.guesses)

    def bar(self, sequence: Sequence) -> None:
        """Make a sequence repeat its last step without drafts."""
        if sequence.guesses is not None:
            sequence.guesses.barred_at = len(sequence.token_ids)

    def count(self, sequence: Sequence, num_drafts: int, tokens: list[int]) -> None:
        """Count the drafts of a step that has ended.

        tokens: the step's new tokens, not yet added to the sequence.
        """
        guesses, request, metrics = sequence.guesses, sequence.request, self._metrics
        if guesses is None or guesses.draft is None:
            return
        drafts, source = guesses.draft.token_ids[:num_drafts], guesses.draft.source.name
        pairs = enumerate(zip(drafts, tokens, strict=False))
        num_accepted = next((i for i, (draft, token) in pairs if draft != token), min(num_drafts, len(tokens)))
        drafted, accepted = request.num_drafts.get(source, (0, 0))
        request.num_drafts[source] = drafted + num_drafts, accepted + num_accepted
        if not request.is_measured:
            return
        metrics.num_drafts_total += 1
        _add(metrics.num_draft_tokens_total, source, num_drafts)
        _add(metrics.num_accepted_draft_tokens_total, source, num_accepted)
        for position in range(num_accepted):
            _add(metrics.num_accepted_by_position_total, str(position), 1)

    def _guess(self, sequence: Sequence, tail: tuple[int, ...]) -> tuple[Draft, list[float]] | None:
        """Return the best draft after the sequence's tokens and `tail`, with its odds.

        Learns from the previous draft.
        """
        guesses = sequence.guesses
        if guesses is None:
            opened = [(source.open(sequence), source.max_drafts) for source in self._sources]
            guessers = [(guesser, most) for guesser, most in opened if guesser is not None]
            guesses = Guesses(guessers, Acceptance(self._acceptance), sequence.request.options)
            sequence.guesses = guesses
        position = len(sequence.token_ids) + len(tail)
        if position != guesses.position:
            if guesses.draft is not None and position > guesses.position:
                came = [*sequence.token_ids[guesses.position :], *tail]
                guesses.acceptance.observe(guesses.draft, came)
            self._find(sequence, guesses, tail)
            guesses.position = position
        if guesses.draft is None or not guesses.odds or guesses.barred_at == position:
            return None
        return guesses.draft, guesses.odds

    def _find(self, sequence: Sequence, guesses: Guesses, tail: tuple[int, ...]) -> None:
        limit = min(self.limit, sequence.request.max_total_tokens - len(sequence.token_ids) - len(tail) - 1)
        most = guesses.options.num_speculative_tokens
        if most is not None:
            limit = min(limit, most)
        guesses.draft, guesses.odds, best = None, [], 0.0
        if limit <= 0:
            return
        for guesser, most in guesses.guessers:
            draft = guesser.guess(tail, min(limit, most)) if most else None
            if draft is None:
                continue
            odds = guesses.acceptance.odds(draft)
            expected = expected_tokens(odds)
            if expected > best:
                guesses.draft, guesses.odds, best = draft, _likely(odds, guesses.options), expected


def _may_draft(sequence: Sequence, num_unknown: int = 0) -> bool:
    """True for a single sequence that has started its answer and will continue."""
    group = sequence.group
    return (
        sequence.status is RequestStatus.RUNNING
        and len(group.members) == 1
        and group.consumers[-1].takes_drafts
        and sequence.num_output_tokens + num_unknown > 0
    )


def _likely(odds: list[float], options: RequestOptions) -> list[float]:
    """Return the odds up to, but excluding, the first one that is too low for the request."""
    least = options.speculative_p_min
    if not least:
        return odds
    return odds[: next((i for i, each in enumerate(odds) if each < least), len(odds))]


def expected_tokens(odds: list[float]) -> float:
    """Return the expected number of right tokens in a draft."""
    expected, value = 0.0, 1.0
    for each in odds:
        value *= each
        expected += value
    return expected


def _add(counts: dict[str, int], key: str, count: int) -> None:
    counts[key] = counts.get(key, 0) + count
