"""Admission of requests: a bounded queue, time limits, cancellation and draining.

The engine does not report when it starts a request. The first sign is the request's first output, but a long prompt
alone can delay that output. Therefore a request counts as waiting if it has no output yet and is among the last
`num_waiting` requests without output, in the order in which the engine serves them (priority, then arrival). The engine
is already computing the rest.

Half of all places are reserved for the server's API keys in equal shares. Therefore a key that fills the queue, for
example with background responses, leaves room for every other key.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import anyio

from octavo.errors import GenerationTimeoutError, OverloadedError, UsageError
from octavo.server.errors import ApiError
from octavo.server.http.shares import Shares

if TYPE_CHECKING:
    from octavo.server.config import ServerConfig
    from octavo.server.models.served_model import ServedModel

T = TypeVar("T")

MAX_SEQUENCES_PER_REQUEST = 256
_MAX_RETRY_AFTER_S = 60.0
_CLOCK_RESOLUTION_S = 1e-3
_MIN_RATE = 1.0  # assumed sequences per second, until one has finished
_SMOOTHING = 0.1  # weight of the latest request in the means
_CONTEXTS_QUEUED = 8  # default limit of waiting prompt tokens, in contexts


@dataclass(eq=False, kw_only=True, slots=True)
class Ticket:
    """An admitted request. Its holder must release it when the request ends, even after an error.

    `wait` raises an error to end the request early: OverloadedError if it waited too long or the server shuts down,
    GenerationTimeoutError if it ran too long, ApiError if it was cancelled.
    """

    lane: _Lane
    request_id: str
    num_sequences: int
    num_prompts: int
    tenant: str
    priority: int
    is_batch: bool = False
    num_prompt_tokens: int = 0
    has_started: bool = False
    admitted_at: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    released: asyncio.Event = field(default_factory=asyncio.Event)
    timers: Sequence[asyncio.TimerHandle] = ()
    _error: Exception | None = None
    _scopes: set[anyio.CancelScope] = field(default_factory=set)

    async def wait(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call()`, or raise an error if the request is ended first. Every wait for the engine
        must use this method.
        """
        if self._error is None:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    return await call()
                finally:
                    self._scopes.discard(scope)
        assert self._error is not None
        raise self._error

    def add_prompt_tokens(self, count: int) -> None:
        """Add the total number of tokens in all prompts, once it is known.

        Raises OverloadedError if too many tokens are waiting, and UsageError if the request has several prompts with
        more tokens in total than may ever wait.
        """
        if self.is_batch:
            return
        limit = self.lane.tokens.limit
        if self.num_prompts > 1 and count > limit:
            message = f"the prompts have {count} tokens in total; at most {limit} are allowed: send several requests"
            raise UsageError(message, param="prompt", code="array_above_max_length")
        self.lane.check_tokens(count, self.num_sequences, self.tenant)
        self.num_prompt_tokens += count
        self.lane.tokens.add(self.tenant, count)

    def started(self) -> None:
        """Record that the engine has started the request, as its first output shows. May be called again."""
        if not self.has_started:
            self.has_started = True
            self.lane.tokens.add(self.tenant, -self.num_prompt_tokens)

    def end(self, error: Exception) -> None:
        """End the request early: `wait` raises this error. Later errors are ignored."""
        if self._error is None:
            self._error = error
            for scope in self._scopes:
                scope.cancel()

    def release(self) -> None:
        """End the request's admission. Calling this twice is allowed."""
        if not self.released.is_set():
            for timer in self.timers:
                timer.cancel()
            self.released.set()
            self.lane.remove(self)


