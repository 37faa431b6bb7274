"""The client of the load benchmark, on streams cut anywhere."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.load_client import Answer, Chunks, stream

EVENTS = (
    b'data: {"choices":[{"text":"a"}],"usage":null}\n\n'
    b": keep-alive\n\n"
    b'data: {"choices":[{"text":"b"}]}\n\n'
    b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)


def chunked(data: bytes, size: int) -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_chunks_are_put_together_however_they_are_cut(size: int) -> None:
    chunks, whole = Chunks(), chunked(EVENTS, 50)
    assert b"".join(chunks.push(whole[at : at + size]) for at in range(0, len(whole), size)) == EVENTS
    assert chunks.is_ended


def answered(reply: bytes) -> Answer:
    async def serve_once() -> Answer:
        async def reply_to(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(reply_to, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await stream(f"http://127.0.0.1:{port}", "/v1/completions", {"prompt": [1]}, timeout=5)

    return asyncio.run(serve_once())


def test_events_with_text_are_counted_and_the_usage_is_read() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = answered(head + chunked(EVENTS, 33))
    assert answer.error is None
    assert len(answer.times) == 2
    assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 2}


def test_a_refusal_is_an_error_with_its_words() -> None:
    answer = answered(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nfull")
    assert answer.error == "status 503: full"


def test_a_stream_that_breaks_off_is_an_error() -> None:
    answer = answered(b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS[:40])
    assert answer.error is not None
