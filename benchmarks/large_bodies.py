"""The longest wait of others while four clients send the same large body at once, for every kind of body.

    python benchmarks/large_bodies.py [--octavo PYTHON] [--model smollm2] [--megabytes 8] [--clients 4] [--kind KIND]

A process of its own reads one stream after the other and asks `/health/live` all the time. The figures of each kind are
the longest gap between two pieces of the stream and the slowest answer about health, in milliseconds, and the growth of
the peak memory of the server's process beyond 24 MiB as a multiple of the bytes sent. The limits: 150 ms above the
longest gap without any body, 100 ms, and 8. The exit code is 1 if a figure is beyond its limit, or if an answer is an
error of the server.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import repository  # noqa: F401
from report import commit, machine, table

from octavo.quality.measured_servers import ServerProcess, free_port
from tests.support.large_bodies import hostile_bodies, stream_watch

MAX_ADDED_GAP_S = 0.15
MAX_HEALTH_S = 0.1
MAX_GROWTH = 8.0
SMALL_BYTES = 24 << 20  # what small bodies take, and what the allocator keeps
ANSWERS = {200, 400, 413}
QUIET_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--octavo", metavar="PYTHON", default=sys.executable, help="a Python with octavo")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--megabytes", type=float, default=8.0, metavar="N", help="size of a body")
    parser.add_argument("--clients", type=int, default=4, metavar="N", help="clients at once")
    parser.add_argument("--kind", action="append", help="only this kind; may be given several times")
    options = parser.parse_args()
    port = free_port()
    command = [options.octavo, "-m", "octavo", "serve", options.model, "--port", str(port)]
    server = ServerProcess("octavo", command, port, Path(tempfile.gettempdir()) / "octavo-large-bodies.log")
    rows: list[dict[str, object]] = []
    failed = 0
    try:
        server.wait_ready()
        with stream_watch(server.url, server.process_id) as watch:
            quiet = watch.measure(lambda: time.sleep(QUIET_S))
            limit = quiet.gap + MAX_ADDED_GAP_S
            for kind, (path, body) in hostile_bodies(int(options.megabytes * 1e6)).items():
                if options.kind and kind not in options.kind:
                    continue
                began = time.monotonic()
                found = watch.send(path, body, options.clients)
                growth = max(found.growth - SMALL_BYTES, 0) / (options.clients * len(body))
                is_bad = found.gap > limit or found.health > MAX_HEALTH_S or growth > MAX_GROWTH
                is_bad |= not ANSWERS.issuperset(found.statuses)
                failed += is_bad
                rows.append(
                    {
                        "kind": kind + (" *" if is_bad else ""),
                        "MB": f"{len(body) / 1e6:.1f}",
                        "status": "/".join(map(str, sorted(set(found.statuses)))),
                        "s": f"{time.monotonic() - began:.1f}",
                        "gap": f"{1000 * found.gap:.0f}",
                        "health": f"{1000 * found.health:.0f}",
                        "growth": f"{growth:.1f}",
                    }
                )
                print(" ".join(f"{value:>8}" for value in list(rows[-1].values())[1:]), rows[-1]["kind"], flush=True)
    finally:
        server.close()
    print(f"{machine()}, commit {commit()}, {options.clients} clients; without: {1000 * quiet.gap:.0f} ms")
    columns = {name: name for name in rows[0]}
    print(table(columns, rows))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
