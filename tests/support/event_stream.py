"""Server-sent events as a client reads them."""

from __future__ import annotations

import json
from typing import Any

import httpx

DONE = "[DONE]"


def post_stream(client: httpx.Client, url: str, body: dict[str, Any]) -> list[Any]:
    """Return the data of every event of a stream, ending with `DONE`. Each event is one line, JSON or the end mark."""
    with client.stream("POST", url, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(answer.iter_bytes())
    assert b"\r" not in raw
    events = [event for event in raw.decode("utf-8").split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [item if item == DONE else json.loads(item) for item in data]
