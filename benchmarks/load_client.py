"""A client with little overhead: HTTP/1.1 on asyncio's streams, events without JSON."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

_NO_TEXT = (b'"text":""', b'"text": ""', b'"choices":[]', b'"choices": []')


@dataclass(slots=True)
class Answer:
    """The answer to a request. Times are from `time.perf_counter`."""

    status: int
    sent: float
    times: list[float] = field(default_factory=list)  # of the events with text
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Chunks:
    """Decodes a body with chunked transfer coding, piece by piece."""

    def __init__(self) -> None:
        self._buffer = b""
        self.is_ended = False

    def push(self, data: bytes) -> bytes:
        """Add bytes and return the payload that they complete."""
        self._buffer += data
        payload = []
        while not self.is_ended:
            line, separator, rest = self._buffer.partition(b"\r\n")
            if not separator:
                break
            size = int(line.partition(b";")[0], 16)
            if len(rest) < size + 2:
                break
            self.is_ended = size == 0
            payload.append(rest[:size])
            self._buffer = rest[size + 2 :]
        return b"".join(payload)


async def stream(url: str, path: str, body: dict[str, Any], timeout: float = 600) -> Answer:
    """Post a request that is answered with a stream of events. Any other answer has `error`."""
    host, _, port = url.removeprefix("http://").partition(":")
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nAccept: text/event-stream\r\nConnection: close\r\n\r\n"
    )
    answer = Answer(0, time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        try:
            writer.write(head.encode() + data)
            answer.sent = time.perf_counter()
            await asyncio.wait_for(_read(reader, answer), timeout)
        finally:
            writer.close()
    except (OSError, EOFError, ValueError, asyncio.TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not (answer.times and answer.usage):
        answer.error = "the stream ended without text or without usage"
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    answer.status = int(head.split(b" ", 2)[1])
    if answer.status != 200:
        answer.error = f"status {answer.status}: {(await reader.read())[:300].decode('utf-8', 'replace')}"
        return
    chunks = Chunks() if b"transfer-encoding: chunked" in head.lower() else None
    text = b""
    while data := await reader.read(1 << 16):
        now = time.perf_counter()
        text += data if chunks is None else chunks.push(data)
        *events, text = text.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            _take(event, now, answer)
        if chunks is not None and chunks.is_ended:
            return


def _take(event: bytes, now: float, answer: Answer) -> None:
    """Parse only the event with the usage; count the rest."""
    if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
        return
    if b'"usage":{' in event or b'"usage": {' in event:
        answer.usage = json.loads(event[5:])["usage"]
    if b'"error"' in event[:20]:
        answer.error = event[5:300].decode("utf-8", "replace")
    if not any(part in event for part in _NO_TEXT):
        answer.times.append(now)
