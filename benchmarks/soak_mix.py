"""The requests of a soak test: a seeded mix of every kind, each with a check of its answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import struct
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
ADAPTER = "soak"  # its name in requests
WORDS = [
    "river",
    "stone",
    "letter",
    "window",
    "garden",
    "engine",
    "copper",
    "morning",
    "signal",
    "harbour",
    "bread",
    "winter",
    "paper",
    "music",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": WORDS}, "depth": {"type": "integer"}},
            "required": ["word", "depth"],
            "additionalProperties": False,
        },
    },
}


INVALID: list[tuple[str | dict[str, Any], int]] = [
    ("{broken", 400),
    ({"messages": []}, 400),
    ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, 400),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, 400),
    ({"messages": [{"role": "user", "content": "x"}], "nonsense": 1}, 400),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400),
    ({"messages": [{"role": "user", "content": "x"}], "model": "nobody"}, 404),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400),
]


class WrongAnswerError(Exception):
    """An answer differs from the expected one."""


@dataclass(slots=True)
class Known:
    """The state that all users share.

    answers: greedy answers and vectors by request, as first received.
    """

    has_adapter: bool = False
    sees: bool = False
    answers: dict[str, Any] = field(default_factory=dict)

    def check(self, key: str, answer: Any) -> None:
        """Check that an answer is the same as before. Raises WrongAnswerError."""
        if (before := self.answers.setdefault(key, answer)) != answer:
            raise WrongAnswerError(f"{key}: {str(answer)[:100]} instead of {str(before)[:100]}")


class Mix:
    """The requests of one user, the same for the same seed."""

    def __init__(self, client: httpx.AsyncClient, seed: int, known: Known) -> None:
        self._client = client
        self._known = known
        self._rng = random.Random(seed)
        beginnings = random.Random(0)
        self._beginnings = [" ".join(beginnings.choices(WORDS, k=400)) for _ in range(4)]
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "short": (42, self._short),
            "long": (13, self.long),
            "structured": (8, self.structured),
            "tools": (7, self._tools),
            "embeddings": (7, self._embeddings),
            "adapter": (5 * known.has_adapter, self._adapted),
            "image": (3 * known.sees, self._image),
            "n=4": (5, self.several),
            "aborted": (5, self._aborted),
            "cancelled": (4, self._cancelled),
            "invalid": (5, self._invalid),
        }

    def draw(self) -> tuple[str, Callable[[], Awaitable[None]]]:
        """Return the next kind of request, and a function that sends one.

        It raises WrongAnswerError or httpx.HTTPError.
        """
        weights = [weight for weight, _ in self._kinds.values()]
        kind = self._rng.choices(list(self._kinds), weights)[0]
        return kind, self._kinds[kind][1]

    async def _short(self) -> None:
        body = self._body(self._words(12), self._rng.randrange(4, 48))
        if self._rng.random() < 0.5:
            await self._whole(body, 1)
        else:
            await self._streamed(body)

    async def long(self) -> None:
        prompt = f"{self._rng.choice(self._beginnings)}. {self._words(20)}"
        await self._whole(self._body(prompt, self._rng.randrange(4, 24)), 1)

    async def several(self) -> None:
        await self._whole(self._body(self._words(8), 16) | {"n": 4}, 4)

    async def structured(self) -> None:
        """Send a request with a new schema."""
        names = [f"{self._rng.choice(WORDS)}_{self._rng.randrange(10**6)}" for _ in range(self._rng.randrange(1, 4))]
        kinds: list[dict[str, Any]] = [{"type": "boolean"}, {"type": "integer"}, {"enum": WORDS[:5]}]
        schema = {
            "type": "object",
            "properties": {name: self._rng.choice(kinds) for name in names},
            "required": names,
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "fresh", "schema": schema, "strict": True}}
        answer = await self._whole(self._body("Fill in the form.", 96) | {"response_format": form}, 1)
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop" and set(json.loads(choice["message"]["content"])) != set(names):
            raise WrongAnswerError(f"structured output is {choice['message']['content']!r}")

    async def _tools(self) -> None:
        body = self._body(f"Look up: {self._words(6)}.", 64) | {"tools": [TOOL], "tool_choice": "required"}
        choice = (await self._whole(body, 1))["choices"][0]
        if choice["finish_reason"] != "tool_calls":
            if choice["finish_reason"] == "length":
                return
            raise WrongAnswerError(f"no call of a tool: {choice}")
        for call in choice["message"]["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            if call["function"]["name"] != "look_up" or given["word"] not in WORDS or set(given) != {"word", "depth"}:
                raise WrongAnswerError(f"a call of {call['function']}")

    async def _embeddings(self) -> None:
        text = " ".join(random.Random(self._rng.randrange(20)).choices(WORDS, k=30))
        answer = await self._client.post("/v1/embeddings", json={"input": text})
        _check_status(answer, 200)
        self._known.check(f"vector of {text[:30]}", answer.json()["data"][0]["embedding"])

    async def _adapted(self) -> None:
        await self._greedy(f"Tell me about a {self._rng.choice(WORDS)}.", {"model": ADAPTER})

    async def _image(self) -> None:
        side, level = self._rng.choice([32, 64, 96]), self._rng.randrange(0, 256, 64)
        url = f"data:image/png;base64,{base64.b64encode(grey_png(side, level)).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        await self._greedy(content, {}, f"picture {side} {level}")

    async def _greedy(self, content: Any, further: dict[str, Any], key: str = "") -> None:
        """Request an answer that must be the same each time."""
        messages = [{"role": "user", "content": content}]
        answer = await self._whole({"messages": messages, "max_tokens": 12, "temperature": 0} | further, 1)
        self._known.check(key or f"{further} {content}", answer["choices"][0]["message"]["content"])

    async def _cancelled(self) -> None:
        """Cancel a request by its id after the first piece of its answer. It may have ended by then."""
        request_id = f"soak-{self._rng.randrange(10**9)}"
        body = self._body(self._words(10), 400) | {"stream": True}
        async with self._client.stream("POST", CHAT, json=body, headers={"x-request-id": request_id}) as answer:
            if answer.status_code != 200:
                await answer.aread()
            _check_status(answer, 200)
            lines = answer.aiter_lines()
            await anext(lines, None)  # a crash may end the stream before
            cancelled = await self._client.post(f"/v1/requests/{request_id}/cancel")
            rest = [line async for line in lines if line.startswith("data:")]
        if cancelled.status_code not in (200, 404):
            _check_status(cancelled, 200)
        if cancelled.status_code == 200 and not any("request_cancelled" in line for line in rest):
            raise WrongAnswerError(f"a cancelled request went on: {rest[-2:]}")

    async def _aborted(self) -> None:
        body = self._body(self._words(30), 200) | {"stream": self._rng.random() < 0.7}
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._client.post(CHAT, json=body), self._rng.uniform(0.0, 1.0))

    async def _invalid(self) -> None:
        body, status = self._rng.choice(INVALID)
        content = body if isinstance(body, str) else json.dumps(body)
        answer = await self._client.post(CHAT, content=content, headers={"content-type": "application/json"})
        _check_status(answer, status)
        if not answer.json()["error"]["message"]:
            raise WrongAnswerError("an error without a message")

    async def _whole(self, body: dict[str, Any], num_choices: int) -> dict[str, Any]:
        answer = await self._client.post(CHAT, json=body)
        _check_status(answer, 200)
        content: dict[str, Any] = answer.json()
        if len(content["choices"]) != num_choices or not content["usage"]["completion_tokens"]:
            raise WrongAnswerError(f"{len(content['choices'])} choices, usage {content['usage']}")
        return content

    async def _streamed(self, body: dict[str, Any]) -> None:
        async with self._client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                await answer.aread()
            _check_status(answer, 200)
            lines = [line async for line in answer.aiter_lines() if line.startswith("data:")]
        if any('"error"' in line[:20] for line in lines):
            raise WrongAnswerError(f"an error in the stream: {lines[-2:]}")
        if not lines or lines[-1] != "data: [DONE]":
            raise WrongAnswerError("a stream without its end")

    def _body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        message = {"role": "user", "content": prompt}
        return {"messages": [message], "max_tokens": max_tokens, "seed": self._rng.randrange(10**6)}

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=count))


def _check_status(answer: httpx.Response, status: int) -> None:
    if answer.status_code != status:
        raise WrongAnswerError(f"status {answer.status_code}, not {status}: {answer.text[:200]}")


def grey_png(side: int, level: int) -> bytes:
    """Return a square of one grey as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes([level]) * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
