"""Runs the lines of a batch: as many at once as fit, with lines that share a prefix next to each other.

It depends on neither HTTP nor an engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from octavo.batches.lines import BatchLine, LineError, LineResult, failed, usage_of

SPARE_LINES = 4  # waiting besides the running lines, so that no row of a step stays empty
_WINDOW_BYTES = 8 << 20
_WINDOW = 1000  # lines that are sorted, so that a shared beginning is computed once
_PREFIX_CHARS = 4096
_BUSY = (429, 503)
_MAX_WAIT_S = 30.0
_IN_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")  # results are one line each; OpenAI's own server indents its answers
_MAX_FAULTS = 3  # an engine that ends with a line may have ended because of it


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A server's answer to a line.

    body: JSON.
    retry_after_s: seconds to wait before trying again, if the server had no room.
    is_fault: the engine ended; the line may be tried again.
    usage: see `LineResult`.
    """

    status: int
    body: bytes
    request_id: str = ""
    retry_after_s: float = 1.0
    is_fault: bool = False
    usage: Mapping[str, int] = field(default_factory=dict)


def line_answer(status: int, headers: Mapping[str, str], body: bytes) -> LineAnswer:
    """Convert a server's answer to a line's answer.

    headers: their names in lower case.
    """
    value: object = None
    try:
        value = json.loads(body)
        body = body.translate(_IN_ONE_LINE)  # line ends can only be between values
    except (ValueError, RecursionError):  # not JSON, such as an answer from a proxy
        body = json.dumps(body.decode("utf-8", "replace")).encode()
    wait = headers.get("retry-after", "")
    return LineAnswer(
        status,
        body,
        headers.get("x-request-id", ""),
        retry_after_s=float(wait) if wait.isdecimal() else 1.0,
        is_fault=status == 500 and b'"engine_restarting"' in body,
        usage=usage_of(value),
    )


Call = Callable[[BatchLine], Awaitable[LineAnswer]]


class BatchRunner:
    """Runs lines, and passes each result to `put` as soon as its line ends."""

    def __init__(
        self,
        call: Call,
        width: Callable[[], int],
        put: Callable[[LineResult], None],
        *,
        patience_s: float = 3600.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """call: answers a line. Raises ConnectionError if it cannot.
        width: returns the number of lines to run at once; asked before each line.
        patience_s: how long a line may wait for room.
        """
        self._call = call
        self._width = width
        self._put = put
        self._patience_s = patience_s
        self._sleep = sleep

    async def run(self, lines: Iterable[BatchLine | LineError]) -> None:
        """Run all lines, and return when they have results.

        Cancelling it cancels running lines, which get no result.
        """
        running: set[asyncio.Task[None]] = set()
        try:
            source = iter(lines)
            while window := await asyncio.to_thread(next_window, source):
                for line in window:
                    if isinstance(line, LineError):
                        self._put(failed(line, line.code, f"line {line.number}: {line.message}"))
                        continue
                    while len(running) >= max(self._width(), 1):
                        await _one_of(running)
                    running.add(asyncio.create_task(self._run(line)))
            while running:
                await _one_of(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, line: BatchLine) -> None:
        began, delay, num_faults = asyncio.get_running_loop().time(), 1.0, 0
        while True:
            try:
                answer = await self._call(line)
            except ConnectionError as error:
                answer = None
                result = failed(line, "server_unreachable", str(error))
            if answer is not None:
                if answer.status not in _BUSY and not (answer.is_fault and num_faults < _MAX_FAULTS):
                    break
                num_faults += answer.is_fault
                delay = max(delay, answer.retry_after_s)
                result = failed(
                    line, "request_timeout", f"the server had no capacity for the request within {self._patience_s:g} s"
                )
            if asyncio.get_running_loop().time() - began > self._patience_s:
                self._put(result)
                return
            await self._sleep(min(delay, _MAX_WAIT_S))
            delay = min(2 * delay, _MAX_WAIT_S)
        self._put(
            LineResult(line.number, line.custom_id, answer.status, answer.request_id, answer.body, usage=answer.usage)
        )


async def _one_of(running: set[asyncio.Task[None]]) -> None:
    """Wait until one task has ended, and remove it. Raises the task's exception."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    running -= done
    for task in done:
        task.result()


def next_window(lines: Iterator[BatchLine | LineError]) -> list[BatchLine | LineError]:
    """Return the next lines, limited in number and size, sorted by their beginnings."""
    window, num_bytes = [], 0
    for line in lines:
        window.append(line)
        num_bytes += line.num_bytes
        if len(window) == _WINDOW or num_bytes >= _WINDOW_BYTES:
            break
    return sorted(window, key=_beginning)


def _beginning(line: BatchLine | LineError) -> str:
    if isinstance(line, LineError):
        return ""
    content = next((line.body[name] for name in ("messages", "prompt", "input") if name in line.body), "")
    return json.dumps([line.url, content])[:_PREFIX_CHARS]
