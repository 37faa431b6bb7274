"""A request through its life, and the sequences of tokens that it grows."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.generation_request import Params
from octavo.outputs import Logprob, RequestMetrics

if TYPE_CHECKING:
    from octavo.engine.beam_search import BeamSearch
    from octavo.engine.constrained import GrammarState
    from octavo.engine.text_stream import TextStream


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a sequence ended; the values are what users see in `finish_reason`.

    ERROR is seen in the metrics alone: a request that fails has no output.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens of a request: its only one, one of its n choices, or one beam.

    The cache holds keys and values of token_ids[:num_computed_tokens] in the blocks of block_table.
    """

    request: Request
    index: int
    token_ids: list[int]  # prompt and output
    seed: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks from the start, chained
    row: int = -1  # where the batch builder keeps its arrays; -1: nowhere
    num_synced_blocks: int = 0  # entries of block_table that the batch builder has seen
    cumulative_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)  # one entry a generated token, if asked for
    text_stream: TextStream | None = None
    grammar: GrammarState | None = None  # what the answer must look like, as far as it has come
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_reported_tokens: int = 0  # of the output, in a stream of deltas
    is_end_reported: bool = False

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def key(self) -> tuple[int, int, int]:
        """Order of service: lower priority number, then earlier arrival, then choice."""
        return (self.request.priority, self.request.arrival, self.index)


@dataclass(slots=True, eq=False)
class Request:
    """One prompt with its parameters; created once, changed only by scheduler and engine.

    arrival: number of the request in order of arrival. max_total_tokens: prompt and output of one sequence.
    prompt_logprobs: collected so far, one entry a prompt position from the second on.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: Params
    arrival: int
    max_total_tokens: int
    eos_token_ids: frozenset[int]  # empty if ignore_eos
    prompt: str | None = None
    priority: int = 0
    cache_salt: str = ""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sequences: list[Sequence] = field(default_factory=list)
    pending_choices: list[Sequence] = field(default_factory=list)  # wait for the first to compute the prompt
    beam_search: BeamSearch | None = None
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0  # over all sequences, dropped beams included
    arrival_time: float = 0.0  # seconds, time.perf_counter; 0.0: did not happen
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    metrics: RequestMetrics | None = None  # as of the first output, and of the last

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_seats(self) -> int:
        """How many sequences one admission brings: a beam search runs its beams in lockstep, choices run alone."""
        return self.params.num_seats

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.params.prompt_logprobs

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Some prompt position still lacks its log-probability."""
        return self.num_prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is RequestStatus.FINISHED for sequence in self.sequences)

    def release(self) -> None:
        """Lets go of the sequences, after the last output: they and their grammars go when others take their rows.

        They refer back to their request. In such a circle they would stay until the next full collection, which
        does not know how much native memory the states of grammars hold.
        """
        self.sequences = []
        self.pending_choices = []


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index`, 64 bits: choice 0 has the request's own, the others a hash of both."""
    seed %= 2**64
    if index == 0:
        return seed
    material = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(material, digest_size=8).digest(), "little")
