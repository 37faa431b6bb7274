"""The speed of OpenAI-compatible servers under the load of several users, on the same machine in turns.

One request after another, with their answers, is `octavo compare --engine`. Here requests overlap, and what counts is
what they do to each other: queues, gaps in streams, goodput.

    python benchmarks/serve.py MODEL.gguf --octavo PYTHON --llama LLAMA_SERVER --users 8 32
    python benchmarks/serve.py MODEL.gguf --octavo PYTHON --llama LLAMA_SERVER --rate 0.5
    python benchmarks/serve.py MODEL.gguf --octavo PYTHON --overhead --users 16
    python benchmarks/serve.py MODEL --server NAME=http://127.0.0.1:8000      (a running server)

All servers get the same requests: random token ids through `/v1/completions`, greedy, with end of text ignored, so that
lengths are exact; the reported usage is checked against them. No two prompts of a run are alike, so no prefix cache
helps. Servers take turns (A B A B ...); figures are medians over the turns, with the smallest and largest.

- closed loop (`--users`): this many concurrent users, who each send the next request when the last is answered. Only
  the time in which all of them are busy counts: from the first answer until a user has no request left;
- open loop (`--rate`): a Poisson process; latencies count from the scheduled time of a request, however late the client
  was. If the queue grew over the run, the report says so and gives no mean;
- TTFT: time to the first text; TPOT: time from first to last text divided by the tokens after the first; ITL: time
  between two pieces of the stream; goodput: requests that meet `--ttft-limit`, and `--itl-limit` in 99 % of gaps;
- `--overhead`: output tokens per second of one wave of users through the server, divided by those of
  `octavo bench throughput` with the same number of prompts of the same lengths, turn by turn.

llama.cpp's server comes as source with llama-cpp-python (`pip download --no-deps --no-binary llama-cpp-python
llama-cpp-python==0.3.36`, unpacked, in `vendor/llama.cpp`):

    cmake -S . -B BUILD -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER=clang-19 \
        -DCMAKE_CXX_COMPILER=clang++-19 -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF
    ninja -C BUILD llama-server
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from load import Limits, Run, Sample, Work, arrivals, closed_loop, figures, open_loop, works
from load_client import stream
from report import commit, machine, spread, table

from octavo.quality.measured_servers import ServerError, ServerProcess, free_port

PAUSE_SECONDS = 0.5  # the spinning threads of the server whose turn is over go to sleep
WARMUP_SEED = 1_000_000
_SPREAD = ("output_tokens_per_s", "requests_per_s", "goodput_share")
_LATENCIES = ("ttft", "tpot", "itl")


@dataclass
class Server:
    """A measured server.

    process: None if it was already running.
    """

    name: str
    url: str
    process: ServerProcess | None
    turns: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, item: Work, intended: float) -> Sample:
        """Send one request. An answer of the wrong length is an error, because it would not be comparable."""
        body = {
            "prompt": item.prompt,
            "max_tokens": item.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await stream(self.url, "/v1/completions", body)
        sample = Sample(intended, answer.times, len(item.prompt), item.output_len, answer.error, answer.sent)
        counts = tuple(answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        if sample.error is None and counts != (len(item.prompt), item.output_len):
            sample.error = f"usage is {counts}, not {(len(item.prompt), item.output_len)}"
        return sample

    def close(self) -> None:
        """Stop the server if this program started it."""
        if self.process is not None:
            self.process.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--octavo", metavar="PYTHON", help="a Python with octavo, to start its server")
    parser.add_argument("--llama", metavar="PROGRAM", help="llama.cpp's llama-server, to be started")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL", help="a running server")
    parser.add_argument("--users", type=int, nargs="+", default=[], metavar="N", help="users of a closed loop")
    parser.add_argument("--rate", type=float, nargs="+", default=[], metavar="R", help="open loop, requests a second")
    parser.add_argument("--overhead", action="store_true", help="compare with `octavo bench throughput` instead")
    parser.add_argument("--requests", type=int, default=5, help="requests per user; an open loop counts as 16 users")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vary", type=float, default=0.5, help="lengths are uniform within this share around these")
    parser.add_argument("--runs", type=int, default=3, help="turns of each server")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft-limit", type=float, default=2.0, metavar="S", help="limit for the goodput")
    parser.add_argument("--itl-limit", type=float, default=0.2, metavar="S", help="limit for the goodput")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    if not options.users and not options.rate:
        options.users = [16] if options.overhead else [8, 32]
    if not (options.octavo or options.llama or options.server):
        parser.error("nothing to measure: give --octavo, --llama or --server")
    if options.users and min(options.users) < 2:
        parser.error("--users must be at least 2; `octavo compare --engine` measures one user")
    if options.overhead and not options.octavo:
        parser.error("--overhead needs --octavo")
    return options


def octavo_command(options: argparse.Namespace, port: int) -> list[str]:
    engine = ["--num-threads", str(options.threads)]
    return [options.octavo, "-m", "octavo", "serve", options.model, "--port", str(port), "--max-queue", "1024", *engine]


def llama_command(options: argparse.Namespace, port: int, users: int) -> list[str]:
    """Return a command with one slot per user and no cache of old prompts, which cannot help here and costs copies."""
    longest = int((options.input_len + options.output_len) * (1 + options.vary)) + 64
    command = [options.llama, "-m", options.model, "--host", "127.0.0.1", "--port", str(port), "--cache-ram", "0"]
    threads = ["-t", str(options.threads), "-tb", str(options.threads)]
    return [*command, *threads, "-np", str(users), "-c", str(users * (-longest // 256 * -256))]


def start_all(options: argparse.Namespace, users: int) -> list[Server]:
    """Start every server and wait until it is ready; print a line for each that fails."""
    log = Path(tempfile.gettempdir()) / "octavo-serve-benchmark.log"
    commands: dict[str, Callable[[int], list[str]]] = {}
    if options.octavo:
        commands["octavo"] = lambda port: octavo_command(options, port)
    if options.llama and not options.overhead:
        commands["llama.cpp"] = lambda port: llama_command(options, port, users)
    servers = [Server(*pair.split("=", 1), None) for pair in options.server]
    for name, command in commands.items():
        port = free_port()
        try:
            process = ServerProcess(name, command(port), port, log)
        except OSError as error:
            print(f"{name} skipped: {error}", file=sys.stderr)
            continue
        servers.append(Server(name, process.url, process))
    for server in list(servers):
        try:
            if server.process is not None:
                server.process.wait_ready()
        except ServerError as error:  # noqa: PERF203
            print(f"{server.name} skipped: {error}", file=sys.stderr)
            server.close()
            servers.remove(server)
    return servers


@dataclass(frozen=True)
class Load:
    """A closed loop of `users`, or an open loop at `rate`."""

    users: int
    rate: float | None
    options: argparse.Namespace

    @property
    def title(self) -> str:
        return f"{self.users} users" if self.rate is None else f"{self.rate:g} requests/s"

    async def run(self, server: Server, seed: int) -> Run:
        """Run one load; the same seed gives the same requests at the same times."""
        options = self.options
        items = works(
            options.requests * self.users, options.input_len, options.output_len, self.vary, seed + options.seed
        )
        if self.rate is None:
            run = await closed_loop(server.send, items, self.users)
            # The engine alone is measured over a whole run.
            return replace(run, busy=None) if options.overhead else run
        return await open_loop(server.send, items, arrivals(self.rate, len(items), seed + options.seed))

    @property
    def vary(self) -> float:
        return 0.0 if self.options.overhead else float(self.options.vary)


def turn(server: Server, load: Load, limits: Limits, seed: int) -> dict[str, Any]:
    """Measure a ready server, and the share of one core that the client used."""
    time.sleep(PAUSE_SECONDS)
    processor = time.process_time()
    run = asyncio.run(load.run(server, seed))
    result = figures(run, limits) | {"client_share": (time.process_time() - processor) / run.seconds}
    for error in {sample.error for sample in run.samples if sample.error}:
        print(f"{server.name}, {load.title}: {error}", file=sys.stderr)
    return result


def warm_up(server: Server, options: argparse.Namespace, users: int) -> None:
    """Warm up the server with short requests, as many at once as in the measurement."""
    items = works(users, min(options.input_len, 16), 4, 0.0, WARMUP_SEED)
    errors = {sample.error for sample in asyncio.run(closed_loop(server.send, items, users)).samples} - {None}
    if errors:
        raise ServerError(f"{server.name} does not answer: {errors.pop()}")


def measure(load: Load, limits: Limits) -> list[Server]:
    """Run all turns of one load."""
    options = load.options
    servers = start_all(options, load.users)
    try:
        for server in servers:
            warm_up(server, options, load.users)
        for seed in range(options.runs):
            for server in servers:
                if options.overhead and server.name == "octavo":
                    engine = bench_throughput(options, load.users)
                server.turns.append(turn(server, load, limits, seed))
                if options.overhead and server.name == "octavo":
                    server.turns[-1]["engine_tokens_per_s"] = engine
    finally:
        for server in servers:
            server.close()
    return servers


def bench_throughput(options: argparse.Namespace, users: int) -> float:
    """Return output tokens per second without a server, in a separate process."""
    lengths = ["--input-len", str(options.input_len), "--output-len", str(options.output_len)]
    load = ["--num-prompts", str(users * options.requests), "--max-num-seqs", str(users), "--iterations", "1", "--json"]
    command = [options.octavo, "-m", "octavo", "bench", "throughput", options.model, *lengths, *load]
    command += ["--num-threads", str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    figure: float = json.loads(done.stdout)["output_tokens_per_s"]["median"]
    return figure


def row(server: Server, load: Load, ours: Server | None) -> dict[str, Any]:
    """Summarize one server under one load by medians over its turns; ratios are medians of the turns' ratios."""
    turns = server.turns
    line: dict[str, Any] = {"load": load.title, "server": server.name, "turns": turns}
    line |= {name: spread([turn[name] for turn in turns]) for name in _SPREAD}
    for name in _LATENCIES:
        line[name] = {
            at: spread([turn[name][at] for turn in turns if turn[name]]) for at in ("p50", "p90", "p99") if turns
        }
    means = [turn["ttft_mean"] for turn in turns]
    line["ttft_mean"] = None if None in means else statistics.median(means)
    line["no_mean_because"] = next((turn["no_mean_because"] for turn in turns if turn["no_mean_because"]), None)
    if ours is not None and ours is not server:
        pairs = list(zip(ours.turns, turns, strict=True))
        line["tokens_ratio"] = spread([a["output_tokens_per_s"] / b["output_tokens_per_s"] for a, b in pairs])
        line["ttft_ratio"] = spread([a["ttft"]["p50"] / b["ttft"]["p50"] for a, b in pairs])
    if "engine_tokens_per_s" in turns[0]:
        line["engine_tokens_per_s"] = spread([turn["engine_tokens_per_s"] for turn in turns])
        line["share_of_engine"] = spread([turn["output_tokens_per_s"] / turn["engine_tokens_per_s"] for turn in turns])
    return line


