"""Request bodies of every kind that cost a server as much as possible, and a watch on the clients that wait
meanwhile.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until

PROSE = "The quick brown fox jumps over the lazy dog, and isn't it 3.14 times as large?\n"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
_STREAM = {"prompt": "Count:", "max_tokens": 512, "stream": True, "ignore_eos": True, "temperature": 0}
_STATUS = re.compile(r"(VmRSS|VmHWM):\s+(\d+) kB")
_TIMEOUT_S = 300


def _ask(path: str, **fields: Any) -> tuple[str, bytes]:
    return path, json.dumps({"max_tokens": 1, **fields} if path in (CHAT, TEXT) else fields).encode()


def _items(size: int, item: Any) -> list[Any]:
    """Return enough of an item to fill a body of this size."""
    return [item] * (size // (len(json.dumps(item)) + 2))


def _names(size: int, value: Any) -> dict[str, Any]:
    return {str(i): value for i in range(size // (len(json.dumps(value)) + 12))}


def _tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def _texts(size: int) -> dict[str, tuple[str, bytes]]:
    """Return one long text in each protocol."""
    words, prose = "x " * (size // 2), PROSE * (size // len(PROSE))
    return {
        "words": _ask(TEXT, prompt=words),
        "one letter": _ask(TEXT, prompt="a" * size),
        "spaces": _ask(TEXT, prompt=" " * size),
        "prose": _ask(TEXT, prompt=prose),
        "escapes": _ask(TEXT, prompt="é😀" * (size // 18)),
        "prose to be cut": _ask(TEXT, prompt=prose[: size // 4], truncate_prompt_tokens=16),
        "one of 100 texts": _ask(TEXT, prompt=["a"] * 99 + [prose]),
        "chat": _ask(CHAT, messages=[{"role": "user", "content": words}]),
        "chat of the assistant": _ask(CHAT, messages=[{"role": "assistant", "content": prose}, USER]),
        "chat to be cut": _ask(
            CHAT,
            messages=[{"role": "user", "content": prose[: size // 64]}] * 16,
            truncate_prompt_tokens=64,
            truncation_side="turns",
        ),
        "tokenize": _ask("/tokenize", content="ab " * (size // 3)),
        "tokenize, pieces": _ask("/tokenize", content=prose[: 1 << 19], with_pieces=True),
        "count_tokens": _ask("/v1/messages/count_tokens", messages=[{"role": "user", "content": prose}]),
        "responses": _ask("/v1/responses", input=words),
        "infill": _ask("/infill", input_prefix=words, input_suffix=""),
        "tgi": _ask("/generate", inputs=words),
        "ollama": _ask("/api/generate", prompt=words, raw=True),
        "text to be cut": _ask("/v1/embeddings", input=prose[: size // 4], truncate_prompt_tokens=16),
        "embeddings": _ask("/v1/embeddings", input=words),
        "rerank": _ask("/v1/rerank", query=words, documents=["a"]),
        "image": _ask(
            CHAT,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}],
                }
            ],
        ),
        "arguments": _ask(
            CHAT,
            messages=[
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "a",
                            "type": "function",
                            "function": {"name": "f", "arguments": json.dumps({"a": words})},
                        }
                    ],
                },
                USER,
            ],
        ),
    }


def _lists(size: int) -> dict[str, tuple[str, bytes]]:
    """Return bodies with long lists."""
    part = {"type": "text", "text": "a"}
    return {
        "messages": _ask(CHAT, messages=_items(size, USER)),
        "4,096 messages": _ask(CHAT, messages=[{"role": "user", "content": "a" * (size // 4200)}] * 4096),
        "parts": _ask(CHAT, messages=[{"role": "user", "content": _items(size, part)}]),
        "4,096 parts": _ask(CHAT, messages=[{"role": "user", "content": [part] * 4096}]),
        "tools": _ask(CHAT, messages=[USER], tools=_items(size, _tool({"type": "object"}))),
        "bare tools": _ask(CHAT, messages=[USER], tools=_items(size, {})),
        "logit_bias": _ask(TEXT, prompt="a", logit_bias=_names(size, 1)),
        "stop": _ask(TEXT, prompt="a", stop=_items(size, "ab")),
        "names": _ask(TEXT, prompt="a", **_names(size, None)),
        "metadata": _ask(TEXT, prompt="a", metadata=_names(size, {})),
        "token ids": _ask(TEXT, prompt=_items(size, 12345)),
        "lists of token ids": _ask(TEXT, prompt=[_items(size // 100, 12345)] * 100),
        "input_extra": _ask("/infill", input_prefix="a", input_suffix="", input_extra=_items(size, {"text": "a"})),
        "inputs to embed": _ask("/v1/embeddings", input=["a b"] * 2048),
        "too many inputs": _ask("/api/embed", input=_items(size, "ab")),
        "documents": _ask("/v1/rerank", query="a", documents=_items(size, "ab")),
        "items": _ask("/v1/responses", input=_items(size, {**USER, "type": "message"})),
        "blocks": _ask("/v1/messages", max_tokens=1, messages=[{"role": "user", "content": _items(size, part)}]),
        "images": _ask("/api/generate", prompt="a", images=_items(size, "ab")),
        "tokens": _ask("/detokenize", tokens=_items(size, 12345)),
    }


def _structures(size: int) -> dict[str, tuple[str, bytes]]:
    """Return difficult JSON, schemas and patterns."""
    schema = {"type": "object", "properties": _names(size, {"type": "string"})}
    nested: Any = {}
    for _ in range(90):
        nested = {"type": "object", "properties": {"a": nested, "b": nested.get("properties", {}).get("a", {})}}
        if len(json.dumps(nested)) > size // 4:
            break
    groups = "".join(f"(a{{1,{i}}}b){{1,{i}}}" for i in range(2, 60))
    words = "([a-z]{1,50} ){1,50}" * 3
    return {
        "words in a regex": _ask(TEXT, prompt="a", guided_regex=words, n=16, max_tokens=32),
        "empty lists": (TEXT, b'{"prompt":[' + b"[]," * (size // 3) + b"[]]}"),
        "depth": (TEXT, b'{"prompt":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"),
        "a number": (TEXT, b'{"prompt":"a","seed":' + b"1" * size + b"}"),
        "a name": (TEXT, b'{"' + b"a" * size + b'":1}'),
        "white space": (TEXT, b'{"prompt":' + b" " * size + b"1}"),
        "cut": (TEXT, _ask(TEXT, prompt="x " * (size // 2))[1][:-3]),
        "not UTF-8": (TEXT, b'{"prompt":"' + b"a" * size + b'\xff"}'),
        "control character": (TEXT, b'{"prompt":"' + b"a" * size + b'\x01"}'),
        "halves of pairs": (TEXT, b'{"prompt":"' + b"\\ud83d" * (size // 6) + b'"}'),
        "schema": _ask(TEXT, prompt="a", guided_json=schema),
        "nested schema": _ask(TEXT, prompt="a", guided_json=nested),
        "tool's schema": _ask(CHAT, messages=[USER], tools=[_tool(schema)]),
        "regex": _ask(TEXT, prompt="a", guided_regex=groups, n=16, max_tokens=32),
        "groups of groups": _ask(
            TEXT, prompt="a", guided_regex="((((a{1,9}b?){1,9}c?){1,9}d?){1,9}e?){1,9}" * 8, n=16, max_tokens=32
        ),
        "grammar": _ask(TEXT, prompt="a", guided_grammar="start: " + " | ".join(f'"{i}"' for i in range(size // 10))),
        "choices": _ask(TEXT, prompt="a", guided_choice=[f"{i}" * 8 for i in range(size // 40)]),
    }


def hostile_bodies(size: int) -> Mapping[str, tuple[str, bytes]]:
    """Return (path, body) by kind. Bodies have about `size` bytes, unless something else limits them."""
    return {**_texts(size), **_lists(size), **_structures(size)}


@dataclass
class Figures:
    """Times in seconds since the measurement began, and what else was observed.

    gap: the longest time between two events of a stream.
    health: the slowest answer of `/health/live`.
    growth: increase of the server's peak memory, in bytes.
    statuses: statuses of the answers.
    """

    gap: float
    health: float
    growth: int = 0
    statuses: list[int] = field(default_factory=list)


class StreamWatch:
    """A stream, and requests to `/health/live`, from a separate process that does nothing else."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        command = [sys.executable, "-m", "tests.support.large_bodies", url.removeprefix("http://")]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        self._gaps: list[tuple[float, float]] = []
        self._answers: list[tuple[float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()
        self._wait_for_both(since=0.0)  # until it runs

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def measure(self, act: Callable[[], list[int] | None]) -> Figures:
        """Return the figures while `act` runs, and until two more events."""
        before = self._memory()["VmRSS"]
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # the peak counts from now on
        begin = time.monotonic()
        statuses = act() or []
        end = time.monotonic()
        self._wait_for_both(since=end)
        gap, health = (max(took for at, took in list(rows) if at > begin) for rows in (self._gaps, self._answers))
        return Figures(gap, health, self._memory()["VmHWM"] - before, statuses)

    def send(self, path: str, body: bytes, num_clients: int) -> Figures:
        """Return the figures while `num_clients` clients send this body at the same time."""
        with ThreadPoolExecutor(num_clients) as pool:
            return self.measure(lambda: list(pool.map(lambda _: post(self.url, path, body), range(num_clients))))

    def _wait_for_both(self, since: float) -> None:
        """Wait for two events of the stream and two answers after this time."""

        def have_come() -> bool:
            assert self._process.poll() is None, "the stream has failed"
            return all(len(rows) > 1 and rows[-2][0] > since for rows in (self._gaps, self._answers))

        wait_until(have_come, "two events and two answers", seconds=_TIMEOUT_S)

    def _memory(self) -> dict[str, int]:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return {name: int(size) << 10 for name, size in _STATUS.findall(text)}

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, at, took = line.split()
            (self._gaps if kind == "gap" else self._answers).append((float(at), float(took)))


@contextmanager
def stream_watch(url: str, pid: int) -> Iterator[StreamWatch]:
    watch = StreamWatch(url, pid)
    try:
        yield watch
    finally:
        watch.close()


def post(url: str, path: str, body: bytes) -> int:
    """Return the status of the answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _tell(kind: str, at: float, took: float) -> None:
    sys.stdout.write(f"{kind} {at} {took}\n")  # at once: another thread writes too
    sys.stdout.flush()


def _listen(address: str) -> None:
    """Write the gaps of one stream after another."""
    body = json.dumps(_STREAM)
    while True:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        connection.request("POST", TEXT, body, {"Content-Type": "application/json"})
        answer, before = connection.getresponse(), time.monotonic()
        if answer.status != 200:  # the queue is full
            answer.read()
            time.sleep(0.05)  # timed: a client that asks again after a pause
        while line := answer.readline():
            if line.startswith(b"data:"):
                now = time.monotonic()
                _tell("gap", now, now - before)
                before = now
        connection.close()


def _probe(address: str) -> None:
    while True:
        before = time.monotonic()
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        connection.request("GET", "/health/live")
        assert connection.getresponse().status == 200
        connection.close()
        now = time.monotonic()
        _tell("health", now, now - before)
        time.sleep(0.02)  # timed: probes come at intervals


def _main(arguments: Sequence[str]) -> None:
    threading.Thread(target=_probe, args=(arguments[0],), daemon=True).start()
    _listen(arguments[0])


if __name__ == "__main__":
    _main(sys.argv[1:])
