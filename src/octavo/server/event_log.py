"""Event logs of streamed background responses: clients may disconnect and reconnect while a response is generated."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator

MAX_BYTES = 32 << 20


class EventLog:
    """One response's events so far, numbered from 0 as in `sequence_number`. Readers wait for later events."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self.num_bytes = 0
        self.is_over = False

    def add(self, chunk: bytes) -> None:
        """Add one or more whole events in stream format. Comments are dropped."""
        new = [part + b"\n\n" for part in chunk.split(b"\n\n") if part and not part.startswith(b":")]
        self._events += new
        self.num_bytes += sum(map(len, new))
        self._tell()

    def end(self) -> None:
        """Mark the log as complete."""
        self.is_over = True
        self._tell()

    async def read(self, first: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from number `first` on: existing ones at once, then each new one as it arrives."""
        position = first
        while True:
            news = self._news
            if position < len(self._events):
                new = self._events[position:]
                position += len(new)
                yield b"".join(new)
            elif self.is_over:
                return
            else:
                await news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class EventLogs:
    """Logs of all running responses, and as many logs of ended responses as fit into `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def put(self, response_id: str, log: EventLog) -> None:
        """Keep a log, dropping the oldest ended logs if needed."""
        self._logs[response_id] = log
        ended = [known for known, item in self._logs.items() if item.is_over and known != response_id]
        num_bytes = sum(self._logs[known].num_bytes for known in ended)
        for known in ended:
            if num_bytes <= self._max_bytes:
                break
            num_bytes -= self._logs.pop(known).num_bytes

    def get(self, response_id: str) -> EventLog | None:
        return self._logs.get(response_id)

    def remove(self, response_id: str) -> None:
        self._logs.pop(response_id, None)
