"""A soak test: an hour of mixed requests with two engine crashes, and a check of the idle processes every minute.

    python benchmarks/soak.py --octavo PYTHON [--model smollm2] [--minutes 60] [--json FILE]

Starts `octavo serve`, and `--users` send a seeded mix: 60 % short chats, 15 % long prompts with shared prefixes, 10 %
structured output with a new schema each, 5 % `n=4`, 5 % aborted at a random moment, 5 % invalid with a known status.
The engine's process is killed at one third and at two thirds of the time. Every minute the users pause. Then greedy
answers to fixed prompts must be the same as at the start, no block of the KV cache may be in use, and the numbers of
open files, threads and children must be those of the first check; resident memory is recorded. Every engine first fills
its caches, of keys and values and of schemas, so that filling them is not taken for a leak.

Exit code 1 if a limit of `soak_record` is broken: an answer with a wrong status or form, memory of either process that
grows by more than 0.5 MiB a minute over the last two thirds (and by 1 MiB in all), an engine that does not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from report import commit, machine, table
from soak_record import Look, Record

from octavo.quality.measured_servers import ServerProcess, free_port

CHAT = "/v1/chat/completions"
RECOVERY_S = 60.0
WARMUP_SCHEMAS = 160  # more than the engine keeps compiled: what grows after these is not that cache
SETTLE_S = 10.0  # after a recovery: what the crash has done to requests has been counted by then
REST_S = 15.0
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
GOLDEN = [
    "Name three colours.",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from one to ten.",
    "Why is the sky blue?",
    "List the days of the week.",
]
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
    """An answer differs from the required one."""


class Mix:
    """The requests of one user, the same for the same seed."""

    def __init__(self, client: httpx.AsyncClient, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)
        beginnings = random.Random(0)
        self._beginnings = [" ".join(beginnings.choices(WORDS, k=400)) for _ in range(4)]
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "short": (60, self._short),
            "long": (15, self.long),
            "structured": (10, self.structured),
            "n=4": (5, self.several),
            "aborted": (5, self._aborted),
            "invalid": (5, self._invalid),
        }

    def draw(self) -> tuple[str, Callable[[], Awaitable[None]]]:
        """The next kind of request, and a function that sends one. It raises WrongAnswerError or httpx.HTTPError."""
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
        """A request with a new schema."""
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


class Soak:
    """One run."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._seconds = options.minutes * 60
        self.record = Record(self._seconds)
        # No connection outlives its request, so that files at rest are the server's own.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)
        self._open = asyncio.Event()
        self._num_busy = 0
        self._is_crashed = False
        self._golden: list[str] = []
        self._began = 0.0

    async def run(self) -> Record:
        """The whole soak."""
        self._golden = await self._golden_answers()
        await self._warm_up()
        self._began = time.monotonic()
        users = [asyncio.create_task(self._user(self._options.seed + number)) for number in range(self._options.users)]
        crashes = [self._seconds / 3, self._seconds * 2 / 3]
        check_at = self._options.check_every
        self._open.set()
        try:
            while self._now < self._seconds:
                await asyncio.sleep(0.5)
                if crashes and self._now >= crashes[0]:
                    crashes.pop(0)
                    await self._crash()
                if self._now >= check_at:
                    await self._check()
                    check_at = self._now + self._options.check_every
            await self._check()
        finally:
            for user in users:
                user.cancel()
            await asyncio.gather(*users, return_exceptions=True)
            await self._client.aclose()
        return self.record

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _warm_up(self) -> None:
        """Fills the bounded caches of an engine, so that its memory is level from then on.

        It completes answers, because a cached grammar grows by half once an answer has used it.
        """
        mixes = [Mix(self._client, -1 - number - 100 * len(self.record.recoveries_s)) for number in range(8)]

        async def fill(mix: Mix) -> None:
            for _ in range(WARMUP_SCHEMAS // len(mixes)):
                await mix.structured()
            for _ in range(4):
                await mix.several()
                await mix.long()

        # All of them to their end: what still ran after an error of one would be in the first looks.
        for error in await asyncio.gather(*map(fill, mixes), return_exceptions=True):
            if isinstance(error, (WrongAnswerError, httpx.HTTPError)):
                self.record.broken.append(f"warm-up: {type(error).__name__}: {error}"[:300])
            elif error is not None:
                raise error

    async def _user(self, seed: int) -> None:
        mix = Mix(self._client, seed)
        while True:
            await self._open.wait()
            self._num_busy += 1
            kind, send = mix.draw()
            saw_crash = self._is_crashed
            try:
                await send()
                outcome = "ok"
            except (WrongAnswerError, httpx.HTTPError, ValueError, KeyError) as error:
                # What a crash does to requests is an error of status 500 or 503, or an error event; never silence.
                is_excused = (saw_crash or self._is_crashed) and isinstance(error, WrongAnswerError)
                outcome = "failed in a crash" if is_excused else "wrong"
                if not is_excused:
                    self.record.broken.append(f"{self._now:.0f} s, {kind}: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.2)
            finally:
                self._num_busy -= 1
            self.record.answers[kind, outcome] += 1

    async def _crash(self) -> None:
        """Kills the engine and waits until a new one serves."""
        self._is_crashed = True
        died = self._engine()
        began = time.monotonic()
        died.kill()
        while time.monotonic() - began < RECOVERY_S:
            await asyncio.sleep(0.1)
            engines = self._engines()
            if engines and engines[0].pid != died.pid and (await self._client.get("/health")).status_code == 200:
                self.record.recoveries_s.append(time.monotonic() - began)
                break
        else:
            self.record.broken.append(f"the engine did not come back within {RECOVERY_S:g} s")
        await asyncio.sleep(SETTLE_S)
        self._is_crashed = False
        await self._warm_up()

    async def _check(self) -> None:
        """Checks everything that must hold while no request runs."""
        self._open.clear()
        end = time.monotonic() + 120
        while self._num_busy and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if self._num_busy:
            self.record.broken.append(f"{self._now:.0f} s: {self._num_busy} requests do not end")
        await self._check_blocks()
        if (answers := await self._golden_answers()) != self._golden:
            changed = [new for new, old in zip(answers, self._golden, strict=True) if new != old]
            self.record.broken.append(f"{self._now:.0f} s: greedy answers changed: {changed}"[:300])
        await self._check_blocks()
        await asyncio.sleep(0.5)
        for process, name in ((psutil.Process(self._server.process_id), "server"), (self._engine(), "engine")):
            self.record.looks.append(_look(process, name, self._now))
        self.record.num_checks += 1
        self._report()
        self._open.set()

    async def _check_blocks(self) -> None:
        """Waits for the status, which follows within a second."""
        end = time.monotonic() + REST_S
        while True:
            model = (await self._client.get("/dashboard/data")).json()["models"][0]
            busy = {name: model[name] for name in ("num_used_blocks", "num_running", "num_waiting")}
            if not any(busy.values()):
                return
            if time.monotonic() > end:
                self.record.broken.append(f"{self._now:.0f} s, at rest: {busy}")
                return
            await asyncio.sleep(0.2)

    async def _golden_answers(self) -> list[str]:
        texts = []
        for prompt in GOLDEN:
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 16, "temperature": 0}
            answer = await self._client.post(CHAT, json=body)
            texts.append(str(answer.json()["choices"][0]["message"]["content"]) if answer.is_success else answer.text)
        return texts

    def _engines(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self._server.process_id).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if any("octavo.core" in word for word in process.cmdline()):
                    found.append(process)
        return found

    def _engine(self) -> psutil.Process:
        return self._engines()[0]

    def _report(self) -> None:
        server, engine = self.record.looks[-2:]
        print(
            f"{self._now / 60:5.1f} min  {sum(self.record.answers.values()):6d} requests  "
            f"server {server.resident_mib:.1f} MiB  engine {engine.resident_mib:.1f} MiB  "
            f"{len(self.record.broken)} broken",
            file=sys.stderr,
            flush=True,
        )


def _look(process: psutil.Process, name: str, seconds: float) -> Look:
    with process.oneshot():
        return Look(
            seconds=seconds,
            process=name,
            pid=process.pid,
            age_s=time.time() - process.create_time(),
            resident_mib=process.memory_info().rss / 2**20,
            num_files=process.num_fds(),
            num_threads=process.num_threads(),
            num_children=len(process.children(recursive=True)),
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--octavo", default=sys.executable, metavar="PYTHON", help="a Python with octavo")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--check-every", type=float, default=60, metavar="S")
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    log = Path(tempfile.mkdtemp(prefix="octavo-soak-")) / "server.log"
    port = free_port()
    command = [options.octavo, "-m", "octavo", "serve", options.model, "--port", str(port)]
    # A small cache is full before the memory is compared, and makes evictions part of the mix.
    server = ServerProcess("octavo", [*command, "--kv-cache-memory", "64MiB"], port, log)
    print(f"seed {options.seed}; the server's log is {log}", file=sys.stderr)
    try:
        server.wait_ready()
        record = asyncio.run(Soak(server, options).run())
        below = psutil.Process(server.process_id).children(recursive=True)
    finally:
        code = server.close()
    if code:
        record.broken.append(f"the server's exit code is {code}")
    if orphans := [process.pid for process in below if process.is_running()]:
        record.broken.append(f"processes are left behind: {orphans}")
    record.broken += [
        f"log: {line}" for line in log.read_text().splitlines() if "Traceback" in line or "leaked" in line
    ]
    return report(record, options)


def report(record: Record, options: argparse.Namespace) -> int:
    summary = {"commit": commit(), "machine": machine(), "seed": options.seed, **record.summary()}
    columns = ("seconds", "process", "pid", "resident_mib", "num_files", "num_threads", "num_children")
    rows = [{name: getattr(look, name) for name in columns} for look in record.looks]
    print(json.dumps(summary, indent=2))
    print(table({name: name for name in columns}, rows))
    if options.json:
        options.json.write_text(json.dumps({**summary, "looks": rows}, indent=2) + "\n")
    return int(bool(summary["broken"]))


if __name__ == "__main__":
    sys.exit(main())