@dataclass
class _Lane:
    """The requests of one model, with per-key shares of its sequence slots and of its waiting prompt tokens."""

    places: Shares
    tokens: Shares
    tickets: dict[Ticket, None] = field(default_factory=dict)  # in order of arrival; clients may repeat an id
    _mean_stay_s: float = 0.0  # mean over answered requests
    _mean_in_flight: float = 0.0  # mean number of running sequences when requests ended
    _next_place_at: float = 0.0  # the retry time given to the last refused request

    def add(self, ticket: Ticket) -> None:
        if 2 * self.num_sequences < self.places.limit:
            self._next_place_at = 0.0  # the queue is empty
        self.tickets[ticket] = None
        self.places.add(ticket.tenant, 0 if ticket.is_batch else ticket.num_sequences)

    @property
    def num_sequences(self) -> int:
        return self.places.total

    def check_sequences(self, num_sequences: int, tenant: str) -> None:
        """Raise OverloadedError if there is no capacity for another request."""
        if self.places.open_to(tenant) <= 0:
            there, limit = f"{self.num_sequences} sequences are running or waiting", self.places.limit
            message = f"{there}; the limit is {limit} (max_num_seqs plus max_queue)"
            raise self._overloaded(message + self._reserved(self.places), num_sequences)

    def check_tokens(self, count: int, num_sequences: int, tenant: str) -> None:
        """Raise OverloadedError if `count` more prompt tokens would exceed the limit. If no tokens are waiting, any
        prompt is admitted.
        """
        if self.tokens.total and count > self.tokens.open_to(tenant):
            limit = f"{count} more would exceed the limit of {self.tokens.limit} (max_queued_tokens)"
            message = f"{self.tokens.total} prompt tokens are waiting; {limit}"
            raise self._overloaded(message + self._reserved(self.tokens), num_sequences)

    @staticmethod
    def _reserved(shares: Shares) -> str:
        return ", and part of it is reserved for other API keys" if shares.num_tenants > 1 else ""

    def _overloaded(self, message: str, num_sequences: int) -> OverloadedError:
        return OverloadedError(message, code="server_overloaded", retry_after_s=self.retry_after_s(num_sequences))

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        if ticket.has_started and not ticket.is_batch:
            weight = _SMOOTHING if self._mean_stay_s else 1.0
            stay_s = asyncio.get_running_loop().time() - ticket.admitted_at
            self._mean_stay_s += weight * (stay_s - self._mean_stay_s)
            self._mean_in_flight += weight * (self.num_sequences - self._mean_in_flight)
        ticket.started()
        self.places.add(ticket.tenant, -(0 if ticket.is_batch else ticket.num_sequences))

    def is_waiting(self, ticket: Ticket, num_waiting: int) -> bool:
        """Return True if the engine has not started the request.

        num_waiting: number of requests in the engine's queue
        """
        if ticket.has_started:
            return False
        unstarted = [other for other in self.tickets if not other.has_started]
        unstarted.sort(key=lambda other: other.priority)  # stable, so equal priorities stay in order of arrival
        later = unstarted[unstarted.index(ticket) + 1 :]
        return sum(other.num_prompts for other in later) < num_waiting

    def retry_after_s(self, num_sequences: int) -> float:
        """Return the number of seconds after which a refused request should be retried, from 1 to 60.

        Requests that are refused one after another get increasing times, spaced at the rate at which requests finish,
        so that clients do not all return at once. The rate follows from Little's law: the number of requests divided by
        their mean time.
        """
        now = asyncio.get_running_loop().time()
        rate = self._mean_in_flight / self._mean_stay_s if self._mean_stay_s else _MIN_RATE
        self._next_place_at = max(self._next_place_at, now) + num_sequences / rate
        self._next_place_at = min(self._next_place_at, now + _MAX_RETRY_AFTER_S)
        # Do not round the clock's error up to another second: (now + 60) - now may exceed 60.
        return max(math.ceil(self._next_place_at - now - _CLOCK_RESOLUTION_S), 1.0)


