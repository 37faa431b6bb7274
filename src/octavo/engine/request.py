"""The life of a request, and its sequences of tokens."""

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
    ARRIVING = "arriving"  # its blocks are being loaded; then it waits
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """The reason why a sequence ended; the values are those of `finish_reason`.

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
    """A sequence of tokens of a request: its only one, one of its n choices, or one beam.

    The cache holds keys and values of token_ids[:num_computed_tokens] in the blocks of block_tables.
    draft_token_ids: guesses at the tokens after token_ids, for the next step to compute and its consumer to judge.
    """

    request: Request
    index: int
    token_ids: list[int]  # prompt and output
    seed: int = 0
    group: SequenceGroup = field(init=False, repr=False)
    status: RequestStatus = RequestStatus.WAITING
    draft_token_ids: list[int] = field(default_factory=list)
    guesses: Guesses | None = None  # where its drafts come from
    hidden_rows: HiddenRows | None = None  # of its last tokens, for a head that drafts
    num_computed_tokens: int = 0
    block_tables: list[BlockTable] = field(default_factory=list)  # one a group of layers; none means no blocks
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks from the start, chained
    row: int = -1  # where the batch builder keeps its arrays; -1 means nowhere
    num_synced_blocks: int = 0  # entries of block_tables that the batch builder has seen
    arrived: dict[bytes, BlockRow] = field(default_factory=dict)  # from a store: bytes of blocks by their keys
    num_kept_blocks: int = 0  # of its prompt, which the store beyond the cache has been given
    loads: list[LoadedBlock] = field(default_factory=list)  # blocks of the tables that its next step is to load
    state_load: LoadedBlock | None = None  # the same of its states
    state_slot: int = -1  # of its states after num_computed_tokens; -1 if none
    draft_slots: list[int] = field(default_factory=list)  # of its states before each draft of the step in flight
    cumulative_logprob: float | None = None  # None means not asked for
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one entry a generated token, if asked for
    logprob_rows: list[tuple[StepOutput, int]] = field(default_factory=list)  # those that are not in logprobs yet
    text_stream: TextStream | None = None
    grammar: GrammarState | None = None  # the state of the answer in its grammar
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_settled: bool = False  # its end is final: text and finish_reason are complete
    num_reported_tokens: int = 0  # of the output
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
        """The number of tokens that are not computed yet, drafts included."""
        return len(self.token_ids) + len(self.draft_token_ids) - self.num_computed_tokens


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences of one request that are admitted, sampled and preempted together; the unit of the scheduler.

    A single sequence and each of n choices are a group of their own; the beams of a search are one group.
    """

    request: Request
    members: list[Sequence]
    consumers: tuple[RowConsumer, ...]
    num_seqs: int = field(init=False)  # beams run in lockstep, all from the start
    is_text: bool = field(init=False)  # to embed or to score: nobody waits for its first token
    is_batch: bool = field(init=False)  # nobody waits for it at all
    key: tuple[int, bool, int, int] = field(init=False)  # order of service: priority (lowest first), answers, arrival
    turn: tuple[int, int, bool, int, int] = field(init=False)  # order of admission: see `ServiceQueue.take_turn`

    def __post_init__(self) -> None:
        self.num_seqs = self.request.params.num_seqs
        self.is_text = not self.request.params.is_answered
        self.is_batch = self.request.options.priority >= BATCH_PRIORITY
        self.key = (self.request.options.priority, self.is_text, self.request.arrival, self.members[0].index)
        self.turn = self.turn_at(0)
        self.adopt(self.members)

    def turn_at(self, time: int) -> tuple[int, int, bool, int, int]:
        """Its turn if it comes at this time of the queue."""
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
        """The rows that are wanted of a member's next `count` tokens."""
        computed = sequence.num_computed_tokens
        rows = []
        for consumer in self.consumers:
            start, end = consumer.wanted(sequence)
            start, end = max(start, computed), min(end, computed + count)
            if start < end:
                rows.append(RowUse(consumer, sequence, start, end - start))
        return rows

    def max_cached_tokens(self) -> int:
        """The maximum number of the first member's tokens to take from the cache: no rows of them are wanted.

        At most the prompt if others will fork there: the part that they need may have left a window later.
        """
        sequence = self.members[0]
        starts = [start for start, end in (consumer.wanted(sequence) for consumer in self.consumers) if start < end]
        forks = [self.request.num_prompt_tokens] if len(self.members) > 1 else []
        return min([len(sequence.token_ids) - 1, *starts, *forks])


