"""Tries tiles of the Triton kernels on a GPU, and writes the time of each, to choose their constants.

    python benchmarks/gpu_tiles.py --json tiles.json [--only "few rows"]

Kernels are compiled by many processes first, then each choice is timed alone, at the shapes of Llama 3.1 8B. Nothing is
checked here: `gpu.py` does that with the constants that are chosen.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), *([] if importlib.util.find_spec("octavo") else [str(ROOT / "src")])]

import torch  # noqa: E402 - after the path
from gpu_cases import Machine, Shapes, in_turns, seconds_of  # noqa: E402
from gpu_kernels import CACHE_TYPES, cache_bytes, cache_of, params, sequences  # noqa: E402
from gpu_products import random_of, tall  # noqa: E402

from octavo.backends.torch.kernels import attention, coded_linear, linear, vector  # noqa: E402
from octavo.backends.torch.kernels.gate import coded_rows  # noqa: E402
from octavo.backends.torch.kernels.planes import Planes, planes_of  # noqa: E402
from octavo.backends.torch.plain import ProductEnd  # noqa: E402
from octavo.backends.torch.products import linear as product  # noqa: E402

# A trial: its group, what is timed, the choice, the patches that make it, and the calls.
Trial = tuple[str, str, str, list[Any], Callable[[], list[Callable[[], object]]]]
_MATRIX = (28672, 4096)  # gate and up
_ROWS = 64


def _small(name: str) -> Planes:
    """Return a few rows of the matrix, which are repeated."""
    found = planes_of(random_of(name, (_ROWS, _MATRIX[1])))
    assert found is not None
    return found


def _products(machine: Machine, name: str, rows: int) -> list[Callable[[], object]]:
    small = _small(name)

    def make() -> Callable[[], object]:
        return partial(linear.linear, machine.normal(rows, _MATRIX[1]), tall(small, _MATRIX[0], machine))

    return in_turns(machine, make, small.nbytes * _MATRIX[0] / _ROWS)


def _coded(machine: Machine, name: str, rows: int) -> list[Callable[[], object]]:
    small = _small(name)
    assert small.inputs is not None
    form = small.inputs

    def make() -> Callable[[], object]:
        x = coded_rows(machine.normal(rows, _MATRIX[1]), form)
        return partial(product, x, tall(small, _MATRIX[0], machine), ProductEnd(), repeats=False)

    return in_turns(machine, make, small.nbytes * _MATRIX[0] / _ROWS)


def _decode(machine: Machine, kind: str, batch: int, context: int, part: int) -> list[Callable[[], object]]:
    p = params(machine)

    def make() -> Callable[[], object]:
        seqs, blocks = sequences(machine, batch, context, 16)
        q = machine.normal(batch, p.num_heads, p.head_dim)
        cache = cache_of(machine, blocks, 16, CACHE_TYPES[kind])
        return partial(attention.decode_attention, q, cache, p, seqs, context, part_tokens=part)

    return in_turns(machine, make, cache_bytes(machine, batch, context, kind))


def _prefill(machine: Machine, tokens: int) -> list[Callable[[], object]]:
    p = params(machine)
    seqs, blocks = sequences(machine, 1, tokens, 16, tokens=tokens)
    q = machine.normal(tokens, p.num_heads, p.head_dim)
    return [partial(attention.prefill_attention, q, cache_of(machine, blocks, 16, None), p, seqs)]


def _attention_tiles(rows: int | None, keys: int, warps: int, stages: int) -> list[Any]:
    tiles = attention._tiles

    def chosen(p: Any, cache: Any, most: int) -> dict[str, Any]:
        return tiles(p, cache, rows or most) | {"BN": keys}

    def of_warps(_rows: int, _wide: int, _kind: int) -> dict[str, int]:
        return {"num_warps": warps, "num_stages": stages}

    return [patch.object(attention, "_tiles", chosen), patch.object(attention, "_warps", of_warps)]


def _named(**values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _constant(module: Any, name: str, value: Any) -> Any:
    return patch.object(module, name, value)


def _one_row(machine: Machine, name: str) -> Iterator[Trial]:
    """Yield the tiles for one row: for integer codes, and for all other codes."""
    small = _small(name)
    if small.decode == "integer":
        for rows in (2, 4, 8):
            for quads in (32, 64, 128):
                patches = [_constant(vector, n, {"ROWS": rows}) for n in ("_WHOLE", "_WHOLE_WITH_MORE")]
                patches.append(_constant(vector, "_MOST_QUADS", quads))
                yield "one row", name, _named(rows=rows, quads=quads), patches, partial(_products, machine, name, 1)
        return
    for rows, warps, columns in (
        (4, 4, 512), (4, 4, 1024), (2, 4, 1024), (2, 2, 512), (8, 4, 512), (8, 8, 1024), (1, 2, 1024), (1, 4, 2048)
    ):  # fmt: skip
        tile = {"ROWS": rows, "num_warps": warps}
        patches = [_constant(vector, n, tile) for n in ("_DECODED", "_DECODED_BYTES")]
        patches.append(_constant(vector, "_DECODED_COLUMNS", columns))
        choice = _named(rows=rows, warps=warps, columns=columns)
        yield "one row of other codes", name, choice, patches, partial(_products, machine, name, 1)


def product_trials(machine: Machine) -> Iterator[Trial]:
    formats = ("I4_128_Z", "Q4_K", "Q8_0", "Q6_K", "NF4_64", "MXFP4", "F8_E4M3_ROW")
    for name in formats:
        yield from _one_row(machine, name)
        for programs in (264, 528, 792, 1056):
            patches = [_constant(linear, "_PROGRAMS", programs)]
            for count in (8, 32):
                calls = partial(_products, machine, name, count)
                yield "parts of rows", f"{name} {count}", _named(programs=programs), patches, calls
        for count, few, group in ((8, "_FEW", "few rows"), (32, "_SOME", "some rows"), (128, "_MANY", "many rows")):
            for bn, bm, warps, stages, columns in _TILES[few]:
                tile = {"BN": bn, "BM": bm, "num_warps": warps, "num_stages": stages}
                names = [n for n in (few, f"{few}_WHOLE") if hasattr(linear, n)]
                patches = [*(_constant(linear, n, tile) for n in names), _constant(linear, "_TILE_COLUMNS", columns)]
                choice = _named(bn=bn, bm=bm, warps=warps, stages=stages, columns=columns)
                yield group, name, choice, patches, partial(_products, machine, name, count)


_TILES = {
    "_FEW": (
        (64, 16, 4, 3, 128), (64, 16, 4, 2, 128), (32, 16, 4, 3, 128), (128, 16, 4, 3, 128), (128, 16, 8, 3, 128),
        (64, 16, 4, 3, 256), (64, 16, 2, 3, 128), (32, 16, 2, 3, 128), (64, 16, 4, 4, 256), (128, 16, 8, 2, 128),
        (256, 16, 8, 3, 128),
    ),
    "_SOME": (
        (64, 32, 4, 3, 128), (128, 32, 8, 3, 128), (128, 32, 4, 3, 128), (64, 32, 4, 2, 128), (64, 32, 4, 3, 256),
    ),
    "_MANY": (
        (128, 64, 8, 3, 128), (64, 64, 4, 3, 128), (128, 64, 4, 3, 128), (128, 128, 8, 3, 128), (64, 128, 4, 3, 128),
        (128, 128, 8, 2, 128),
    ),
}  # fmt: skip


def coded_trials(machine: Machine) -> Iterator[Trial]:
    name = "F8_E4M3_128X128"
    for bm, bn, warps, stages in (
        (128, 64, 8, 4), (128, 128, 8, 3), (64, 128, 4, 3), (128, 128, 4, 3), (64, 64, 4, 4), (128, 256, 8, 3),
        (64, 256, 4, 3),
    ):  # fmt: skip
        patches = [
            _constant(
                coded_linear, "_GROUPED", {"BM": bm, "BN": bn, "BK": 128, "num_warps": warps, "num_stages": stages}
            )
        ]
        for rows in (128, 1024):
            choice = _named(bm=bm, bn=bn, warps=warps, stages=stages)
            yield "grouped codes", f"{rows} rows", choice, patches, partial(_coded, machine, name, rows)
    for bn, warps, stages in ((32, 4, 5), (16, 4, 5), (64, 4, 5), (32, 2, 6), (32, 4, 8)):
        few = {"BM": 16, "BN": bn, "BK": 128, "num_warps": warps, "num_stages": stages}
        for kind in (name, "I8_ROW"):
            patches = [_constant(coded_linear, "_FEW", few), _constant(coded_linear, "_VECTOR_ROWS", 0)]
            for rows in (1, 8):
                choice = _named(bn=bn, warps=warps, stages=stages)
                yield "few codes", f"{kind} {rows} rows", choice, patches, partial(_coded, machine, kind, rows)


_STEPS = (
    (1, 1088, 128), (1, 1088, 256), (1, 1088, 512), (32, 1088, 256), (32, 1088, 512), (32, 4096, 256), (32, 4096, 512)
)  # fmt: skip


def attention_trials(machine: Machine) -> Iterator[Trial]:
    for rows, keys, warps, stages in (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 4, 2), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2),
        (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (128, 128, 8, 3),
    ):  # fmt: skip
        choice = _named(rows=rows, keys=keys, warps=warps, stages=stages)
        patches = _attention_tiles(rows, keys, warps, stages)
        yield "prompts", "4096 tokens", choice, patches, partial(_prefill, machine, 4096)
    for kind in CACHE_TYPES:
        for keys, warps, stages in (
            (64, 4, 2), (64, 4, 3), (64, 2, 3), (128, 4, 2), (32, 4, 3), (32, 2, 4), (128, 8, 2), (64, 4, 4)
        ):  # fmt: skip
            patches = _attention_tiles(None, keys, warps, stages)
            for batch, context, part in _STEPS:
                choice = _named(keys=keys, warps=warps, stages=stages, part=part)
                calls = partial(_decode, machine, kind, batch, context, part)
                yield "decode", f"{kind}, {batch} x {context}", choice, patches, calls


def trials(machine: Machine, only: str) -> list[Trial]:
    found = [*attention_trials(machine), *coded_trials(machine), *product_trials(machine)]
    return [trial for trial in found if only in trial[0]]


def _with(trial: Trial, run: Callable[[list[Callable[[], object]]], Any]) -> Any:
    with ExitStack() as stack:
        for change in trial[3]:
            stack.enter_context(change)
        try:
            return run(trial[4]())
        except Exception as error:  # a tile that needs too much is a result, too
            return f"{type(error).__name__}: {error}"[:120]


def _machine() -> Machine:
    return Machine(torch.device("cuda"), Shapes())


def _compiled(part: tuple[int, int, str]) -> int:
    """Run every part-th trial once, which compiles it for all processes."""
    torch.set_num_threads(1)
    mine = trials(_machine(), part[2])[part[0] :: part[1]]
    seen = set()
    for trial in mine:
        if (key := (*trial[:2], trial[2].rpartition(", part")[0] or trial[2])) not in seen:
            seen.add(key)
            _with(trial, lambda calls: calls[0]())
    torch.cuda.synchronize()
    return len(mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, default=Path("tiles.json"), help="the times, in microseconds")
    parser.add_argument("--only", default="", help="only groups with these words in their name")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU, so there is nothing to time")
    if not trials(_machine(), args.only):
        sys.exit(f"--only {args.only!r}: no group has these words in its name")
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(_compiled, [(i, args.processes, args.only) for i in range(args.processes)], 1)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    machine, times = _machine(), {}
    for trial in trials(machine, args.only):
        seconds = _with(trial, lambda calls: seconds_of(machine, calls, 3))
        value = round(seconds * 1e6, 1) if isinstance(seconds, float) else seconds
        times.setdefault(trial[0], {}).setdefault(trial[1], {})[trial[2]] = value
        args.json.write_text(json.dumps(times, indent=1), encoding="utf-8")
    print(f"timed in {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
