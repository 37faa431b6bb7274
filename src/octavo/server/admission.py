"""Who is let in, and for how long: a bounded queue, time limits, cancelling, and the end of the server.

The engine does not say when it begins with a request; the first sign is its first output, which a long prompt can
delay on its own. So a request counts as waiting as long as it has no output and is among the last `num_waiting` of
those without one, in the engine's order of service (priority, then arrival): the others are being computed.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio

from octavo.errors import GenerationTimeoutError, OverloadedError, UsageError
from octavo.server.errors import ApiError

if TYPE_CHECKING:
    from octavo.server.config import ServerConfig
    from octavo.server.served_model import ServedModel

T = TypeVar("T")

MAX_SEQUENCES_PER_REQUEST = 256
_MAX_RETRY_AFTER_S = 60.0
_RATE_WINDOW_S = 30.0
_TYPICAL_RUN_S = 10.0  # of a request, as long as none has finished
_CONTEXTS_QUEUED = 8  # prompt tokens that wait, in contexts, unless max_queued_tokens says otherwise


class Ticket:
    """One admitted request. `release` it at its end, whatever that was.

    It ends a request early by raising from `wait`: OverloadedError when it waited too long or the server goes,
    GenerationTimeoutError when it ran too long, ApiError when it was cancelled.
    """

    def __init__(
        self,
        lane: _Lane,
        request_id: str,
        *,
        num_sequences: int,
        num_prompts: int,
        num_prompt_tokens: int,
        tenant: str,
        priority: int,
    ) -> None:
        self.request_id = request_id
        self.num_sequences = num_sequences
        self.num_prompts = num_prompts
        self.num_prompt_tokens = num_prompt_tokens
        self.tenant = tenant
        self.priority = priority
        self.has_started = False
        self.released = asyncio.Event()
        self._lane = lane
        self._error: Exception | None = None
        self._scopes: set[anyio.CancelScope] = set()
        self._timers: list[asyncio.TimerHandle] = []

    async def wait(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call()`, unless the request is ended meanwhile. Every wait for the engine goes through it."""
        if self._error is None:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    return await call()
                finally:
                    self._scopes.discard(scope)
        assert self._error is not None
        raise self._error

    def started(self) -> None:
        """The engine has begun with the request: its first output is there. May be called again."""
        if not self.has_started:
            self.has_started = True
            self._lane.num_waiting_tokens -= self.num_prompt_tokens

    def end_after(self, seconds: float, reason: Callable[[], Exception | None]) -> None:
        """After so long asks for a reason to end the request, and ends it if there is one."""

        def ask() -> None:
            error = reason()
            if error is not None:
                self.end(error)

        self._timers.append(asyncio.get_running_loop().call_later(seconds, ask))

    def end(self, error: Exception) -> None:
        """Makes `wait` raise. The first error stays."""
        if self._error is None:
            self._error = error
            for scope in self._scopes:
                scope.cancel()

    def release(self) -> None:
        """The request is over, and its place is free. May be called twice."""
        if not self.released.is_set():
            self.started()
            for timer in self._timers:
                timer.cancel()
            self.released.set()
            self._lane.remove(self)


class _Lane:
    """The requests of one model."""

    def __init__(self) -> None:
        self.tickets: dict[str, Ticket] = {}  # in order of arrival
        self.num_sequences = 0
        self.num_waiting_tokens = 0
        self._finished: deque[tuple[float, int]] = deque(maxlen=512)  # when, sequences
        self._next_place_at = 0.0  # when the last of those sent away was told to come back

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket.request_id] = ticket
        self.num_sequences += ticket.num_sequences
        self.num_waiting_tokens += ticket.num_prompt_tokens

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket.request_id]
        self.num_sequences -= ticket.num_sequences
        self._finished.append((asyncio.get_running_loop().time(), ticket.num_sequences))

    def is_waiting(self, ticket: Ticket, num_waiting: int) -> bool:
        """Whether the engine has not yet begun with it. num_waiting: requests in the engine's queue."""
        if ticket.has_started:
            return False
        unstarted = [other for other in self.tickets.values() if not other.has_started]
        unstarted.sort(key=lambda other: other.priority)  # stable: then by arrival
        later = unstarted[unstarted.index(ticket) + 1 :]
        return sum(other.num_prompts for other in later) < num_waiting

    def retry_after_s(self, num_sequences: int, max_num_seqs: int) -> float:
        """When a request that is sent away should come back: 1 to 60 s.

        Each one that is sent away gets the next turn, at the rate at which places became free lately, so that they do
        not all come back at once.
        """
        now = asyncio.get_running_loop().time()
        recent = [(when, count) for when, count in self._finished if now - when < _RATE_WINDOW_S]
        rate = max_num_seqs / _TYPICAL_RUN_S
        if recent:
            rate = sum(count for _, count in recent) / max(now - recent[0][0], 1.0)
        self._next_place_at = max(self._next_place_at, now) + num_sequences / rate
        self._next_place_at = min(self._next_place_at, now + _MAX_RETRY_AFTER_S)
        return max(math.ceil(self._next_place_at - now), 1.0)


