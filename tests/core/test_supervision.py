"""Deaths and stalls of real engine processes: detected, reported to every request, repaired, or given up."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from octavo.config import EngineConfig
from octavo.core.engine_process import EngineProcess
from octavo.core.process_client import ProcessClient
from octavo.core.supervisor import MAX_RESTARTS
from octavo.engine.client import AnswerStream, EngineState
from octavo.errors import EngineDeadError, ModelLoadError, OverloadedError
from octavo.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from tests.support import waiting
from tests.support.engine_clients import SOON_S, collect, engine_process, request, tokens, wait_for_state, wait_until
from tests.support.tiny_gguf import tiny_gguf
from tests.support.witness import faulty

SLOW_FAULTS = ("step:kill:3", "receive:raise:3")
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def inject(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Engines that start from now on have a fault."""
    for name, value in faulty(fault).items():
        monkeypatch.setenv(name, value)


def pid_of(client: ProcessClient) -> int:
    pid = client.status().pid
    assert pid is not None
    return pid


async def ends_with_dead_engine(stream: AnswerStream) -> float:
    """Reads the stream up to its error; returns the seconds that it took."""
    start = time.monotonic()
    with pytest.raises(EngineDeadError):
        await collect(stream)
    return time.monotonic() - start


async def serves(client: ProcessClient) -> list[OutputDelta]:
    return await collect(await client.generate(request([0, 2, 3], SHORT)))


@pytest.mark.parametrize("phase", [pytest.param("idle", marks=pytest.mark.slow), "prefill", "decode"])
def test_kill_9_reaches_everybody_and_the_engine_comes_back(tiny_config: EngineConfig, phase: str) -> None:
    async def run() -> None:
        async with engine_process(tiny_config) as client:
            before = tokens(await serves(client))
            streams = []
            if phase != "idle":
                prompt = [2, 3, 4, 5] * 25_000 if phase == "prefill" else [0, 2]
                streams = [await client.generate(request(prompt)) for _ in range(4)]
            if phase == "decode":
                await asyncio.gather(*map(anext, streams))
            pid = pid_of(client)
            os.kill(pid, signal.SIGKILL)
            waits = await asyncio.gather(*map(ends_with_dead_engine, streams))
            assert all(wait < SOON_S for wait in waits)
            await wait_for_state(client, EngineState.RESTARTING, SOON_S)
            assert "SIGKILL" in (client.status().reason or "")
            with pytest.raises(OverloadedError) as refusal:
                await client.generate(request([0]))
            assert refusal.value.code == "engine_restarting"
            assert refusal.value.retry_after_s >= 1
            await asyncio.wait_for(client.wait_ready(), 2 * SOON_S)
            assert pid_of(client) != pid
            assert client.status().num_restarts == 1
            assert tokens(await serves(client)) == before
            assert (await client.metrics()).num_used_blocks == 0

    asyncio.run(run())


