"""Admission of requests: limits, time limits, and the errors of refused requests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.engine.client import EngineStatus
from octavo.engine.metrics import EngineMetrics
from octavo.errors import GenerationTimeoutError, OverloadedError, UsageError
from octavo.server.admission import Admission, Ticket
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.models.served_model import ServedModel
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import FakeClient, fake_model


class BusyClient(FakeClient):
    """Says that so many requests wait in the engine. It runs 16 sequences at once, with a context of 256."""

    num_waiting = 0

    def status(self) -> EngineStatus:
        return dataclasses.replace(super().status(), metrics=EngineMetrics(num_waiting=self.num_waiting))


@pytest.fixture
def model(smollm2_tokenizer: Tokenizer) -> ServedModel:
    return fake_model(smollm2_tokenizer, BusyClient(smollm2_tokenizer))


def admit(admission: Admission, model: ServedModel, name: str, **changes: Any) -> Ticket:
    return admission.admit(model, name, **{"num_sequences": 1, **changes})


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_the_queue_is_bounded_by_sequences(model: ServedModel) -> None:
    async def test() -> None:
        admission = Admission(ServerConfig(max_queue=4))
        tickets = [admit(admission, model, f"r{i}", num_sequences=2) for i in range(10)]
        assert admission.is_full(model)
        with pytest.raises(OverloadedError, match=r"20 sequences .* limit is 20 ") as error:
            admit(admission, model, "late")
        assert error.value.code == "server_overloaded"
        tickets[0].release()
        tickets[0].release()
        assert not admission.is_full(model)
        admit(admission, model, "late")
        assert admission.num_requests == 10

    run(test)


def test_the_queue_is_bounded_by_prompt_tokens(model: ServedModel) -> None:
    async def test() -> None:
        admission = Admission(ServerConfig(max_queued_tokens=100))
        first = admit(admission, model, "long")
        first.add_prompt_tokens(150)  # alone, any prompt is let in
        second = admit(admission, model, "next")
        with pytest.raises(
            OverloadedError, match="150 prompt tokens are waiting; 1 more would exceed the limit of 100"
        ):
            second.add_prompt_tokens(1)
        second.release()
        first.started()
        admit(admission, model, "third").add_prompt_tokens(60)
        fourth = admit(admission, model, "fourth")
        with pytest.raises(OverloadedError):
            fourth.add_prompt_tokens(50)
        fourth.add_prompt_tokens(40)

    run(test)


def test_one_request_has_at_most_256_sequences(model: ServedModel) -> None:
    async def test() -> None:
        with pytest.raises(UsageError, match="257 answers") as error:
            admit(Admission(ServerConfig()), model, "wide", num_sequences=257)
        assert (error.value.param, error.value.code) == ("n", "integer_above_max_value")

    run(test)


def test_those_sent_away_get_one_turn_after_the_other(model: ServedModel) -> None:
    async def test() -> None:
        admission = Admission(ServerConfig(max_queue=0))
        tickets = [admit(admission, model, f"r{i}") for i in range(16)]
        waits = [_retry_after(admission, model) for _ in range(100)]
        assert waits == [float(min(i + 1, 60)) for i in range(100)]  # one a second, as long as none has ended
        for ticket in tickets:
            ticket.release()
        for i in range(16):  # the crowd is gone
            admit(admission, model, f"s{i}")
        assert _retry_after(admission, model) == 1

    run(test)


def test_the_measured_rate_counts(model: ServedModel) -> None:
    """Sixteen at once that stay 0.1 s each: 160 places a second."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]
        admission = Admission(ServerConfig(max_queue=0))
        for turn in range(2):
            tickets = [admit(admission, model, f"r{i}-{turn}") for i in range(16)]
            now += 0.1
            for ticket in tickets:
                ticket.started()
                ticket.release()
                admit(admission, model, f"next {ticket.request_id}").release()  # its place is taken; unanswered
        for i in range(16):
            admit(admission, model, f"s{i}")
        waits = [_retry_after(admission, model) for _ in range(300)]
        assert waits[50] == 1
        assert 2 <= waits[-1] <= 6

    run(test)


def _retry_after(admission: Admission, model: ServedModel) -> float:
    with pytest.raises(OverloadedError) as error:
        admit(admission, model, "refused")
    return error.value.retry_after_s


def test_the_engine_did_not_begin_in_time(model: ServedModel) -> None:
    """Of three without an output the engine says that one waits: it is the last in its order."""

    async def test() -> None:
        admission = Admission(ServerConfig(queue_timeout=0.05))
        model.client.num_waiting = 1  # type: ignore[attr-defined]
        last = admit(admission, model, "low", priority=5)
        others = [admit(admission, model, f"r{i}") for i in range(2)]
        waits = [asyncio.create_task(ticket.wait(asyncio.Event().wait)) for ticket in (last, *others)]
        await asyncio.wait(waits[:1], timeout=20)
        await asyncio.sleep(0.1)  # timed: the limits of the other two have passed
        assert [task.done() for task in waits] == [True, False, False]
        with pytest.raises(OverloadedError, match=r"0\.05 s") as error:
            await waits[0]
        assert error.value.code == "queue_timeout"
        for task in waits[1:]:
            task.cancel()

    run(test)


