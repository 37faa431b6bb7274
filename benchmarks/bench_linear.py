"""Speed of the linear kernels alone: each weight type at each number of rows, and the machine's read bandwidth.

    python benchmarks/bench_linear.py [--types Q4_K Q6_K] [--rows 1 4 16 512] [--threads 2] [--isa avx2] [--shape N K]

GB/s counts the packed weights once, whatever the number of rows; GMAC/s counts rows x n x k. Weights that would fit
into the processor's caches are copied until they exceed them, so that one row reads from memory. The best of several
rounds counts, because other programs on a shared machine can only slow a round down.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from octavo.backends.cpu import _native
from octavo.backends.cpu.instruction_set import choose_isa
from octavo.backends.cpu.threads import plan_threads
from octavo.quantization.ggml import BLOCK_SIZES

BEYOND_CACHES = 256 << 20  # bytes that no cache holds
ROUNDS = 5
SECONDS_PER_ROUND = 0.15
FEW_ROWS = 16  # up to this number of rows the weights come from memory


@dataclass(frozen=True, slots=True)
class Case:
    type_name: str
    n: int
    k: int
    threads: int
    isa: str


def best_seconds(call: Callable[[int], None]) -> float:
    """Return the mean seconds per call in the fastest round; call(i) gets the number of the call."""
    start = time.perf_counter()
    call(0)
    calls = max(1, int(SECONDS_PER_ROUND / (time.perf_counter() - start + 1e-9)))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for i in range(calls):
            call(i)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def read_bandwidth(threads: int) -> float:
    """Return the bytes per second that all threads read when they do nothing else."""
    parts = np.array_split(np.ones(BEYOND_CACHES // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as executor:
        return BEYOND_CACHES / best_seconds(lambda _: list(executor.map(np.max, parts)) and None)


def pack_copies(case: Case, copies: int) -> list[_native.PackedWeight]:
    """Pack the same matrix of small scales and random codes several times."""
    values, size = BLOCK_SIZES[case.type_name]
    rng = np.random.default_rng(0)
    data = rng.integers(0x20, 0x30, case.n * case.k // values * size, dtype=np.uint8)
    return [_native.pack_weight(case.type_name, data, case.n, case.k) for _ in range(copies)]


def measure(case: Case, rows: int, weights: list[_native.PackedWeight]) -> float:
    """Return the seconds for one product of `rows` rows."""
    x = np.random.default_rng(1).standard_normal((rows, case.k), dtype=np.float32)
    out = np.empty((rows, case.n), np.float32)
    run = _native.KernelRun("linear", case.isa, case.threads)
    return best_seconds(lambda i: run([x], [weights[i % len(weights)], None], [], [], out))


def report(case: Case, rows: list[int]) -> None:
    packed = pack_copies(case, 1)
    copies = pack_copies(case, -(-BEYOND_CACHES // packed[0].nbytes)) if min(rows) <= FEW_ROWS else []
    for count in rows:
        seconds = measure(case, count, copies if count <= FEW_ROWS else packed)
        read, products = packed[0].nbytes / seconds / 1e9, count * case.n * case.k / seconds / 1e9
        print(f"{case.type_name:>7} {count:>5} {read:>9.1f} {products:>9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "F16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 32, 512])
    parser.add_argument("--shape", nargs=2, type=int, default=[4096, 1536], metavar=("N", "K"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default=None)
    args = parser.parse_args()
    threads, isa = plan_threads(args.threads).count, choose_isa(args.isa)
    print(
        f"{isa}, {threads} threads, {args.shape[0]} x {args.shape[1]}; reading {read_bandwidth(threads) / 1e9:.1f} GB/s"
    )
    print(f"{'type':>7} {'rows':>5} {'GB/s':>9} {'GMAC/s':>9}")
    for type_name in args.types:
        report(Case(type_name, args.shape[0], args.shape[1], threads, isa), args.rows)


if __name__ == "__main__":
    main()