class Admission:
    """All requests to the server, by model. Belongs to one event loop. Requests are admitted or refused at once.

    num_tenants: number of API keys; their names are the tenants of requests
    """

    def __init__(self, config: ServerConfig, num_tenants: int = 0) -> None:
        self._config = config
        self._num_tenants = num_tenants
        self._lanes: dict[str, _Lane] = {}
        self.is_draining = False  # the server is shutting down and refuses all new requests

    @property
    def num_requests(self) -> int:
        """Number of admitted requests that have not ended."""
        return sum(len(lane.tickets) for lane in self._lanes.values())

    def admit(
        self,
        model: ServedModel,
        request_id: str,
        *,
        num_sequences: int,
        num_prompts: int = 1,
        tenant: str = "",
        priority: int = 0,
        is_batch: bool = False,
    ) -> Ticket:
        """Admit a request before any work is done for it.

        num_sequences: total number of choices for all prompts
        is_batch: whether the request is a line of a batch. Such requests take no place in the queue and have no time
        limits, because the batch's runner limits their number.

        Raises OverloadedError at once, with the time after which to retry, and UsageError if the request asks for too
        many sequences.
        """
        if num_sequences > MAX_SEQUENCES_PER_REQUEST:
            raise UsageError(
                f"the request asks for {num_sequences} answers (n times the number of prompts); "
                f"at most {MAX_SEQUENCES_PER_REQUEST} are allowed: send several requests",
                param="n",
                code="integer_above_max_value",
            )
        if self.is_draining:
            raise OverloadedError("the server is shutting down", code="server_shutting_down", retry_after_s=5.0)
        lane = self._lane(model)
        if not is_batch:
            lane.check_sequences(num_sequences, tenant)
        ticket = Ticket(
            lane=lane,
            request_id=request_id,
            num_sequences=num_sequences,
            num_prompts=num_prompts,
            tenant=tenant,
            priority=priority,
            is_batch=is_batch,
        )
        lane.add(ticket)
        if not is_batch:
            self._limit_times(ticket, lane, model)
        return ticket

    def is_full(self, model: ServedModel) -> bool:
        """Return True if the next request would be refused."""
        lane = self._lane(model)
        return lane.num_sequences >= lane.places.limit

    def cancel(self, request_id: str, tenant: str) -> bool:
        """Cancel the requests with this id. Return False if the tenant has none."""
        tickets = [ticket for lane in self._lanes.values() for ticket in lane.tickets]
        found = [ticket for ticket in tickets if (ticket.request_id, ticket.tenant) == (request_id, tenant)]
        for ticket in found:
            ticket.end(ApiError(499, "the request was cancelled", code="request_cancelled"))
        return bool(found)

    async def wait_idle(self) -> None:
        """Wait until no request is left."""
        while tickets := [ticket for lane in self._lanes.values() for ticket in lane.tickets]:
            await tickets[0].released.wait()

    def _lane(self, model: ServedModel) -> _Lane:
        lane = self._lanes.get(model.model_name)
        if lane is None:
            limit = model.info.max_num_seqs + self._config.max_queue
            max_tokens = self._config.max_queued_tokens or _CONTEXTS_QUEUED * model.info.max_model_len
            places, tokens = (Shares(number, self._num_tenants) for number in (limit, max_tokens))
            lane = self._lanes[model.model_name] = _Lane(places, tokens)
        return lane

    def _limit_times(self, ticket: Ticket, lane: _Lane, model: ServedModel) -> None:
        queue_timeout, request_timeout = self._config.queue_timeout, self._config.request_timeout

        def end_waiting() -> None:
            if lane.is_waiting(ticket, model.client.status().metrics.num_waiting):
                message = f"the engine did not start the request within {queue_timeout:g} s (queue_timeout)"
                retry_after_s = lane.retry_after_s(ticket.num_sequences)
                ticket.end(OverloadedError(message, code="queue_timeout", retry_after_s=retry_after_s))

        def end_running() -> None:
            ticket.end(
                GenerationTimeoutError(f"the request did not finish within {request_timeout:g} s (request_timeout)")
            )

        later = asyncio.get_running_loop().call_later
        ticket.timers = (later(queue_timeout, end_waiting), later(request_timeout, end_running))
