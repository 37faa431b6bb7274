"""The longest wait of a stream for its next text while another client sends large JSON schemas.

    python benchmarks/stalls.py --octavo PYTHON [--model smollm2] [--properties 2000] [--requests 1] [--runs 5]

One client reads a long stream, greedy, without an end. Half a second after its first text, the other client sends
`--requests` requests at once, each with a new schema of one object with this many optional properties, so that nothing
is cached. A turn without them is the baseline. The figures are the longest gaps between two pieces of the stream, in
milliseconds: median, smallest and largest of the turns. The requests have to be answered with 200, or the run fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from load_client import Answer, stream
from report import commit, machine, spread, table

from octavo.quality.measured_servers import ServerProcess, free_port

LIMIT_MS = 250.0
STREAM_TOKENS = 1500


def large_schema(number: int, num_properties: int) -> dict[str, Any]:
    """Return a schema that no request with another number has."""
    properties = {f"property_{number}_{i}": {"type": "string"} for i in range(num_properties)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def body(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **usage, **fields}


def send_schemas(url: str, num_properties: int, first: int, num_requests: int) -> list[Answer]:
    """Send requests at once and return their answers. Runs in a separate process, so that it delays nothing here."""

    async def send() -> list[Answer]:
        bodies = [
            body("The properties as JSON:", 60, json_schema=large_schema(first + i, num_properties))
            for i in range(num_requests)
        ]
        return await asyncio.gather(*(stream(url, "/v1/completions", item) for item in bodies))

    return asyncio.run(send())


async def longest_gap_ms(url: str, pool: Executor, num_properties: int, first: int, num_requests: int) -> float:
    """Run one turn and return the longest gap. Raises SystemExit if a request fails.

    first: number of its first schema.
    """
    listening = asyncio.create_task(
        stream(url, "/v1/completions", body("Once upon a time", STREAM_TOKENS, ignore_eos=True))
    )
    await asyncio.sleep(0.5)
    loop = asyncio.get_running_loop()
    schemas = loop.run_in_executor(pool, send_schemas, url, num_properties, first, num_requests)
    own, others = await asyncio.gather(listening, schemas)
    if failed := [answer.error for answer in [own, *others] if answer.error is not None]:
        raise SystemExit(f"a request failed: {failed[0]}")
    if own.times[-1] < max((answer.times[-1] for answer in others), default=0.0):
        raise SystemExit("the stream ended before the schemas' answers; its gaps cover only a part of them")
    return 1000 * max(after - before for before, after in pairwise(own.times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--octavo", metavar="PYTHON", default=sys.executable, help="a Python with octavo")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--properties", type=int, default=2000, metavar="N", help="optional properties of the object")
    parser.add_argument("--requests", type=int, default=1, metavar="N", help="requests with a schema at once")
    parser.add_argument("--runs", type=int, default=5, help="turns")
    options = parser.parse_args()
    port = free_port()
    command = [options.octavo, "-m", "octavo", "serve", options.model, "--port", str(port)]
    server = ServerProcess("octavo", command, port, Path(tempfile.gettempdir()) / "octavo-stalls-benchmark.log")
    try:
        server.wait_ready()
        rows: dict[int, list[float]] = {0: [], options.requests: []}
        firsts = count(0, options.requests)
        with ProcessPoolExecutor(1) as pool:
            for _ in range(options.runs):
                for number, gaps in rows.items():
                    gaps.append(asyncio.run(longest_gap_ms(server.url, pool, options.properties, next(firsts), number)))
    finally:
        server.close()
    print(f"{machine()}, commit {commit()}, {options.properties} optional properties, limit {LIMIT_MS:g} ms")
    columns = {"schemas at once": "requests", "median": "median", "smallest": "min", "largest": "max"}
    print(table(columns, [{"requests": number, **spread(gaps)} for number, gaps in rows.items()]))
    return int(max(rows[options.requests]) > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
