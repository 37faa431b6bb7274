"""Turns a schedule into the arrays of `Batch`, with as little Python per token as possible.

`SamplingState` tracks the tokens of one sequence; `BatchBuilder` gathers the arrays of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from octavo.batch import SAMPLING_ROW, Batch, DomainRows, Float32, Int32, SamplingBatch, token_mask
from octavo.engine.adapter_rows import add_adapters, following_domains
from octavo.engine.consumers.row_consumer import RowKind
from octavo.engine.overlap import GUESS, UNKNOWN_TOKEN, DrawnRows, late_tokens
from octavo.engine.request import Sequence
from octavo.engine.schedule import Schedule, ScheduledSequence
from octavo.engine.source_rows import RowsOfSource, add_source_rows, source_lengths
from octavo.engine.span_rows import RowsOf, add_rotary, add_spans, values_of
from octavo.graph.source import SOURCE
from octavo.graph.values import TOKENS
from octavo.speculative_config import MAX_DRAFTING

if TYPE_CHECKING:
    from octavo.engine.limits import EngineLimits
    from octavo.engine.speculation.ahead_drafts import AheadDrafts
    from octavo.engine.texts.constrained import MaskRows
    from octavo.graph.cache import CacheLayout

_Values = TypeVar("_Values", Int32, Float32)


class _Rows(NamedTuple):
    """The output rows of a step, with one entry per row in each list.

    targets: token whose log-probability is wanted, or -1 to sample a new one.
    counters: index of the new token in its answer.
    num_drafts: number of drafts before the row.
    """

    sequences: list[Sequence]
    targets: list[int]
    counters: list[int]
    num_drafts: list[int]


class SamplingState:
    """The sampling state of a running sequence, read by the batch builder at each step.

    It depends only on the sequence's tokens, so it is rebuilt after a preemption.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        request = sequence.request
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._params = request.params.sampling
        self.has_penalties = self._params.has_penalties
        self._static_bias = dict(self._params.logit_bias or {})
        self.has_bias = bool(self._static_bias or request.bad_words_ids or self._params.min_tokens)
        allowed = self._params.allowed_token_ids
        self.allowed_mask = None if allowed is None else token_mask(allowed, vocab_size)
        self.has_mask = self.allowed_mask is not None or sequence.grammar is not None
        self._num_seen = 0
        self._position: dict[int, int] = {}  # token id -> its index in the two arrays
        self._seen_ids = np.zeros(64, np.int32)
        self._seen_counts = np.zeros(64, np.int32)

    def fill_row(self, row: np.void) -> None:
        """Write the constant parameters of the sequence into its row, an element of SAMPLING_ROW."""
        params, sequence, vocab_size = self._params, self._sequence, self._vocab_size
        row["temperature"] = 0.0 if params.is_greedy else params.temperature
        row["top_k"] = min(max(params.top_k, 0), vocab_size)
        for name in ("top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            row[name] = getattr(params, name)
        row["seed"] = sequence.seed
        row["target"] = -1
        row["num_logprobs"] = min(sequence.group.consumers[-1].num_logprobs(sequence.request), vocab_size)

    def history(self, num_drafts: int = 0) -> tuple[Int32, Int32]:
        """Return the distinct token ids so far, with the first num_drafts drafts, and how often each was generated."""
        sequence = self._sequence
        if num_drafts:
            return self._with_drafts(sequence.draft_token_ids[:num_drafts])
        for start, end in sequence.request.prompt.text_ranges(self._num_seen, len(sequence.token_ids)):
            self._see(sequence.token_ids[start:end], start)
        self._num_seen = len(sequence.token_ids)
        return self._seen_ids[: len(self._position)], self._seen_counts[: len(self._position)]

    def _see(self, token_ids: list[int], start: int) -> None:
        """Add the tokens from position `start` on."""
        num_prompt_tokens = self._sequence.request.num_prompt_tokens
        for i, token_id in enumerate(token_ids, start):
            position = self._position.setdefault(token_id, len(self._position))
            if position == len(self._seen_ids):
                self._seen_ids = np.concatenate([self._seen_ids, np.zeros_like(self._seen_ids)])
                self._seen_counts = np.concatenate([self._seen_counts, np.zeros_like(self._seen_counts)])
            self._seen_ids[position] = token_id
            self._seen_counts[position] += i >= num_prompt_tokens

    def _with_drafts(self, drafts: list[int]) -> tuple[Int32, Int32]:
        """Return the history including drafts. The result is not cached, because drafts may be rejected."""
        ids, counts = self.history()
        new_ids = [token_id for token_id in dict.fromkeys(drafts) if token_id not in self._position]
        counts = np.concatenate([counts, np.zeros(len(new_ids), np.int32)])
        places = self._position | {token_id: len(ids) + i for i, token_id in enumerate(new_ids)}
        for token_id in drafts:
            counts[places[token_id]] += 1
        return np.concatenate([ids, np.array(new_ids, np.int32)]), counts

    def bias(self, num_drafts: int = 0) -> tuple[Int32, Float32]:
        """Return distinct token ids and their logit biases, for the token after the first num_drafts drafts."""
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


class BatchBuilder:
    """Keeps constant parameters in tables indexed by `Sequence.row`, and gathers the arrays of each step from them.

    num_rows: maximum number of sequences that run at once.
    layout: the groups of layers, each with its own block tables.
    """

    def __init__(self, limits: EngineLimits, num_rows: int, layout: CacheLayout) -> None:
        self.rows_of: RowsOf = values_of
        self.rows_of_source: RowsOfSource = lambda _: None
        self._has_sources = bool(limits.sources.width)
        self._is_of_tokens = [group.domain is TOKENS for group in layout.groups]
        self._components = limits.images.position_components
        self._block_size = limits.block_size
        self._vocab_size = limits.vocab_size  # the limit of masks and top_k
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self._block_tables = np.zeros((len(layout.groups), num_rows, max_blocks), np.int32)
        self._sampling_rows = np.zeros(num_rows, SAMPLING_ROW)
        self._owners: list[Sequence | None] = [None] * num_rows
        self._states: list[SamplingState | None] = [None] * num_rows
        self.gives_hidden = False  # also return hidden states of all tokens, for a head that drafts
        self._settled: tuple[list[Sequence], SamplingBatch] | None = None
        self._adapter_slots = limits.adapter_slots
        # For a step without spans or sources of a graph that takes some.
        width = limits.span_width or limits.sources.width
        self._inputs = (np.zeros((0, width), np.float32),) if width else ()
        self._takes_spans = bool(limits.span_width)

    def build(
        self,
        step: Schedule,
        drawn: Mapping[Sequence, DrawnRows] | None = None,
        ahead: AheadDrafts | None = None,
    ) -> Batch:
        """Return the arrays of the step. Output rows are in the order of the sequences and their `rows`.

        drawn: from `overlap.as_if_done`, for a step submitted while the previous one runs.
        ahead: guesses for that step, if they are made while the previous one runs.
        """
        scheduled = list(step.scheduled.values())
        for item in scheduled:
            self._sync_blocks(item.sequence)
        rows = np.array([item.sequence.row for item in scheduled], np.int32)
        counts = np.array([item.num_tokens for item in scheduled], np.int32)
        starts = np.array([item.start for item in scheduled], np.int32)
        query_start_loc = np.zeros(len(scheduled) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        if counts.max() == 1:
            # Not known yet in a step prepared ahead.
            known = not step.is_ahead or drawn is not None
            tokens = [item.sequence.token_ids[item.start] if known else 0 for item in scheduled]
            token_ids = np.array(tokens, np.int32)
            positions, token_rows = starts, rows
        else:
            token_ids = self._gather_token_ids(scheduled, query_start_loc)
            positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(starts - query_start_loc[:-1], counts)
            token_rows = np.repeat(rows, counts)
        block, offset = np.divmod(positions, np.int32(self._block_size))
        slots = self._block_tables[:, token_rows, block] * np.int32(self._block_size) + offset
        seq_lens = starts + counts
        logits_indices, wanted_hidden, wanted = self._build_rows(step)
        hidden_indices = wanted_hidden
        if self.gives_hidden and len(scheduled) <= MAX_DRAFTING:
            hidden_indices = np.concatenate([wanted_hidden, np.arange(len(token_ids), dtype=np.int32)])
        source_lens = source_lengths(scheduled) if self._has_sources else None
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=self._tables_of(rows, seq_lens, source_lens),
            slot_mapping=np.ascontiguousarray(slots),
            logits_indices=logits_indices,
            hidden_indices=hidden_indices,
            block_copies=np.array([pair for item in scheduled for pair in item.copies], np.int32).reshape(-1, 2),
            sampling=None if len(wanted_hidden) and not len(logits_indices) else self._sampling(wanted),
            token_types=_token_types(scheduled, query_start_loc) if len(wanted_hidden) else None,
            return_logits=any(each.request.params.sampling.processed_logprobs for each in wanted.sequences),
            inputs=self._inputs,
        )
        self._add_domains(batch, scheduled, source_lens)
        if scheduled[0].sequence.state_slot >= 0:
            _add_states(batch, scheduled)
        if drawn:
            _add_sources(batch, scheduled, drawn, ahead)
        return batch

    def _add_domains(self, batch: Batch, scheduled: list[ScheduledSequence], source_lens: Int32 | None) -> None:
        """Fill `Batch.domains` and `Batch.inputs`."""
        if source_lens is not None:
            add_source_rows(batch, scheduled, source_lens, self._block_size, self.rows_of_source)
        if self._takes_spans:
            add_spans(batch, scheduled, self.rows_of)
        if self._components > 1:
            add_rotary(batch, scheduled, self._components)
        if self._adapter_slots:
            add_adapters(batch, scheduled, self._adapter_slots)

    def follow(self, batch: Batch, step: Schedule) -> Batch:
        """Return the arrays of the step that `Scheduler.schedule_ahead` made after the step of `batch`.

        The token ids are not filled in. Every sequence has one more token. Most arrays of plain sequences stay the
        same, so this takes half as long as `build`.
        """
        positions, sampling = batch.positions + 1, batch.sampling
        if self._settled is None or sampling is None or sampling.history_start is not self._settled[1].history_start:
            return self.build(step)
        if batch.late is not None:  # its positions differ from its tokens' positions
            return self.build(step)
        if batch.state_slots is not None or len(batch.hidden_indices) or len(batch.logits_indices) != len(positions):
            return self.build(step)
        tables, slots = batch.block_tables, batch.slot_mapping + 1
        source_lens = batch.domains[SOURCE.name].lengths if self._has_sources else None
        begins = np.flatnonzero(positions % self._block_size == 0)  # sequences with a new block
        if len(begins):
            sequences = list(step.scheduled)
            for row in begins.tolist():
                self._sync_blocks(sequences[row])
            rows = np.array([sequence.row for sequence in sequences], np.int32)
            tables = self._tables_of(rows, batch.seq_lens + 1, source_lens)
            blocks = positions[begins] // np.int32(self._block_size)
            slots[:, begins] = self._block_tables[:, rows[begins], blocks] * np.int32(self._block_size)
        options = sampling.rows.copy()  # a step in flight reads the original rows
        options["counter"] += 1
        followed = Batch(
            token_ids=np.zeros(len(positions), np.int32),
            positions=positions,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens + 1,
            block_tables=tables,
            slot_mapping=slots,
            logits_indices=batch.logits_indices,
            sampling=replace(sampling, rows=options),
            inputs=self._inputs,
            domains=following_domains(batch) if self._adapter_slots else {},
        )
        if source_lens is not None:
            followed.domains = {**followed.domains, SOURCE.name: DomainRows(0, lengths=source_lens)}
        if self._components > 1:
            add_rotary(followed, list(step.scheduled.values()), self._components)
        return followed

    def _tables_of(self, rows: Int32, seq_lens: Int32, source_lens: Int32 | None) -> Int32:
        """Return the block tables of the sequences in these rows, as wide as the longest sequence or source needs."""
        longest = int(seq_lens.max())
        if source_lens is not None:
            longest = max(longest, int(source_lens.max()))
        num_blocks = -(-longest // self._block_size)
        return np.take(self._block_tables[:, :, :num_blocks], rows, axis=1)

    def _gather_token_ids(self, scheduled: list[ScheduledSequence], query_start_loc: Int32) -> Int32:
        token_ids = np.empty(int(query_start_loc[-1]), np.int32)
        for item, start in zip(scheduled, query_start_loc.tolist(), strict=False):
            sequence, end = item.sequence, start + item.num_tokens
            tokens = sequence.token_ids[item.start : item.start + item.num_tokens]
            token_ids[start:end] = tokens + sequence.draft_token_ids[: item.num_tokens - len(tokens)]
        return token_ids

    def _sync_blocks(self, sequence: Sequence) -> None:
        row, tables = sequence.row, sequence.block_tables
        if self._owners[row] is not sequence:
            self._adopt(sequence)
        first, end = sequence.num_synced_blocks, len(tables[0].block_ids)
        if first < end:
            for group, table in enumerate(tables):
                if self._is_of_tokens[group]:
                    self._block_tables[group, row, first:end] = table.block_ids[first:]
                elif first == 0:
                    self._block_tables[group, row, : len(table.block_ids)] = table.block_ids
            sequence.num_synced_blocks = end

    def _adopt(self, sequence: Sequence) -> None:
        """Write the sampling parameters of a new sequence to its row."""
        row = sequence.row
        self._settled = None
        self._owners[row] = sequence
        sequence.num_synced_blocks = 0
        self._states[row] = state = SamplingState(sequence, self._vocab_size)
        state.fill_row(self._sampling_rows[row])

    # --- sampling ---

    def _build_rows(self, step: Schedule) -> tuple[Int32, Int32, _Rows]:
        """Return the token indices of the wanted logits and of the wanted hidden states, and the rows of logits."""
        indices: list[int] = []
        hidden: list[int] = []
        rows = _Rows([], [], [], [])
        hidden_kind, logprob_kind = RowKind.HIDDEN, RowKind.LOGPROB
        for use, _, token in step.rows():
            sequence, count, kind = use.sequence, use.count, use.consumer.kind
            if kind is hidden_kind:
                hidden.extend(range(token, token + count))
                continue
            indices.extend(range(token, token + count))
            rows.sequences.extend([sequence] * count)
            if kind is logprob_kind:
                rows.targets.extend(sequence.token_ids[use.start + 1 : use.start + 1 + count])
                rows.counters.extend([0] * count)
                rows.num_drafts.extend([0] * count)
                continue
            if self._owners[sequence.row] is not sequence:
                self._adopt(sequence)
            number = use.start + 1 - sequence.request.num_prompt_tokens
            rows.targets.extend([-1] * count)
            rows.counters.extend(range(number, number + count))
            rows.num_drafts.extend(range(count))
        return np.array(indices, np.int32), np.array(hidden, np.int32), rows

    def _sampling(self, rows: _Rows) -> SamplingBatch:
        """Return the sampling options of the rows. While the same plain sequences continue, reuse the last ones."""
        if max(rows.targets, default=0) >= 0 or any(rows.num_drafts):
            return self._gather_sampling(rows)
        if self._settled is not None and self._settled[0] == rows.sequences:
            settled = self._settled[1].rows.copy()  # a step in flight reads the original rows
            settled["counter"] = rows.counters
            return replace(self._settled[1], rows=settled)
        sampling = self._gather_sampling(rows)
        are_plain = all(sequence.request.params.sampling.is_plain for sequence in rows.sequences)
        self._settled = (rows.sequences, sampling) if are_plain else None
        return sampling

    def _gather_sampling(self, wanted: _Rows) -> SamplingBatch:
        rows = self._sampling_rows[np.array([sequence.row for sequence in wanted.sequences], np.intp)]
        rows["counter"] = wanted.counters
        states: list[SamplingState | None] = []
        for i, (sequence, target) in enumerate(zip(wanted.sequences, wanted.targets, strict=True)):
            states.append(self._states[sequence.row] if target < 0 else None)
            if target >= 0:
                rows["target"][i] = target
                rows["num_logprobs"][i] = sequence.request.params.prompt_logprobs
        depths = list(zip(states, wanted.num_drafts, strict=True))
        history_start, history_ids, history_counts = _compress(
            [state.history(n) if state is not None and state.has_penalties else None for state, n in depths], np.int32
        )
        bias_start, bias_ids, bias_values = _compress(
            [state.bias(n) if state is not None and state.has_bias else None for state, n in depths], np.float32
        )
        return SamplingBatch(
            rows=rows,
            history_start=history_start,
            history_ids=history_ids,
            history_counts=history_counts,
            bias_start=bias_start,
            bias_ids=bias_ids,
            bias_values=bias_values,
            allowed_mask=self._gather_masks(wanted, states),
        )

    def _gather_masks(self, wanted: _Rows, samplers: list[SamplingState | None]) -> NDArray[np.uint32] | None:
        """Return masks of the tokens that allowed_token_ids and grammars permit, or None if all are permitted."""
        if not any(state is not None and state.has_mask for state in samplers):
            return None
        masks = np.full((len(samplers), -(-self._vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        answers: list[MaskRows] = []
        for i, (sequence, depth, state) in enumerate(zip(wanted.sequences, wanted.num_drafts, samplers, strict=True)):
            if state is None:
                continue
            if state.allowed_mask is not None:
                masks[i] = state.allowed_mask
            if sequence.grammar is None:
                continue
            if depth:
                answers[-1].drafts.append(sequence.draft_token_ids[depth - 1])
            else:
                answers.append(sequence.grammar.rows(i, may_end=bool(sequence.request.eos_token_ids)))
        if answers:
            answers[0].state.filler.fill(answers, masks)
        return masks


def _add_states(batch: Batch, scheduled: list[ScheduledSequence]) -> None:
    """Fill the state fields of `Batch`."""
    batch.state_slots = np.array([item.sequence.state_slot for item in scheduled], np.int32)
    copies = [item.state_copy for item in scheduled if item.state_copy is not None]
    batch.state_copies = np.array(copies, np.int32).reshape(-1, 2)
    saves = [_state_saves(item) for item in scheduled]
    most = max(map(len, saves))
    if most:
        nothing = [(0, -1)] * most
        batch.state_saves = np.array([(each + nothing)[:most] for each in saves], np.int32)


def _state_saves(item: ScheduledSequence) -> list[tuple[int, int]]:
    """Return the token counts after which states are saved, with the slots that receive them.

    States are saved at the end of a prefix, or before each draft.
    """
    if item.snapshot is not None and item.state_load is None:
        return [(item.snapshot.num_tokens - item.start, item.snapshot.slot)]
    known = len(item.sequence.token_ids) - item.start
    return [(known + i, slot) for i, slot in enumerate(item.sequence.draft_slots)]


def _add_sources(
    batch: Batch,
    scheduled: list[ScheduledSequence],
    drawn: Mapping[Sequence, DrawnRows],
    ahead: AheadDrafts | None,
) -> None:
    """Fill `Batch.token_sources` and `Batch.late` for sequences whose last token and guesses are not known yet."""
    found = [drawn.get(item.sequence) for item in scheduled]
    sources = np.full(len(batch.token_ids), -1, np.int32)
    sources[batch.token_ids == UNKNOWN_TOKEN] = [each.row + each.num_drafts for each in found if each is not None]
    if ahead is not None:
        sources[batch.token_ids == GUESS] = [
            ahead.place_of(item.sequence, number) for item in scheduled for number in range(item.num_drafts)
        ]
    batch.token_ids[batch.token_ids < 0] = 0
    batch.token_sources, batch.late = sources, late_tokens(found)


def _token_types(scheduled: list[ScheduledSequence], query_start_loc: Int32) -> Int32 | None:
    """Return the type of each token in a step of texts, or None if all are type 0."""
    seconds = [item.sequence.request.params.second_start for item in scheduled]
    if not any(seconds):
        return None
    types = np.zeros(int(query_start_loc[-1]), np.int32)
    for item, second, begin in zip(scheduled, seconds, query_start_loc.tolist(), strict=False):
        if second:
            types[begin + max(second - item.start, 0) : begin + item.num_tokens] = 1
    return types


def _compress(entries: list[tuple[Int32, _Values] | None], dtype: type[np.generic]) -> tuple[Int32, Int32, _Values]:
    """Concatenate rows of different lengths. Return the start of each row, and the ids and values of all rows."""
    starts = np.zeros(len(entries) + 1, np.int32)
    present = [entry for entry in entries if entry is not None]
    if not present:
        return starts, np.zeros(0, np.int32), cast(_Values, np.zeros(0, dtype))
    np.cumsum([0 if entry is None else len(entry[0]) for entry in entries], out=starts[1:])
    return starts, np.concatenate([ids for ids, _ in present]), cast(_Values, np.concatenate([v for _, v in present]))