def shown(line: dict[str, Any]) -> dict[str, Any]:
    """Format the line as text."""

    def cell(value: dict[str, float] | None, digits: int, scale: float = 1) -> str:
        if value is None:
            return ""
        median, low, high = (value[name] * scale for name in ("median", "min", "max"))
        return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    cells = {"load": line["load"], "server": line["server"], "tokens/s": cell(line["output_tokens_per_s"], 1)}
    cells |= {"requests/s": cell(line["requests_per_s"], 2), "TTFT p50, s": cell(line["ttft"]["p50"], 3)}
    cells |= {"p99": cell(line["ttft"]["p99"], 3)}
    if line["ttft_mean"] is not None:
        cells["mean"] = f"{line['ttft_mean']:.3f}"
    cells |= {"TPOT p50, ms": cell(line["tpot"]["p50"], 1, 1e3), "ITL p50, ms": cell(line["itl"]["p50"], 1, 1e3)}
    cells |= {"ITL p99, ms": cell(line["itl"]["p99"], 1, 1e3), "goodput": cell(line["goodput_share"], 2)}
    cells |= {"octavo / it, tokens/s": cell(line.get("tokens_ratio"), 2)}
    cells |= {"octavo / it, TTFT": cell(line.get("ttft_ratio"), 2)}
    if "share_of_engine" in line:
        cells |= {"engine alone": cell(line["engine_tokens_per_s"], 1), "share": cell(line["share_of_engine"], 3)}
    return cells


