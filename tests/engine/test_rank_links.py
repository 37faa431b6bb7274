"""Two machines whose link delays, stalls and breaks: a proxy between them, also between two network namespaces.

The kernel's own emulation (netem) is not everywhere. A lost packet of TCP shows as a stall until it is sent again. So
each piece waits for a delay in the proxy, and some of them for a retransmission.
"""

from __future__ import annotations

import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError
from tests.engine.test_ranks import OPTIONS, PROMPTS
from tests.support.text_models import save_decoder

DELAY_S, STALL_S, LOSS = 0.01, 0.25, 0.02
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Proxy:
    """Hands connections on to a port of this machine, late. `broken` holds everything back."""

    def __init__(self, host: str, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((host, 0))
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self.broken = threading.Event()
        self.pieces = 0
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
        rng = random.Random(0)
        with suppress(OSError):
            while data := source.recv(1 << 14):
                time.sleep(DELAY_S + (STALL_S if rng.random() < LOSS else 0))
                while self.broken.is_set():
                    time.sleep(0.05)
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


@pytest.fixture(params=["loopback", "namespaces"])
def link(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """The address of this side, and how a command is run on the other side."""
    if request.param == "loopback":
        yield "127.0.0.1", []
        return
    name = f"octavo-{secrets.token_hex(3)}"
    near, far = f"o{name[-6:]}a", f"o{name[-6:]}b"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system allows no network namespaces")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", far)
        ip("link", "set", far, "netns", name)
        ip("addr", "add", "10.213.77.1/30", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", name, "addr", "add", "10.213.77.2/30", "dev", far)
        ip("-n", name, "link", "set", far, "up")
        yield "10.213.77.1", ["ip", "netns", "exec", name]
    except subprocess.CalledProcessError:
        pytest.skip("this system allows no links between network namespaces")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", near], check=False, capture_output=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


def test_a_link_that_delays_stalls_and_breaks(
    model: str, link: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CLUSTER_TOKEN", secrets.token_hex(16))
    with LLM(model, **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host, there = link
    proxy = Proxy(host, port)
    flags = ["--nnodes", "2", "--node-rank", "1", "--master", proxy.address, "--pipeline-parallel-size", "2"]
    command = [*there, sys.executable, "-m", "octavo", "serve", model, *flags]
    helper = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    options: dict[str, Any] = {"nnodes": 2, "master": f"127.0.0.1:{port}", "pipeline_parallel_size": 2, **OPTIONS}
    try:
        with LLM(model, **options) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
            assert found == expected
            assert proxy.pieces > 40
            breaking = threading.Timer(0.5, proxy.broken.set)
            breaking.start()
            start = time.monotonic() + 0.5
            with pytest.raises(EngineDeadError, match="no sign of life"):
                llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True), use_tqdm=False)
            assert proxy.broken.is_set()
            assert time.monotonic() - start < 5
    finally:
        proxy.close()
        helper.terminate()
        helper.wait(20)
