"""The life cycle of a request, and its sequences of tokens."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.engine.consumers.row_consumer import RowConsumer, RowUse
from octavo.errors import OctavoError
from octavo.generation_request import BATCH_PRIORITY, Params, Pin, RequestOptions
from octavo.outputs import Logprob, RequestMetrics
from octavo.prompt import Prompt

if TYPE_CHECKING:
    from octavo.adapters.registry import HeldAdapter
    from octavo.batch import Float32, StepOutput
    from octavo.engine.encoding.rotary import RotaryPositions
    from octavo.engine.kv.block_tier import BlockRow, LoadedBlock
    from octavo.engine.publisher import TextStream
    from octavo.engine.speculation.head_drafter import HiddenRows
    from octavo.engine.speculation.speculation import Guesses
    from octavo.engine.texts.constrained import GrammarState


class RequestStatus(enum.Enum):
    ARRIVING = "arriving"  # its blocks are being loaded; WAITING follows
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """The reason why a sequence ended, with the values that `finish_reason` has in outputs.

    ERROR appears only in the metrics: a request that fails has no output.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class BlockTable:
    """The blocks of a sequence in one group of layers. The first num_passed entries have left the group's window."""

    block_ids: list[int] = field(default_factory=list)
    num_passed: int = 0

    @property
    def num_held(self) -> int:
        return len(self.block_ids) - self.num_passed

    @property
    def held(self) -> list[int]:
        return self.block_ids[self.num_passed :]


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's token sequences: its only one, one of its n choices, or one beam.

    The cache holds keys and values of token_ids[:num_computed_tokens] in the blocks of block_tables.
    draft_token_ids: guesses at the tokens after token_ids, computed by the next step and checked by its consumer.
    """

    request: Request
    index: int
    token_ids: list[int]  # prompt and output
    seed: int = 0
    group: SequenceGroup = field(init=False, repr=False)
    status: RequestStatus = RequestStatus.WAITING
    draft_token_ids: list[int] = field(default_factory=list)
    guesses: Guesses | None = None  # where its drafts come from
    hidden_rows: HiddenRows | None = None  # hidden states of its last tokens, for a head that drafts
    num_computed_tokens: int = 0
    block_tables: list[BlockTable] = field(default_factory=list)  # one per group of layers; empty without blocks
    block_hashes: list[bytes] = field(default_factory=list)  # chained hashes of the full blocks from the start
    row: int = -1  # its row in the batch builder; -1 if it has none
    num_synced_blocks: int = 0  # entries of block_tables that the batch builder has seen
    arrived: dict[bytes, BlockRow] = field(default_factory=dict)  # bytes of blocks loaded from a store, by key
    num_kept_blocks: int = 0  # blocks of its prompt passed to the store
    loads: list[LoadedBlock] = field(default_factory=list)  # blocks that its next step loads
    state_load: LoadedBlock | None = None  # the same for its states
    state_slot: int = -1  # slot of its states after num_computed_tokens; -1 if none
    draft_slots: list[int] = field(default_factory=list)  # slots of its states before each draft of the step in flight
    cumulative_logprob: float | None = None  # None if not requested
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one entry per generated token, if requested
    logprob_rows: list[tuple[StepOutput, int]] = field(default_factory=list)  # rows not in logprobs yet
    text_stream: TextStream | None = None
    grammar: GrammarState | None = None  # how far the answer is in its grammar
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_settled: bool = False  # its end is final: text and finish_reason are complete
    num_reported_tokens: int = 0  # reported tokens of the output
    is_end_reported: bool = False

    @property
    def num_held_blocks(self) -> int:
        return sum(table.num_held for table in self.block_tables)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.request.num_prompt_tokens :]

    @property
    def num_missing_tokens(self) -> int:
        """Number of tokens that are not computed yet, including drafts."""
        return len(self.token_ids) + len(self.draft_token_ids) - self.num_computed_tokens


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences of one request that are admitted, sampled and preempted together: the unit of the scheduler.

    A single sequence, or each of n choices, is a group of its own; the beams of a search form one group.
    """

    request: Request
    members: list[Sequence]
    consumers: tuple[RowConsumer, ...]
    num_seqs: int = field(init=False)  # beams run in lockstep, all from the start
    is_text: bool = field(init=False)  # embedded or scored: no user waits for a first token
    is_batch: bool = field(init=False)  # no user waits for it
    key: tuple[int, bool, int, int] = field(init=False)  # service order: priority (lowest first), answers, arrival
    turn: tuple[int, int, bool, int, int] = field(init=False)  # admission order: see `ServiceQueue.take_turn`

    def __post_init__(self) -> None:
        self.num_seqs = self.request.params.num_seqs
        self.is_text = not self.request.params.is_answered
        self.is_batch = self.request.options.priority >= BATCH_PRIORITY
        self.key = (self.request.options.priority, self.is_text, self.request.arrival, self.members[0].index)
        self.turn = self.turn_at(0)
        self.adopt(self.members)

    def turn_at(self, time: int) -> tuple[int, int, bool, int, int]:
        """Return the group's sort key in the admission order for this virtual time."""
        priority, *rest = self.key
        return (priority, time, *rest)  # type: ignore[return-value]

    def adopt(self, members: list[Sequence]) -> None:
        """Replace the members."""
        self.members = members
        for member in members:
            member.group = self

    @property
    def status(self) -> RequestStatus:
        return self.members[0].status

    def rows(self, sequence: Sequence, count: int) -> list[RowUse]:
        """Return the wanted rows of a member's next `count` tokens."""
        computed = sequence.num_computed_tokens
        rows = []
        for consumer in self.consumers:
            start, end = consumer.wanted(sequence)
            start, end = max(start, computed), min(end, computed + count)
            if start < end:
                rows.append(RowUse(consumer, sequence, start, end - start))
        return rows

    def max_cached_tokens(self) -> int:
        """Return how many of the first member's tokens may come from the cache, because their rows are not wanted.

        If other members will fork at the end of the prompt, no later token may come from the cache: by then, blocks
        that these members need may have left a window.
        """
        sequence = self.members[0]
        starts = [start for start, end in (consumer.wanted(sequence) for consumer in self.consumers) if start < end]
        forks = [self.request.num_prompt_tokens] if len(self.members) > 1 else []
        return min([len(sequence.token_ids) - 1, *starts, *forks])