def main() -> int:
    options = arguments()
    limits = Limits(options.ttft_limit, options.itl_limit)
    header = {"commit": commit(), "machine": machine(), "model": Path(options.model).name}
    header |= {
        name: getattr(options, name)
        for name in (
            "requests",
            "input_len",
            "output_len",
            "vary",
            "runs",
            "threads",
            "seed",
            "ttft_limit",
            "itl_limit",
        )
    }
    loads = [Load(users, None, options) for users in options.users] + [Load(16, rate, options) for rate in options.rate]
    lines: list[dict[str, Any]] = []
    began = time.monotonic()
    for load in loads:
        servers = measure(load, limits)
        ours = next((server for server in servers if server.name == "octavo"), None)
        lines += [row(server, load, ours) for server in servers]
        print(f"{load.title}: done after {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(json.dumps(header))
    people = [shown(line) for line in lines]
    print(table({key: key for cells in people for key in cells}, people))
    for line in lines:
        if line["no_mean_because"]:
            print(f"{line['load']}, {line['server']}: no mean is given: {line['no_mean_because']}")
    if options.json:
        options.json.write_text(json.dumps({**header, "results": lines}, indent=2) + "\n")
    return int(not lines or _has_errors(lines))


def _has_errors(lines: Sequence[dict[str, Any]]) -> bool:
    return any(turn["errors"] for line in lines for turn in line["turns"])


if __name__ == "__main__":
    sys.exit(main())