def test_a_stopped_engine_is_stalled_within_two_seconds_then_restarted(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_process(tiny_config, stall_timeout_s=2.5) as client:
            stream = await client.generate(request([0, 2]))
            await anext(stream)
            os.kill(pid_of(client), signal.SIGSTOP)
            unanswered = asyncio.create_task(client.generate(request([0, 3])))
            question = asyncio.create_task(client.metrics())
            assert await wait_for_state(client, EngineState.STALLED, SOON_S) > 1
            for waiting in (unanswered, question):
                with pytest.raises(OverloadedError) as refusal:
                    await waiting
                assert refusal.value.code == "engine_stalled"
            with pytest.raises(OverloadedError):
                await client.generate(request([0]))
            await wait_for_state(client, EngineState.RESTARTING, SOON_S)
            await ends_with_dead_engine(stream)
            await asyncio.wait_for(client.wait_ready(), 2 * SOON_S)
            await serves(client)

    asyncio.run(run())


def test_an_idle_engine_that_stands_still_recovers_by_itself(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_process(tiny_config) as client:
            stream = await client.generate(request([0, 2]))
            await anext(stream)
            pid = pid_of(client)
            os.kill(pid, signal.SIGSTOP)
            await wait_for_state(client, EngineState.STALLED, SOON_S)
            os.kill(pid, signal.SIGCONT)
            await wait_for_state(client, EngineState.READY, SOON_S)
            await anext(stream)  # nothing was lost
            await stream.aclose()
            await serves(client)
            assert client.status().num_restarts == 0

    asyncio.run(run())


@pytest.mark.slow
def test_a_server_that_stood_still_does_not_blame_the_engine(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_process(tiny_config, stall_timeout_s=0.5) as client:
            params = SamplingParams(max_tokens=3000, seed=1, ignore_eos=True, detokenize=False)
            stream = await client.generate(request([0, 2], params))
            time.sleep(1.8)  # timed: the server stands still
            states = []
            for _ in range(10):
                states.append(client.status().state)
                await asyncio.sleep(0.02)  # timed: its state at ten moments
            assert set(states) == {EngineState.READY}
            assert len(tokens(await collect(stream))) == 3000

    asyncio.run(run())


def test_a_step_that_does_not_end_is_a_standstill(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inject(monkeypatch, "step:sleep:3")

    async def run() -> None:
        async with engine_process(tiny_config, stall_timeout_s=2.0) as client:
            monkeypatch.delenv("OCTAVO_TEST_FAULT")  # the next process has no fault
            stream = await client.generate(request([0, 2]))
            await wait_for_state(client, EngineState.STALLED, SOON_S)
            assert "no step" in (client.status().reason or "")
            await wait_for_state(client, EngineState.RESTARTING, SOON_S)
            await ends_with_dead_engine(stream)
            await client.wait_ready()
            await serves(client)

    asyncio.run(run())
    assert "in _publish" in capfd.readouterr().err  # the stacks of the process that stood still


@pytest.mark.slow
def test_a_step_that_computes_is_slow_before_it_is_a_standstill(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "step:spin:3")

    async def run() -> None:
        async with engine_process(tiny_config, stall_timeout_s=4.0) as client:
            monkeypatch.delenv("OCTAVO_TEST_FAULT")
            stream = await client.generate(request([0, 2]))
            await asyncio.sleep(3)  # timed: shorter than the time that a step may take
            assert client.status().state is EngineState.READY
            await wait_for_state(client, EngineState.RESTARTING, SOON_S)  # nothing computes for ever
            await ends_with_dead_engine(stream)

    asyncio.run(run())


@pytest.mark.parametrize(
    "fault", ["step:raise:3", "heartbeat:raise:4", *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW_FAULTS)]
)
def test_no_thread_of_the_engine_fails_unnoticed(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    inject(monkeypatch, fault)

    async def run() -> None:
        async with engine_process(tiny_config) as client:
            monkeypatch.delenv("OCTAVO_TEST_FAULT")
            stream = await client.generate(request([0, 2]))
            if fault.startswith("receive"):
                with pytest.raises(OverloadedError):
                    await client.metrics()
            assert await ends_with_dead_engine(stream) < SOON_S
            await wait_for_state(client, EngineState.RESTARTING, SOON_S)
            await client.wait_ready()
            await serves(client)

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["load:raise:1", "load:kill:1"])
def test_a_process_that_dies_before_it_was_ever_ready_is_not_tried_again(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    inject(monkeypatch, fault)

    async def run() -> None:
        client = ProcessClient(tiny_config, stall_timeout_s=30)
        with pytest.raises(EngineDeadError, match=r"fault was injected|SIGKILL"):
            await client.wait_ready()
        assert client.status().state is EngineState.DEAD
        await client.close()

    asyncio.run(run())


def test_closing_does_not_wait_for_a_load(tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "load:sleep:1")

    async def run() -> None:
        client = ProcessClient(tiny_config, stall_timeout_s=30)
        await wait_until(lambda: client._supervisor._heartbeat is not None, SOON_S)
        start = time.monotonic()
        await client.close()
        assert time.monotonic() - start < SOON_S
        assert not psutil.pid_exists(pid_of(client))

    asyncio.run(run())


def test_an_engine_that_keeps_dying_is_given_up(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_process(tiny_config) as client:
            for restarts in range(MAX_RESTARTS + 1):
                assert client.status().num_restarts == restarts
                os.kill(pid_of(client), signal.SIGKILL)
                await wait_until(lambda: client.status().state is not EngineState.READY, SOON_S)
                if restarts < MAX_RESTARTS:
                    await client.wait_ready()
            with pytest.raises(EngineDeadError, match="4 times within 5 minutes"):
                await client.wait_ready()
            assert client.status().state is EngineState.DEAD
            with pytest.raises(EngineDeadError):
                await client.generate(request([0]))

    asyncio.run(run())


def test_a_model_that_is_gone_at_the_restart_is_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())

    async def run() -> None:
        async with engine_process(EngineConfig(model=str(path), kv_cache_memory="16MiB", num_threads=1)) as client:
            path.write_bytes(b"no model")
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING, SOON_S)
            with pytest.raises(ModelLoadError, match=r"model\.gguf"):
                await client.wait_ready()
            assert client.status().state is EngineState.DEAD

    asyncio.run(run())


SERVER = """
import asyncio, sys
from octavo.config import EngineConfig
from octavo.core.engine_process import EngineProcess
from octavo.core.process_client import ProcessClient
from tests.support.engine_clients import request

async def main():
    client = ProcessClient(EngineConfig(model=sys.argv[1], kv_cache_memory="64MiB", num_threads=1), stall_timeout_s=30)
    print(client.status().pid, flush=True)
    if sys.argv[2] == "loading":
        await asyncio.Event().wait()
    await client.wait_ready()
    stream = await client.generate(request([0, 2]))
    print("ready", flush=True)
    async for _ in stream:
        pass

asyncio.run(main())
"""


@pytest.mark.parametrize("phase", ["loading", "serving", "stopped"])
def test_the_engine_ends_with_a_killed_server(tiny_config: EngineConfig, temporary_directory: Path, phase: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, tiny_config.model, phase],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary_directory)},
    )
    with server:
        assert server.stdout is not None
        engine = psutil.Process(int(server.stdout.readline()))
        if phase == "loading":
            waiting.wait_until(lambda: any("_native" in each.path for each in engine.memory_maps()))
        else:
            assert server.stdout.readline() == "ready\n"
        if phase == "stopped":
            engine.suspend()
        server.kill()
    what = f"the engine outlived the server by {SOON_S} s"
    waiting.wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, what, SOON_S)
    assert list(temporary_directory.iterdir()) == []


