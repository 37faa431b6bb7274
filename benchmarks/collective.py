"""Measure exchanges between two processes: our shared memory, gloo, and the bandwidth of a copy.

Each process is bound to its own core. python benchmarks/collective.py --gloo
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from octavo.backends.cpu import _native, _native_tests
from octavo.engine.ranks.joining import EXCHANGE_BYTES

SIZES = {"16 KiB": 4096, "64 KiB": 16384, "1 MiB": 1 << 18, "32 MiB": 1 << 23}  # numbers of float32


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Return the time per call in the fastest twentieth of all calls, when nothing else took a processor."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 20]


def rank(name: str, index: int, port: int, use_gloo: bool) -> dict[str, list[float]]:
    """Return, for each size, the seconds of our sum, of gloo's, and of a copy while the other rank copies too."""
    group = _native.CollectiveGroup(name, index, 2, buffer_bytes=EXCHANGE_BYTES)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})
    if use_gloo:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=index, world_size=2)
    found = {}
    for label, count in SIZES.items():
        repeats = 5000 if count <= 1 << 14 else 500 if count <= 1 << 18 else 40
        x = np.zeros((1, count), np.float32)
        y = np.zeros_like(x)
        ours = seconds(lambda: _native_tests.all_reduce(group, x), repeats)  # noqa: B023 - called at once
        gloo = float("nan")
        if use_gloo:
            tensor = torch.zeros(count)
            gloo = seconds(lambda: dist.all_reduce(tensor), repeats // 4)  # noqa: B023
        _native_tests.all_reduce(group, np.zeros((1, 1), np.float32))
        copy = seconds(lambda: np.copyto(y, x), repeats)  # noqa: B023
        found[label] = [ours, gloo, copy]
    return found


def worker(pipe: object, *arguments: object) -> None:
    pipe.send(rank(*arguments))  # type: ignore[attr-defined, arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gloo", action="store_true", help="measure torch.distributed's gloo, too")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name, ours, theirs = secrets.token_hex(6), *context.Pipe()
    other = context.Process(target=worker, args=(theirs, name, 1, port, options.gloo))
    other.start()
    mine = rank(name, 0, port, options.gloo)
    other_ranks = ours.recv()
    other.join()
    rows = {}
    for label, count in SIZES.items():
        sums, gloo, copy = (median([mine[label][i], other_ranks[label][i]]) for i in range(3))
        rows[label] = {"ours_us": sums * 1e6, "gloo_us": gloo * 1e6, "copy_us": copy * 1e6, "bytes": 4 * count}
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for label, row in rows.items():
        rates = (f"{row['bytes'] / row[name] / 1e3:.2f}" for name in ("ours_us", "copy_us"))
        times = "".join(f"  {name} {row[name + '_us']:9.1f} us" for name in ("ours", "gloo", "copy"))
        print(f"{label:>7}:{times}  sum at {next(rates)} GB/s, copy at {next(rates)} GB/s")


if __name__ == "__main__":
    main()
