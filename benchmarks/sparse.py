"""Compare products with sparse and dense weights: two of four weights, and half of them anywhere.

    python benchmarks/sparse.py [--shape N K] [--rows 1 64] [--threads 1] [--turns 15]

The sparse products use a prototype (benchmarks/sparse.cpp) that this script compiles for this processor: it
needs a C++ compiler and AVX-512 with VNNI, VBMI2 and BF16. For comparison: the same prototype with dense weights, which
shows what the zeros alone change, and Octavo's own kernel of a type. Every product is compared with numpy's. All take
turns; a figure is the least processor time of a turn by the number of threads, so that other programs count little.
Weights are copied until no cache holds them; many rows use one copy.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_linear
import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.backends.cpu.instruction_set import choose_isa

BEYOND_CACHES = 256 << 20  # bytes that no cache holds
GROUP, BLOCK = 64, 32
MOST_COLUMNS = 16384  # of sparse.cpp
SOURCE = Path(__file__).with_suffix(".cpp")
NEEDED = ("avx512_vnni", "avx512_vbmi2", "avx512_bf16")
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Form:
    """A form of weights of the prototype.

    number: its index there.
    bits: bits of a code, or 16 for bf16.
    kind: dense, 2:4 or 50 %.
    """

    name: str
    number: int
    bits: int
    kind: str
    type_name: str  # Octavo's type of the same codes, dense


FORMS = (
    Form("8 bits, dense", 0, 8, "dense", "Q8_0"),
    Form("8 bits, 2:4", 1, 8, "2:4", "Q8_0"),
    Form("8 bits, half, bitmap", 2, 8, "50 %", "Q8_0"),
    Form("4 bits, dense", 3, 4, "dense", "Q4_K"),
    Form("4 bits, 2:4", 4, 4, "2:4", "Q4_K"),
    Form("bf16, dense", 5, 16, "dense", "BF16"),
    Form("bf16, 2:4", 6, 16, "2:4", "BF16"),
    Form("bf16, half, bitmap", 7, 16, "50 %", "BF16"),
)


def mask_of(kind: str, n: int, k: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Choose the weights that are present: the same number in each row."""
    if kind == "dense":
        return np.ones((n, k), np.bool_)
    width = 4 if kind == "2:4" else k
    ranks = rng.random((n, k // width, width), dtype=np.float32).argsort(axis=2)
    return (ranks < width // 2).reshape(n, k)


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves, without rounding."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def packed(form: Form, codes: Array, mask: Array, scales: NDArray[np.float16]) -> tuple[Array, Array]:
    """Return the bytes of all rows, and where each begins.

    codes: int8 or bf16 [n, k].
    scales: [n, k / 32].
    """
    n, k = codes.shape
    has_bitmap = form.kind != "dense"
    rows: list[bytes] = []
    bitmaps = np.packbits(mask.reshape(n, -1, GROUP), axis=2, bitorder="little")
    for i in range(n):
        parts: list[bytes] = []
        for g in range(k // GROUP):
            there = codes[i, g * GROUP : (g + 1) * GROUP][mask[i, g * GROUP : (g + 1) * GROUP]]
            if form.bits < 16:
                parts.append(scales[i, 2 * g : 2 * g + 2].tobytes())
            if has_bitmap:
                parts.append(bitmaps[i, g].tobytes())
            if form.bits == 4:
                low, high = (there + 8).astype(np.uint8).reshape(2, -1)
                parts.append((low | high << 4).tobytes())
            else:
                parts.append(there.tobytes())
        rows.append(b"".join(parts))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return np.frombuffer(b"".join(rows), np.uint8), offsets


def compiled(folder: Path) -> Callable[..., None]:
    """Compile the prototype and return its product."""
    found = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if missing := [name for name in NEEDED if name not in found]:
        raise SystemExit(f"this processor has no {', '.join(missing)} that the prototype needs")
    library = folder / "sparse.so"
    command = ["c++", "-O3", "-std=c++17", "-march=native", "-shared", "-fPIC", "-pthread", "-o", library, SOURCE]
    subprocess.run(command, check=True)
    product: Any = ctypes.CDLL(str(library)).product
    product.restype = None
    return product  # type: ignore[no-any-return]


@dataclass(slots=True)
class Case:
    """One form and its weights.

    call: computes as many products as `copies`.
    """

    name: str
    kind: str
    num_bytes: int
    copies: int
    call: Callable[[], None]
    seconds: float = float("inf")


def prototype_case(
    product: Callable[..., None], form: Form, args: argparse.Namespace, rows: int, rng: np.random.Generator
) -> Case:
    """Make random weights in this form. Raises AssertionError if the product differs from numpy's."""
    n, k = args.shape
    mask = mask_of(form.kind, n, k, rng)
    scales = rng.uniform(0.5, 1.5, (n, k // BLOCK)).astype(np.float16)
    x_codes = rng.integers(-127, 128, (rows, k), dtype=np.int8)
    x_scales = rng.uniform(0.5, 1.5, (rows, k // BLOCK)).astype(np.float32)
    if form.bits == 16:
        codes: Array = bf16(rng.standard_normal((n, k), dtype=np.float32))
        values = (codes.astype(np.uint32) << 16).view(np.float32)
        x: Array = bf16(x_codes.astype(np.float32))
        activations = x_codes.astype(np.float32)
    else:
        limit = 1 << (form.bits - 1)
        codes = rng.integers(-limit + 1, limit, (n, k), dtype=np.int8)
        values = codes * scales.repeat(BLOCK, axis=1).astype(np.float32)
        x = (x_codes.astype(np.int16) + 128).astype(np.uint8)
        activations = x_codes * x_scales.repeat(BLOCK, axis=1)
    data, offsets = packed(form, codes, mask, scales)
    copies = 1 if rows > 1 else -(-BEYOND_CACHES // len(data)) if n * k > 1 << 20 else 1
    # Loads of whole registers may read past the last weight.
    weights = np.concatenate([np.tile(data, copies), np.zeros(GROUP, np.uint8)])
    out = np.empty((n, rows), np.float32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (weights, offsets, x, x_scales, out)]
    sizes = [ctypes.c_int64(value) for value in (copies, n, k, rows)]

    def call() -> None:
        product(form.number, args.threads, *pointers[:2], *sizes, *pointers[2:])

    call()
    expected = (values * mask) @ activations.T
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    case = Case(form.name, form.kind, len(data), copies, call)
    call.__dict__["kept"] = (weights, offsets, x, x_scales, out)
    return case


def octavo_case(type_name: str, args: argparse.Namespace, rows: int) -> Case:
    """Return a case with Octavo's kernel of a dense type, which also rounds the activations."""
    n, k = args.shape
    isa = choose_isa(None)
    one = bench_linear.pack_copies(bench_linear.Case(type_name, n, k, args.threads, isa), 1)
    copies = 1 if rows > 1 or n * k <= 1 << 20 else -(-BEYOND_CACHES // one[0].nbytes)
    weights = bench_linear.pack_copies(bench_linear.Case(type_name, n, k, args.threads, isa), copies)
    x = np.random.default_rng(1).standard_normal((rows, k), dtype=np.float32)
    out = np.empty((rows, n), np.float32)
    run = _native.KernelRun("linear", isa, args.threads)

    def call() -> None:
        for weight in weights:
            run([x], [weight, None], [], [], out)

    return Case(f"Octavo's {type_name}", "dense", one[0].nbytes, copies, call)


def measure(cases: list[Case], turns: int, threads: int) -> None:
    """Measure the shortest time of each case's product; all cases take turns."""
    for _ in range(turns):
        for case in cases:
            start = time.process_time()
            case.call()
            case.seconds = min(case.seconds, (time.process_time() - start) / threads / case.copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=2, type=int, default=[1536, 8960], metavar=("N", "K"))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64], help="1 or multiples of 4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    if args.shape[0] % (4 * args.threads) or args.shape[1] % 256 or any(r != 1 and r % 4 for r in args.rows):
        parser.error("N must be a multiple of 4 times the threads, K one of 256, rows 1 or a multiple of 4")
    if args.shape[1] > MOST_COLUMNS:
        parser.error(f"K is {args.shape[1]}; the prototypes take at most {MOST_COLUMNS}")
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        product = compiled(Path(folder))
        print("| rows | weights | bits per weight | µs | beside the dense prototype | beside Octavo's dense kernel |")
        print("|---|---|---|---|---|---|")
        for rows in args.rows:
            for bits in (8, 4, 16):
                forms = [form for form in FORMS if form.bits == bits]
                cases = [prototype_case(product, form, args, rows, rng) for form in forms]
                own = octavo_case(forms[0].type_name, args, rows)
                measure([*cases, own], args.turns, args.threads)
                for case in [*cases, own]:
                    width = 8 * case.num_bytes / args.shape[0] / args.shape[1]
                    ratios = [f"{case.seconds / other.seconds:.2f}" for other in (cases[0], own)]
                    print(f"| {rows} | {case.name} | {width:.2f} | {1e6 * case.seconds:.0f} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
