"""Compare error and time of our quantizers with llama.cpp's, by type, on the matrices of a model, or the time of
whole commands.

    python benchmarks/quantize.py MODEL.gguf --ggml libggml-base.so [--imatrix FILE] [--rows 256] [--json FILE]
    python benchmarks/quantize.py MODEL.gguf --llama FOLDER --types q4_1,iq4_xs [--imatrix FILE] [--turns 3]

With --ggml: the first rows of some matrices of the model are quantized by both, on one thread each, in turns; times are
those of the processor. The error is relative: the sum of squares of the differences by that of the values, both
weighted with the importance where there is one. The figures of a type are for all matrices together. A matrix of an
already quantized model counts as its numbers.

With --llama: `octavo quantize --threads 2` and `llama-quantize` with two threads in turns. Times are medians: of the
processor (user and system), and by the clock. --realtime puts `chrt -f 1` in front of both: nothing else runs then. A
type may have one for some tensors behind a plus sign: q8_0+ffn=mxfp4.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import commit, machine, table

from octavo.backends.quantizers import quantize, quantizer_types
from octavo.compress.importance import read_importance
from octavo.loader.gguf import open_gguf
from octavo.quantization.ggml import GGML_TYPES, dequantize, stored_bytes

Floats = NDArray[np.float32]
COLUMNS = {
    "type": "type",
    "importance": "importance",
    "error": "error",
    "llama.cpp": "their_error",
    "error / theirs": "ratio",
    "ns a value": "ns",
    "theirs": "their_ns",
}
COMMAND_COLUMNS = {
    "type": "type",
    "importance": "importance",
    "octavo, processor s": "ours",
    "llama-quantize": "theirs",
    "ratio": "ratio",
    "ratio of wall times": "wall",
}
_NEED_IMPORTANCE = ("IQ2_XXS", "IQ2_XS")


@dataclass
class Sums:
    """Sums over all matrices of a type: squared differences, squared values, seconds."""

    difference: float = 0.0
    value: float = 0.0
    seconds: float = 0.0

    def add(self, x: Floats, y: Floats, weights: Floats | float, seconds: float) -> None:
        self.difference += float(((x - y).astype(np.float64) ** 2 * weights).sum())
        self.value += float((x.astype(np.float64) ** 2 * weights).sum())
        self.seconds += seconds


class Ggml:
    """The function `ggml_quantize_chunk` of a library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.ggml_quantize_chunk.restype = ctypes.c_size_t
        pointers = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
        self._library.ggml_quantize_chunk.argtypes = pointers
        self._ids = {name: number for number, name in GGML_TYPES.items()}

    def quantize(self, type_name: str, x: Floats, importance: Floats | None) -> tuple[NDArray[np.uint8], float]:
        """Return the blocks, and the seconds they took without creating the type's tables."""
        out = np.empty(stored_bytes(type_name, x.shape), np.uint8)
        self._library.ggml_quantize_init(self._ids[type_name])
        weights = None if importance is None else importance.ctypes.data
        start = time.thread_time()
        self._library.ggml_quantize_chunk(self._ids[type_name], x.ctypes.data, out.ctypes.data, 0, *x.shape, weights)
        return out, time.thread_time() - start