@dataclass(slots=True)
class RequestTimes:
    """The times of a request's events, in seconds of time.perf_counter; 0.0: it has not happened."""

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its parameters; created once, changed only by scheduler and engine.

    arrival: number of the request in order of arrival.
    max_total_tokens: prompt and output of one sequence.
    sequences: the user's choices, in order.
    groups: the computed sequences: the same ones, or the beams of a search.
    prompt_logprobs: collected so far, one entry per prompt position from the second on; None at those of spans.
    """

    request_id: str
    prompt: Prompt
    params: Params
    arrival: int
    max_total_tokens: int
    eos_token_ids: frozenset[int]  # empty if ignore_eos
    text: str | None = None  # that the prompt was made of
    options: RequestOptions = field(default_factory=RequestOptions)
    is_measured: bool = True  # False means only its steps count in the metrics
    is_followed: bool = False  # the progress of its prompt and its metrics are told
    end_token_ids: frozenset[int] = frozenset()  # eos_token_ids and the user's own
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    rotary: RotaryPositions | None = None  # of a prompt with images, where positions have several components
    adapter: HeldAdapter | None = None  # None means the base model
    adapter_start: int = 0  # the first token that it acts on
    predicted_ids: list[int] = field(default_factory=list)  # of `RequestOptions.prediction`
    sequences: list[Sequence] = field(default_factory=list)
    groups: list[SequenceGroup] = field(default_factory=list)
    pending_groups: list[SequenceGroup] = field(default_factory=list)  # wait for the first to compute the prompt
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    prompt_logprob_rows: list[tuple[StepOutput, int] | None] = field(default_factory=list)  # that are not there yet
    vector: Float32 | None = None  # the answer of a pooling request
    error: OctavoError | None = None  # why it has no answer although it came to its end
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0  # of these, from a store beyond the cache
    pins: tuple[Pin, ...] = ()  # see `GenerationRequest`
    slot: int = -1  # the number of its slot, see `Slots`; -1 if it did not run
    num_preemptions: int = 0
    num_generated_tokens: int = 0  # over all sequences, dropped beams included
    num_drafts: dict[str, tuple[int, int]] = field(default_factory=dict)  # by source: drafts computed, and right ones
    times: RequestTimes = field(default_factory=RequestTimes)
    metrics: RequestMetrics | None = None  # as of the first output, and of the last
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt)

    @property
    def num_source_tokens(self) -> int:
        """The tokens that an encoder reads before the prompt, or 0 if there is none."""
        return 0 if self.prompt.source is None else len(self.prompt.source.token_ids)

    @property
    def given_prompt(self) -> Prompt:
        """The prompt as a client gave it, which may be the source."""
        return self.prompt if self.prompt.source is None else Prompt(self.prompt.source.token_ids)

    @property
    def num_given_tokens(self) -> int:
        """The tokens of that prompt."""
        return self.num_source_tokens or self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        # A generator would take longer, and every step asks it of every request.
        for sequence in self.sequences:  # noqa: SIM110
            if sequence.status is not RequestStatus.FINISHED:
                return False
        return True

    def release(self) -> None:
        """Drop the sequences after the last output; they and their grammars are freed when others take their rows.

        They refer back to their group and request. In such a cycle they would stay until the next full garbage
        collection, which does not consider the native memory of grammars.
        """
        for group in self.groups:
            group.members, group.consumers = [], ()
        self.sequences = []
        self.groups = []
        self.pending_groups = []


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index`, 64 bits: choice 0 has the request's own, the others a hash of both."""
    seed %= 2**64
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")