@dataclass(slots=True)
class RequestTimes:
    """The times of a request's events, in seconds of time.perf_counter. Events that have not happened are 0.0."""

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its parameters. It is created once and changed only by the scheduler and the engine.

    arrival: number of the request in order of arrival.
    max_total_tokens: limit on prompt and output of one sequence together.
    sequences: the user's choices, in order.
    groups: the groups of computed sequences: the choices, or the beams of a search.
    prompt_logprobs: collected so far, one entry per prompt position from the second on; None at positions of spans.
    """

    request_id: str
    prompt: Prompt
    params: Params
    arrival: int
    max_total_tokens: int
    eos_token_ids: frozenset[int]  # empty if ignore_eos
    text: str | None = None  # the prompt's text
    options: RequestOptions = field(default_factory=RequestOptions)
    is_measured: bool = True  # if False, only its steps count in the metrics
    is_followed: bool = False  # its prompt's progress and its metrics are reported
    end_token_ids: frozenset[int] = frozenset()  # eos_token_ids and the user's own
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    rotary: RotaryPositions | None = None  # for a prompt with images, where positions have several components
    adapter: HeldAdapter | None = None  # None for the base model
    adapter_start: int = 0  # the first token that it acts on
    predicted_ids: list[int] = field(default_factory=list)  # from `RequestOptions.prediction`
    sequences: list[Sequence] = field(default_factory=list)
    groups: list[SequenceGroup] = field(default_factory=list)
    pending_groups: list[SequenceGroup] = field(default_factory=list)  # wait for the first to compute the prompt
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    prompt_logprob_rows: list[tuple[StepOutput, int] | None] = field(default_factory=list)  # not converted yet
    vector: Float32 | None = None  # the answer of a pooling request
    error: OctavoError | None = None  # why it has no answer although it ran to its end
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0  # the part of these loaded from a store
    pins: tuple[Pin, ...] = ()  # see `GenerationRequest`
    slot: int = -1  # its slot; -1 if it did not run
    num_preemptions: int = 0
    num_generated_tokens: int = 0  # over all sequences, dropped beams included
    num_drafts: dict[str, tuple[int, int]] = field(default_factory=dict)  # by source: computed drafts, and right ones
    times: RequestTimes = field(default_factory=RequestTimes)
    metrics: RequestMetrics | None = None  # set with the first and the last output
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt)

    @property
    def num_source_tokens(self) -> int:
        """Number of tokens that an encoder reads before the prompt, or 0 without an encoder."""
        return 0 if self.prompt.source is None else len(self.prompt.source.token_ids)

    @property
    def given_prompt(self) -> Prompt:
        """The prompt as the client sent it. For an encoder-decoder model, this is the source text."""
        return self.prompt if self.prompt.source is None else Prompt(self.prompt.source.token_ids)

    @property
    def num_given_tokens(self) -> int:
        """Number of tokens in `given_prompt`."""
        return self.num_source_tokens or self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        # A generator would be slower, and every step asks this of every request.
        for sequence in self.sequences:  # noqa: SIM110
            if sequence.status is not RequestStatus.FINISHED:
                return False
        return True

    def release(self) -> None:
        """Drop the sequences after the last output. They and their grammars are freed when their rows are reused.

        They refer back to their group and request. In such a cycle they would stay until the next full garbage
        collection, which does not take the native memory of grammars into account.
        """
        for group in self.groups:
            group.members, group.consumers = [], ()
        self.sequences = []
        self.groups = []
        self.pending_groups = []


def derive_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of choice `index`: the request's own seed for choice 0, else a hash of both numbers."""
    seed %= 2**64
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")