def test_signals_from_a_terminal_or_a_service_manager_are_the_servers_affair(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_process(tiny_config) as client:
            stream = await client.generate(request([0, 2]))
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid_of(client), number)
            await anext(stream)
            await stream.aclose()
            await serves(client)
            assert client.status().num_restarts == 0

    asyncio.run(run())


@pytest.mark.parametrize("num_failures", [2, MAX_RESTARTS])
def test_a_system_that_gives_no_process(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    """The system refuses a process at a restart: retried with back-off, then given up with the reason."""
    spawn = subprocess.Popen
    failures = iter(range(num_failures))

    def refuse(*args: object, **options: object) -> object:
        if next(failures, None) is None:
            return spawn(*args, **options)  # type: ignore[call-overload]
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def run() -> None:
        async with engine_process(tiny_config) as client:
            monkeypatch.setattr(subprocess, "Popen", refuse)
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING, SOON_S)
            if num_failures < MAX_RESTARTS:
                await client.wait_ready()
                assert client.status().num_restarts == num_failures + 1
                assert len(tokens(await serves(client))) == 4
                return
            with pytest.raises(EngineDeadError, match=r"cannot be started: .*Resource temporarily unavailable"):
                await client.wait_ready()
            assert client.status().state is EngineState.DEAD

    asyncio.run(run())


LIMITED_SERVER = """
import asyncio, os, resource, sys
from octavo.config import EngineConfig
from octavo.core.engine_process import EngineProcess
from octavo.core.process_client import ProcessClient
from tests.support.waiting import wait_until_async

async def main():
    client = ProcessClient(EngineConfig(model=sys.argv[1], kv_cache_memory="64MiB", num_threads=1), stall_timeout_s=30)
    await client.wait_ready()
    if os.getuid() == 0:  # whom no limit holds
        os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    print(client.status().pid, flush=True)
    try:
        await wait_until_async(client.wait_ready, seconds=60)
    except Exception as error:
        print(error, flush=True)
    await client.close()

asyncio.run(main())
"""


def test_the_limit_of_processes_at_a_restart(tiny_config: EngineConfig, temporary_directory: Path) -> None:
    """The system provides neither a process nor a thread: the reason is reported, and the server does not abort."""
    temporary_directory.chmod(0o777)
    with subprocess.Popen(
        [sys.executable, "-c", LIMITED_SERVER, tiny_config.model],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary_directory)},
    ) as server:
        assert server.stdout is not None
        os.kill(int(server.stdout.readline()), signal.SIGKILL)
        assert "cannot be started: [Errno 11] Resource temporarily unavailable" in server.stdout.readline()
    assert server.returncode == 0


def test_a_process_that_may_not_be_killed_ends_with_its_connection(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to signal a process that another user's has become; no test can provoke that as root."""
    exits: list[str] = []

    async def run() -> None:
        process = EngineProcess(tiny_config, lambda _: None, exits.append, in_thread=False)
        engine = process._engine
        assert isinstance(engine, subprocess.Popen)

        def refuse() -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(engine, "kill", refuse)
        await process.close()  # awaits its end, and gives up after a while
        assert engine.poll() is not None
        assert len(exits) == 1
        assert exits[0].startswith("the engine's process ")

    asyncio.run(run())