class Admission:
    """All requests of the server, by model. Belongs to one event loop; decides without waiting."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._lanes: dict[str, _Lane] = {}
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._is_draining

    @property
    def num_requests(self) -> int:
        """Requests that were admitted and are not over."""
        return sum(len(lane.tickets) for lane in self._lanes.values())

    def admit(
        self,
        model: ServedModel,
        request_id: str,
        *,
        num_sequences: int,
        num_prompt_tokens: int,
        num_prompts: int = 1,
        tenant: str = "",
        priority: int = 0,
    ) -> Ticket:
        """A place for a request. num_sequences: choices of all prompts; num_prompt_tokens: of all prompts.

        Raises OverloadedError with the time after which it is worth another try, at once; UsageError if one
        request asks for too many sequences.
        """
        if num_sequences > MAX_SEQUENCES_PER_REQUEST:
            raise UsageError(
                f"the request asks for {num_sequences} answers (n times the number of prompts); "
                f"at most {MAX_SEQUENCES_PER_REQUEST} are allowed: send several requests",
                param="n",
                code="integer_above_max_value",
            )
        if self._is_draining:
            raise OverloadedError("the server is shutting down", code="server_shutting_down", retry_after_s=5.0)
        lane = self._lanes.setdefault(model.name, _Lane())
        self._check_room(lane, model, num_sequences, num_prompt_tokens)
        ticket = Ticket(
            lane,
            request_id,
            num_sequences=num_sequences,
            num_prompts=num_prompts,
            num_prompt_tokens=num_prompt_tokens,
            tenant=tenant,
            priority=priority,
        )
        lane.add(ticket)
        self._limit_times(ticket, lane, model)
        return ticket

    def is_full(self, model: ServedModel) -> bool:
        """Whether the next request would be sent away."""
        lane = self._lanes.get(model.name)
        return lane is not None and lane.num_sequences >= self._max_sequences(model)

    def cancel(self, request_id: str, tenant: str) -> bool:
        """Ends a request; False if this tenant has none of that id."""
        for lane in self._lanes.values():
            ticket = lane.tickets.get(request_id)
            if ticket is not None and ticket.tenant == tenant:
                ticket.end(ApiError(499, "the request was cancelled", code="request_cancelled"))
                return True
        return False

    def start_draining(self) -> None:
        """From now on nobody is let in."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        while self.num_requests:
            for lane in self._lanes.values():
                for ticket in list(lane.tickets.values()):
                    await ticket.released.wait()

    def _max_sequences(self, model: ServedModel) -> int:
        return model.info.max_num_seqs + self._config.max_queue

    def _check_room(self, lane: _Lane, model: ServedModel, num_sequences: int, num_prompt_tokens: int) -> None:
        max_num_seqs = model.info.max_num_seqs
        limit = self._max_sequences(model)
        max_tokens = self._config.max_queued_tokens or _CONTEXTS_QUEUED * model.info.max_model_len
        if lane.num_sequences >= limit:
            message = (
                f"{lane.num_sequences} sequences run or wait, and at most {limit} may "
                f"(max_num_seqs {max_num_seqs} and max_queue {self._config.max_queue})"
            )
        elif lane.num_waiting_tokens and lane.num_waiting_tokens + num_prompt_tokens > max_tokens:
            message = (
                f"prompts of {lane.num_waiting_tokens} tokens wait; {num_prompt_tokens} more exceed the limit "
                f"of {max_tokens} (max_queued_tokens)"
            )
        else:
            return
        retry_after_s = lane.retry_after_s(num_sequences, max_num_seqs)
        raise OverloadedError(message, code="server_overloaded", retry_after_s=retry_after_s)

    def _limit_times(self, ticket: Ticket, lane: _Lane, model: ServedModel) -> None:
        queue_timeout, request_timeout = self._config.queue_timeout, self._config.request_timeout

        def waits() -> Exception | None:
            if not lane.is_waiting(ticket, model.client.status().num_waiting):
                return None
            message = f"the request waited {queue_timeout:g} s, the limit, and the engine did not begin with it"
            retry_after_s = lane.retry_after_s(ticket.num_sequences, model.info.max_num_seqs)
            return OverloadedError(message, code="queue_timeout", retry_after_s=retry_after_s)

        def runs() -> Exception:
            return GenerationTimeoutError(f"the request ran {request_timeout:g} s, the limit")

        ticket.end_after(queue_timeout, waits)
        ticket.end_after(request_timeout, runs)
