"""Measure the bars of batches: speed of the command and of a server's batch, a concurrent stream, and memory.

    python benchmarks/batches.py [--model smollm2] [--lines 200] [--tokens 64] [--memory-lines 50000] [--only PART]

- command: tokens/s of what `octavo batch` runs (its engine, runner and journal) relative to `LLM.generate` on the
  same prompts; bar 0.97.
- server: tokens/s of a server's batch relative to 16 live clients; bar 0.95.
- stream: the time between tokens of a stream with a batch relative to the stream alone, at most 1.25, and the tokens/s
  of that batch relative to the stream alone, at least 2.2.
- memory: the growth of the server's process while it runs a batch of --memory-lines lines of one token each, at most
  50 MB above idle. --memory-seconds ends it early.

The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import repository  # noqa: F401
from report import bar, bar_table, commit, machine

from octavo import LLM, SamplingParams
from octavo.batches.journal import Journal
from octavo.batches.lines import read_lines
from octavo.batches.runner import BatchRunner
from octavo.config import EngineConfig
from octavo.quality.measured_servers import ServerProcess, free_port
from octavo.server.line_engine import line_engine
from octavo.server.models.model_loader import NoReport

CLIENTS = 16
PARTS = ("command", "server", "stream", "memory")
SUBJECTS = ("the sea", "old clocks", "bread", "a long winter", "maps", "a small dog", "glass", "rivers in spring")


def bodies(count: int, num_tokens: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i}. A text about {SUBJECTS[i % len(SUBJECTS)]}:", "max_tokens": num_tokens, "temperature": 0}
        | ({"ignore_eos": True} if num_tokens > 1 else {})
        for i in range(count)
    ]


def as_lines(found: list[dict[str, Any]]) -> bytes:
    lines = (
        {"custom_id": f"n{i}", "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(found)
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


# --- the command ---


def tokens_per_s_of_generate(model: str, found: list[dict[str, Any]]) -> float:
    with LLM(model) as llm:
        params = SamplingParams(temperature=0, max_tokens=found[0]["max_tokens"], ignore_eos=True)
        llm.generate(found[0]["prompt"], params, use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate([body["prompt"] for body in found], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - began)


async def tokens_per_s_of_command(model: str, folder: Path, found: list[dict[str, Any]]) -> float:
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(as_lines(found))
    output.unlink(missing_ok=True)
    async with line_engine(model, EngineConfig.resolve(model, {}), NoReport()) as (call, width):
        with Journal(output, None) as journal, source.open("rb") as file:
            began = time.perf_counter()
            await BatchRunner(call, width, journal.put).run(read_lines(file))
            return journal.usage["output_tokens"] / (time.perf_counter() - began)


def measure_command(model: str, folder: Path, found: list[dict[str, Any]], turns: int) -> list[dict[str, Any]]:
    ratios = []
    for turn in range(turns):
        order = [
            lambda: tokens_per_s_of_generate(model, found),
            lambda: asyncio.run(tokens_per_s_of_command(model, folder, found)),
        ]
        speeds = [measure() for measure in (order if turn % 2 else order[::-1])]
        generate, command = speeds if turn % 2 else speeds[::-1]
        ratios.append(command / generate)
    return [bar("the command / LLM.generate", statistics.median(ratios), at_least=0.97)]


# --- the server ---


class Server:
    """A separate server, and what clients do with it."""

    def __init__(self, model: str, folder: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "octavo", "serve", model, "--port", str(port)]
        command += ["--batch-store", str(folder / f"store-{port}")]
        self.process = ServerProcess("octavo", command, port, folder / "server.log")
        self.process.wait_ready()
        self.http = httpx.Client(base_url=self.process.url, timeout=None)

    def close(self) -> None:
        self.http.close()
        self.process.close()

    def begin(self, found: list[dict[str, Any]]) -> str:
        """Upload the lines, start a batch of them, and return its id."""
        data = {"purpose": "batch"}
        file = self.http.post("/v1/files", files={"file": ("in.jsonl", as_lines(found))}, data=data).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(self.http.post("/v1/batches", json=body).json()["id"])

    def status(self, batch: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/batches/{batch}").json()
        return found

    def finish(self, batch: str) -> float:
        """Wait for the end of a batch, and return the number of output tokens."""
        while (found := self.status(batch))["status"] not in ("completed", "failed", "cancelled", "expired"):
            time.sleep(0.05)
        assert found["status"] == "completed", found
        return float(found["usage"]["output_tokens"])

    def cancel(self, batch: str) -> None:
        self.http.post(f"/v1/batches/{batch}/cancel")
        while self.status(batch)["status"] in ("in_progress", "cancelling", "validating"):
            time.sleep(0.05)

    def answer(self, body: dict[str, Any]) -> int:
        return int(self.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"])

    def gaps(self, body: dict[str, Any]) -> list[float]:
        """Return the times between the pieces of a stream, in seconds."""
        with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
        return [later - sooner for sooner, later in itertools.pairwise(times)]

    def resident_bytes(self) -> int:
        """Return the resident memory of the server's process, not including the engine's."""
        text = Path(f"/proc/{self.process.process_id}/status").read_text()
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS:"))) * 1024


def measure_server(server: Server, found: list[dict[str, Any]], turns: int) -> list[dict[str, Any]]:
    ratios = []
    for turn in range(turns):
        speeds = {}
        for name in ("live", "batch") if turn % 2 else ("batch", "live"):
            began = time.perf_counter()
            if name == "live":
                with ThreadPoolExecutor(CLIENTS) as pool:
                    tokens: float = sum(pool.map(server.answer, found))
            else:
                tokens = server.finish(server.begin(found))
            speeds[name] = tokens / (time.perf_counter() - began)
        ratios.append(speeds["batch"] / speeds["live"])
    return [bar(f"a batch / {CLIENTS} live clients", statistics.median(ratios), at_least=0.95)]


def measure_stream(server: Server, found: list[dict[str, Any]], num_tokens: int, turns: int) -> list[dict[str, Any]]:
    slowdowns, speeds = [], []
    body = {**bodies(1, num_tokens)[0], "prompt": "A story of the sea:"}
    for _ in range(turns):
        alone = server.gaps(body)
        batch = server.begin(found)
        while server.status(batch)["request_counts"]["completed"] < 1:
            time.sleep(0.02)
        before, began = server.status(batch).get("usage") or {}, time.perf_counter()
        beside = server.gaps(body)
        seconds = time.perf_counter() - began
        after = server.status(batch)
        server.cancel(batch)
        made = (after.get("usage") or {}).get("output_tokens", 0) - before.get("output_tokens", 0)
        slowdowns.append(statistics.median(beside) / statistics.median(alone))
        speeds.append(made / seconds * statistics.median(alone))
    return [
        bar("a stream's time between tokens beside a batch / alone", statistics.median(slowdowns), at_most=1.25),
        bar("tokens/s of that batch / of the lone stream", statistics.median(speeds), at_least=2.2),
    ]


def measure_memory(server: Server, num_lines: int, seconds: float) -> list[dict[str, Any]]:
    server.finish(server.begin(bodies(64, 1)))  # after it the server's memory does not grow any more
    idle, most, is_over = server.resident_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.05):
            most = max(most, server.resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        batch, until = server.begin(bodies(num_lines, 1)), time.monotonic() + seconds
        while server.status(batch)["status"] in ("validating", "in_progress", "finalizing"):
            if time.monotonic() > until:
                server.cancel(batch)
                break
            time.sleep(0.2)
        counts = server.status(batch)["request_counts"]
    finally:
        is_over.set()
        watcher.join()
    name = f"MB above idle, {counts['completed']:,} of {num_lines:,} lines answered"
    return [bar(name, (most - idle) / 1e6, at_most=50.0)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--memory-lines", type=int, default=50_000)
    parser.add_argument("--memory-seconds", type=float, default=3600.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", action="append", choices=PARTS, help="only this part; may be given several times")
    given = parser.parse_args()
    parts, rows = given.only or PARTS, []
    found = bodies(given.lines, given.tokens)
    with tempfile.TemporaryDirectory(prefix="octavo-batches-") as name:
        folder = Path(name)
        if "command" in parts:
            rows += measure_command(given.model, folder, found, given.turns)
        if set(parts) - {"command"}:
            server = Server(given.model, folder)
            try:
                if "server" in parts:
                    rows += measure_server(server, found, given.turns)
                if "stream" in parts:
                    rows += measure_stream(server, found * 4, given.tokens * 4, given.turns)
                if "memory" in parts:
                    rows += measure_memory(server, given.memory_lines, given.memory_seconds)
            finally:
                server.close()
    print(f"{machine()}, commit {commit()}, {given.model}, {given.lines} lines of {given.tokens} tokens")
    print(bar_table(rows))
    return int(any(row["met"] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