def test_a_request_with_output_waits_no_more(model: ServedModel) -> None:
    async def test() -> None:
        admission = Admission(ServerConfig(queue_timeout=0.05))
        model.client.num_waiting = 5  # type: ignore[attr-defined]
        ticket = admit(admission, model, "r")
        ticket.started()
        await ticket.wait(lambda: asyncio.sleep(0.1))  # timed: twice the limit of the queue

    run(test)


def test_a_request_runs_only_so_long(model: ServedModel) -> None:
    async def test() -> None:
        admission = Admission(ServerConfig(request_timeout=0.05))
        ticket = admit(admission, model, "r")
        ticket.started()
        with pytest.raises(GenerationTimeoutError, match=r"0\.05 s"):
            await ticket.wait(asyncio.Event().wait)
        with pytest.raises(GenerationTimeoutError):  # and does not begin again
            await ticket.wait(asyncio.Event().wait)

    run(test)


def test_clients_may_repeat_an_id(model: ServedModel) -> None:
    """Each request has a place of its own, and cancelling ends all of the tenant's requests with the id."""

    async def test() -> None:
        admission = Admission(ServerConfig())
        tickets = [admit(admission, model, "same", tenant=tenant) for tenant in ("anna", "anna", "bert")]
        assert admission.num_requests == 3
        assert admission.cancel("same", "anna")
        for ticket in tickets[:2]:
            with pytest.raises(ApiError, match="cancelled"):
                await ticket.wait(lambda: asyncio.sleep(0))
        await tickets[2].wait(lambda: asyncio.sleep(0))
        for ticket in tickets:
            ticket.release()
        assert admission.num_requests == 0

    run(test)


def test_only_the_tenant_cancels_its_request(model: ServedModel) -> None:
    async def test() -> None:
        admission = Admission(ServerConfig())
        ticket = admit(admission, model, "req-1", tenant="anna")
        waiting = asyncio.create_task(ticket.wait(asyncio.Event().wait))
        await asyncio.sleep(0)
        assert not admission.cancel("req-1", "bert")
        assert not admission.cancel("req-2", "anna")
        assert not admission.cancel("req", "anna")
        assert admission.cancel("req-1", "anna")
        with pytest.raises(ApiError) as error:
            await waiting
        assert (error.value.status, error.value.code) == (499, "request_cancelled")
        ticket.release()
        assert not admission.cancel("req-1", "anna")

    run(test)


def test_what_is_awaited_keeps_its_own_result_and_error(model: ServedModel) -> None:
    async def test() -> None:
        ticket = admit(Admission(ServerConfig()), model, "r")

        async def fail() -> None:
            raise UsageError("mine")

        assert await ticket.wait(lambda: asyncio.sleep(0, "result")) == "result"
        with pytest.raises(UsageError, match="mine"):
            await ticket.wait(fail)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ticket.wait(asyncio.Event().wait), 0.02)

    run(test)


def test_draining_lets_nobody_in_and_waits_for_those_inside(model: ServedModel) -> None:
    async def test() -> None:
        admission = Admission(ServerConfig())
        tickets = [admit(admission, model, f"r{i}") for i in range(3)]
        admission.is_draining = True
        with pytest.raises(OverloadedError) as error:
            admit(admission, model, "late")
        assert error.value.code == "server_shutting_down"
        idle = asyncio.create_task(admission.wait_idle())
        for ticket in tickets:
            for _ in range(10):
                await asyncio.sleep(0)
            assert not idle.done()
            ticket.release()
        await asyncio.wait_for(idle, 1)

    run(test)


def test_a_key_that_fills_the_queue_leaves_places_to_others(model: ServedModel) -> None:
    """The reported case: 192 responses of one key in the background, and 503 for the other key."""

    async def test() -> None:
        admission = Admission(ServerConfig(max_queue=144), num_tenants=2)  # beside 16 that run
        greedy = [admit(admission, model, "background", tenant="a") for _ in range(120)]
        with pytest.raises(OverloadedError, match="for other API keys"):
            admit(admission, model, "background", tenant="a")
        assert not admission.is_full(model)
        others = [admit(admission, model, "chat", tenant="b") for _ in range(40)]
        assert admission.is_full(model)
        for tenant in ("a", "b"):
            with pytest.raises(OverloadedError):
                admit(admission, model, "late", tenant=tenant)
        others[0].release()
        with pytest.raises(OverloadedError):  # the place is still the other's
            admit(admission, model, "late", tenant="a")
        admit(admission, model, "next", tenant="b")
        for ticket in greedy[:60]:
            ticket.release()
        for _ in range(60):  # what nobody has reserved is for all
            admit(admission, model, "more", tenant="b")

    run(test)


def test_a_key_that_fills_the_queue_with_tokens_leaves_some_to_others(model: ServedModel) -> None:
    async def test() -> None:
        admission = Admission(ServerConfig(max_queued_tokens=1000), num_tenants=2)
        admit(admission, model, "long", tenant="a").add_prompt_tokens(700)
        with pytest.raises(OverloadedError, match="for other API keys"):
            admit(admission, model, "more", tenant="a").add_prompt_tokens(100)
        admit(admission, model, "other", tenant="b").add_prompt_tokens(250)

    run(test)


def test_without_several_keys_all_places_are_for_all(model: ServedModel) -> None:
    async def test() -> None:
        for num_tenants in (0, 1):
            admission = Admission(ServerConfig(max_queue=4), num_tenants)
            for _ in range(20):
                admit(admission, model, "any", tenant="a" if num_tenants else "")
            assert admission.is_full(model)

    run(test)