def matrices(model: Path, rows: int, count: int, importance: Mapping[str, Floats]) -> Iterator[tuple[Floats, Floats]]:
    """Yield values [rows, columns] and importance [columns] of matrices from all layers, their width cut to a multiple
    of 256.
    """
    file = open_gguf(model)
    names = [n for n, info in file.tensors.items() if len(info.shape) == 2 and n.startswith("blk.")]
    for name in names[:: max(1, len(names) // count)][:count]:
        width = file.tensors[name].shape[1] // 256 * 256
        x = np.ascontiguousarray(file.weight(name).rows(slice(0, rows)).dequantize()[:, :width])
        yield x, np.ascontiguousarray(importance.get(name, np.ones(width, np.float32))[:width])


def compare(type_name: str, samples: list[tuple[Floats, Floats]], ggml: Ggml, weighted: bool) -> dict[str, Any]:
    """Return one row of the table."""
    ours, theirs, count = Sums(), Sums(), 0
    for x, columns in samples:
        importance = columns if weighted else None
        weights: Floats | float = columns if weighted else 1.0
        start = time.thread_time()
        blocks = quantize(type_name, x, importance)
        seconds = time.thread_time() - start
        ours.add(x, dequantize(type_name, blocks, x.shape), weights, seconds)
        count += x.size
        if weighted or type_name not in _NEED_IMPORTANCE:
            blocks, seconds = ggml.quantize(type_name, x, importance)
            theirs.add(x, dequantize(type_name, blocks, x.shape), weights, seconds)
    row = {
        "type": type_name,
        "importance": "yes" if weighted else "no",
        "error": ours.difference / ours.value,
        "ns": ours.seconds / count * 1e9,
    }
    if theirs.value:
        row |= {"their_error": theirs.difference / theirs.value, "their_ns": theirs.seconds / count * 1e9}
        row["ratio"] = ours.difference / theirs.difference if theirs.difference else 1.0
    return row


def timed(command: list[str]) -> tuple[float, float]:
    """Return the processor and wall seconds of a command. If it fails, exit with its last lines."""
    before, start = os.times(), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall, after = time.monotonic() - start, os.times()
    if done.returncode:
        raise SystemExit("\n".join([*(done.stdout + done.stderr).splitlines()[-5:], f"{' '.join(command)} failed"]))
    return after.children_user + after.children_system - before.children_user - before.children_system, wall


def compare_commands(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the table of whole commands."""
    base, _, override = name.partition("+")
    model, tools, imatrix, turns = options.model, options.llama, options.imatrix, options.turns
    more = [*(["--tensor-type", override] if override else []), *(["--imatrix", str(imatrix)] if imatrix else [])]
    first = ["chrt", "-f", "1"] if options.realtime else []
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        octavo = [sys.executable, "-m", "octavo", "quantize", str(model), f"{folder}/a.gguf", "--force", "--type", base]
        commands = {
            "ours": [*first, *octavo, "--threads", "2", *more],
            "theirs": [*first, str(tools / "llama-quantize"), *more, str(model), f"{folder}/b.gguf", base, "2"],
        }
        found: dict[str, list[tuple[float, float]]] = {who: [] for who in commands}
        for _ in range(turns):
            for who, command in commands.items():
                found[who].append(timed(command))
    (ours, our_wall), (theirs, their_wall) = (map(statistics.median, zip(*found[who], strict=True)) for who in commands)
    row = {"type": f"`{name}`", "importance": "yes" if imatrix else "no", "ours": ours, "theirs": theirs}
    return row | {"ratio": f"{theirs / ours:.2f}", "wall": f"{their_wall / our_wall:.2f}", "times": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--ggml", type=Path, help="libggml-base.so of llama.cpp")
    peer.add_argument("--llama", type=Path, help="folder with llama-quantize: whole commands")
    parser.add_argument("--types", default="", help="of --llama")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("--imatrix", type=Path, help="importance of this model [default: random]")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--matrices", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    columns, rows = COMMAND_COLUMNS, []
    if options.llama:
        for name in filter(None, options.types.split(",")):
            rows.append(compare_commands(name, options))
            print(table(columns, rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    else:
        columns, rows = COLUMNS, searches(options)
    print(table(columns, rows))
    if options.json:
        report = {"commit": commit(), "machine": machine(), "model": options.model.name, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1))


def searches(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the table of searches."""
    importance = read_importance(options.imatrix).columns() if options.imatrix else {}
    samples = list(matrices(options.model, options.rows, options.matrices, importance))
    if not options.imatrix:
        rng = np.random.default_rng(0)
        samples = [(x, np.exp(rng.standard_normal(len(columns))).astype(np.float32)) for x, columns in samples]
    ggml = Ggml(options.ggml)
    types = sorted(quantizer_types() - {"TQ1_0", "TQ2_0"}, key=lambda name: -stored_bytes(name, (256,)))
    return [compare(name, samples, ggml, weighted) for name in types for weighted in (False, True)]


if __name__ == "__main__":
    main()
