"""A soak test: an hour of mixed requests with crashes and reloads, and a check of the idle processes every minute.

    python benchmarks/soak.py --octavo PYTHON [--model smollm2] [--minutes 60] [--adapter] [--images] [--json FILE]

Starts `octavo serve`, and `--users` send a seeded mix: chats, long prompts with shared prefixes, structured output
with a new schema each, tools, embeddings, `n=4`, requests that are aborted at a random moment or cancelled by their
id, invalid ones with a known status; with `--adapter` chats with a random adapter, with `--images` (of a model that
sees) pictures. The engine's process is killed at one third and at two thirds of the time, and the model is reloaded
at half of it. Every minute the users pause. Then greedy answers to fixed prompts must be the same as at the start,
no block of the KV cache may be in use, and the numbers of open files, threads and children must be those of the
first check; resident memory is recorded. Every engine first fills its caches, of keys and values and of schemas, so
that filling them is not taken for a leak.

Exit code 1 if a limit of `soak_record` is broken: an answer with a wrong status or form, or another one than
before; memory of either process that grows by more than 0.1 MiB a minute over the last two thirds (0.5 in runs of
less than an hour; and by 1 MiB in all), before and after the reload apart, or by more than 12 MiB at the reload; a
99th percentile of short chats that is half as long again in the last third as in the first; an engine that does not
come back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
from report import commit, machine, table
from soak_mix import ADAPTER, CHAT, Known, Mix, WrongAnswerError
from soak_record import Look, Record

from octavo.finetune.adapter_folder import tensor_of
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.hub import resolve_model
from octavo.loader.safetensors_writer import write_safetensors
from octavo.quality.measured_servers import ServerProcess, free_port

RECOVERY_S = 60.0
WARMUP_SCHEMAS = 160  # more than the engine keeps compiled: what grows after these is not that cache
SETTLE_S = 10.0  # after a recovery: what the crash has done to requests has been counted by then
REST_S = 15.0
GOLDEN = [
    "Name three colours.",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from one to ten.",
    "Why is the sky blue?",
    "List the days of the week.",
]


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
        self._num_reloads = 0
        self._is_crashed = False
        self._is_disturbed = False  # by a crash or a reload and the warm-up after it
        self._known = Known(options.adapter, options.images)
        self._golden: list[str] = []
        self._began = 0.0

    async def run(self) -> Record:
        """Run the whole soak."""
        self._golden = await self._golden_answers()
        await self._warm_up()
        self._began = time.monotonic()
        users = [asyncio.create_task(self._user(self._options.seed + number)) for number in range(self._options.users)]
        shares = ((1 / 3, self._crash), (1 / 2, self._reload), (2 / 3, self._crash))
        events = [(self._seconds * share, event) for share, event in shares]
        check_at = self._options.check_every
        self._open.set()
        try:
            while self._now < self._seconds:
                await asyncio.sleep(0.5)
                if events and self._now >= events[0][0]:
                    await self._disturb(events.pop(0)[1])
                if self._now >= check_at:
                    await self._check()
                    check_at = self._now + self._options.check_every
            await self._check()
        finally:
            for user in users:
                user.cancel()
            for error in await asyncio.gather(*users, return_exceptions=True):
                if not isinstance(error, asyncio.CancelledError):
                    self.record.broken.append(f"a user stopped: {error!r}"[:300])
            await self._client.aclose()
        return self.record

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _warm_up(self) -> None:
        """Fill the bounded caches of an engine, so that its memory stays level from then on.

        It completes answers, because a cached grammar grows by half once an answer has used it.
        """
        mixes = [
            Mix(self._client, -1 - number - 100 * len(self.record.recoveries_s), self._known) for number in range(8)
        ]

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
        mix = Mix(self._client, seed, self._known)
        while True:
            await self._open.wait()
            self._num_busy += 1
            kind, send = mix.draw()
            saw_crash, is_calm, began = self._is_crashed, not self._is_disturbed, self._now
            try:
                await send()
                outcome = "ok"
                if kind == "short" and is_calm and not self._is_disturbed:
                    self.record.times.append((began, self._now - began))
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

    async def _disturb(self, event: Callable[[], Awaitable[None]]) -> None:
        """Cause a crash or a reload, record its effect on requests, and warm up the new engine."""
        self._is_crashed = self._is_disturbed = True
        await event()
        await asyncio.sleep(SETTLE_S)
        self._is_crashed = False
        await self._warm_up()
        self._is_disturbed = False

    async def _crash(self) -> None:
        """Kill the engine and wait until a new one serves requests."""
        died = self._engine()
        began = time.monotonic()
        died.kill()
        while time.monotonic() - began < RECOVERY_S:
            await asyncio.sleep(0.1)
            engines = self._engines()
            if engines and engines[0].pid != died.pid and (await self._client.get("/health")).status_code == 200:
                self.record.recoveries_s.append(time.monotonic() - began)
                return
        self.record.broken.append(f"the engine did not come back within {RECOVERY_S:g} s")

    async def _reload(self) -> None:
        """Unload the model after its requests and load it again, including adapters."""
        began = time.monotonic()
        self._num_reloads += 1
        for action in ("unload", "load"):
            answer = await self._client.post(f"/v1/models/{self._options.model}/{action}")
            if answer.status_code != 200:
                self.record.broken.append(f"{action}: {answer.status_code} {answer.text}"[:300])
        self.record.recoveries_s.append(time.monotonic() - began)

    async def _check(self) -> None:
        """Check everything that must hold while no request runs."""
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
            self.record.looks.append(replace(_look(process, name, self._now), num_reloads=self._num_reloads))
        self.record.num_checks += 1
        self._report()
        self._open.set()

    async def _check_blocks(self) -> None:
        """Wait for the status, which follows within a second, and check its blocks."""
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
    parser.add_argument("--adapter", action="store_true", help="requests with a random adapter, too")
    parser.add_argument("--images", action="store_true", help="pictures, too; the model must see")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="octavo-soak-"))
    log, port = folder / "server.log", free_port()
    command = [options.octavo, "-m", "octavo", "serve", options.model, "--port", str(port)]
    if options.adapter:
        write_random_adapter(options.model, folder / "adapter")
        command += ["--lora-modules", f"{ADAPTER}={folder / 'adapter'}"]
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


def write_random_adapter(model: str, folder: Path) -> None:
    """Write an adapter of rank 4 for the queries of all layers, in PEFT's format."""
    rng, tensors = np.random.default_rng(0), []
    checkpoint = open_checkpoint(resolve_model(model))
    for name in sorted(name for name in checkpoint.weights if name.endswith("q_proj.weight")):
        (rows, columns), module = checkpoint.weights.info(name).shape, name.removesuffix(".weight")
        for letter, shape in (("A", (4, columns)), ("B", (rows, 4))):
            factor = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
            tensors.append(tensor_of(f"base_model.model.model.{module}.lora_{letter}.weight", factor))
    checkpoint.close()
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


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
