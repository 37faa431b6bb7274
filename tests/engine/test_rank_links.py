"""Two machines whose link delays, loses and breaks: a proxy between them, also between two network namespaces.

The kernel's own emulation (netem) is not everywhere. A lost packet of TCP shows as a stall until it is sent again. So
each piece waits for a delay in the proxy, and some of them for a retransmission. Between two namespaces that are
connected by TUN devices packets are in fact delayed and lost.
"""

from __future__ import annotations

import fcntl
import os
import queue
import random
import secrets
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError
from tests.engine.test_ranks import OPTIONS, PROMPTS, segments
from tests.support.text_models import save_decoder
from tests.support.waiting import wait_until

DELAY_S, STALL_S, LOSS = 0.01, 0.25, 0.02
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Proxy:
    """Hands connections on to a port of this machine, late. `broken` holds everything back."""

    def __init__(self, host: str, port: int) -> None:
        self._target, self.master = port, f"127.0.0.1:{port}"
        self._listener = socket.create_server((host, 0))
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self.broken = threading.Event()
        self.pieces = self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the leader does not listen yet
                    near.close()
                    continue
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._hand_on, args=(source, sink), daemon=True).start()

    def _hand_on(self, source: socket.socket, sink: socket.socket) -> None:
        rng = random.Random(45)  # it loses its sixth piece
        with suppress(OSError):
            while data := source.recv(1 << 14):
                is_lost = rng.random() < LOSS
                time.sleep(DELAY_S + (STALL_S if is_lost else 0))  # timed: the delay of the link
                self.lost += is_lost
                wait_until(lambda: not self.broken.is_set(), seconds=600)
                self.pieces += 1
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.broken.clear()
        self._listener.close()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def namespace() -> Iterator[str]:
    """A network namespace with this name, and nothing in it."""
    name = f"octavo-{secrets.token_hex(3)}"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system allows no network namespaces")
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def connect(namespace: str, near: str, far: str, subnet: str) -> None:
    """Gives two devices addresses, the far one in the namespace."""
    ip("link", "set", far, "netns", namespace)
    ip("addr", "add", f"{subnet}.1/30", "dev", near)
    ip("link", "set", near, "up")
    ip("-n", namespace, "addr", "add", f"{subnet}.2/30", "dev", far)
    ip("-n", namespace, "link", "set", far, "up")


class Packets:
    """Hands IP packets on between two devices, each after a delay; some are lost. `broken` loses all.

    What netem does, for kernels that lack it: the protocol itself has to notice what is lost and send it again.
    """

    def __init__(self, subnet: str, port: int, names: tuple[str, str]) -> None:
        self.address, self.master = f"{subnet}.1:{port}", f"{subnet}.1:{port}"
        self.broken = threading.Event()
        self.pieces = self.lost = 0
        self._closed = threading.Event()
        self._ends = [open_tun(name) for name in names]
        self._threads: list[threading.Thread] = []
        for at in range(2):
            on_its_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            self._threads += [
                threading.Thread(target=self._take, args=(self._ends[at], on_its_way, at), daemon=True),
                threading.Thread(target=self._hand_on, args=(self._ends[1 - at], on_its_way), daemon=True),
            ]
        for thread in self._threads:
            thread.start()

    def _take(self, end: int, on_its_way: queue.SimpleQueue[tuple[float, bytes]], seed: int) -> None:
        rng = random.Random(seed)
        poll = select.poll()  # select.select takes no descriptor above 1023, and a whole run has more
        poll.register(end, select.POLLIN)
        while not self._closed.is_set():
            if not poll.poll(100):
                continue
            packet = os.read(end, 1 << 16)
            if self.broken.is_set() or rng.random() < LOSS:
                self.lost += 1
            else:
                on_its_way.put((time.monotonic() + DELAY_S, packet))

    def _hand_on(self, end: int, on_its_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while not self._closed.is_set():
            with suppress(queue.Empty, OSError):  # a device that is down takes no packets
                due, packet = on_its_way.get(timeout=0.1)
                time.sleep(max(due - time.monotonic(), 0))  # timed: the delay of the link
                self.pieces += 1
                os.write(end, packet)

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(20)
        for end in self._ends:
            os.close(end)


def open_tun(name: str) -> int:
    """A new device of that name. What is sent through it is read here, and what is written here arrives."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return end


@pytest.fixture(params=["loopback", "namespaces", "packets"])
def link(request: pytest.FixtureRequest) -> Iterator[tuple[Proxy | Packets, list[str]]]:
    """The link between two machines, and how a command is run on the other one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if request.param == "loopback":
        with closing(Proxy("127.0.0.1", port)) as found:
            yield found, []
        return
    with namespace() as name:
        there, names = ["ip", "netns", "exec", name], (f"o{name[-6:]}a", f"o{name[-6:]}b")
        made: Proxy | Packets
        try:
            if request.param == "packets":
                made = Packets("10.213.78", port, names)
                connect(name, *names, "10.213.78")
            else:
                ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
                connect(name, *names, "10.213.77")
                made = Proxy("10.213.77.1", port)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this system allows no such links between network namespaces: {error}")
        with closing(made):
            yield made, there
        subprocess.run(["ip", "link", "del", names[0]], check=False, capture_output=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


def test_a_link_that_delays_stalls_and_breaks(
    model: str, link: tuple[Proxy | Packets, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CLUSTER_TOKEN", secrets.token_hex(16))
    with LLM(model, **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    between, there = link
    flags = ["--nnodes", "2", "--node-rank", "1", "--master", between.address, "--pipeline-parallel-size", "2"]
    command = [*there, sys.executable, "-m", "octavo", "serve", model, *flags]
    helper = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    options: dict[str, Any] = {"nnodes": 2, "master": between.master, "pipeline_parallel_size": 2, **OPTIONS}
    try:
        with LLM(model, **options) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
            assert found == expected
            assert between.pieces > 40
            assert between.lost > 0
            pieces_before = between.pieces
            broken_at: list[float] = []

            def break_it() -> None:
                wait_until(lambda: between.pieces > pieces_before + 10)
                broken_at.append(time.monotonic())
                between.broken.set()

            threading.Thread(target=break_it).start()
            with pytest.raises(EngineDeadError, match="no sign of life"):
                llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True), use_tqdm=False)
            assert time.monotonic() - broken_at[0] < 5
        between.broken.clear()
        assert helper.wait(30) == 0  # by itself, once it hears that the leader is gone
        assert not segments()
    finally:
        between.broken.clear()
        if helper.poll() is None:
            helper.terminate()
            helper.wait(20)
