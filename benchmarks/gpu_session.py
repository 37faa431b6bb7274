"""Run everything for a session with a GPU in one command of at most nine minutes, which can be resumed.

    python benchmarks/gpu_session.py --folder session --minutes 9 --models ~/.cache/octavo-models/*.gguf

First the GPU's cases (`gpu.py`), then this processor with 1, 2, 4, 8 and 16 threads on each model (`compare.py`),
with the same peer options. Each part writes its own file in the folder as soon as it has figures; a finished part is
not run again. `--list` prints the parts and their seconds.

A GPU machine without a network takes its wheels along, at most 64 MiB together with the working tree. They are built on
a machine with a network, in a folder that git ignores:

    pip wheel --no-deps -w build/wheels .                                    # octavo
    pip download --no-deps -d build/wheels humming-kernels fla-core          # the libraries of `gpu-fast`
    pip wheel --no-deps -w build/wheels llama-cpp-python                     # the peer of the processor
    du -sm build/wheels build/peers

Peers of the GPU's products (`gpu_peers.py`) take their source packages along, in `build/peers` as `NAME-*.tar.gz` (from
a clone: `git archive --prefix=gemlite-main/ -o build/peers/gemlite-main.tar.gz HEAD`, and the same for exllamav3). They
are built on the GPU machine, exllamav3 only if `nvcc` is there.

On the GPU machine, `pip install --no-index --no-deps build/wheels/*.whl` runs first. A GGUF file that exceeds the rest
of the 64 MiB has to be on that machine already.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).resolve().parent
_THREADS = (1, 2, 4, 8, 16)
_CPU_S = 180.0  # of all parts of the processor together
_GPU_RECORD = "gpu.json"
_WITHOUT_LOSS = {"decode": 0.80, "prefill-512": 0.85}  # of the speed-up at 8 threads


class SessionPart(NamedTuple):
    """A program of the session.

    output: file that shows it is done.
    needs_s: seconds that it may take.
    """

    name: str
    command: list[str]
    output: Path
    needs_s: float


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("gpu-session"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--models", type=Path, nargs="*", default=[], metavar="MODEL.gguf")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="as of compare.py")
    parser.add_argument("--list", action="store_true", help="print the parts")
    return parser.parse_args(argv)


def parts_of(options: argparse.Namespace, cores: int) -> list[SessionPart]:
    """Return the parts for the processor: each model with each possible number of threads."""
    threads = [n for n in _THREADS if n <= cores]
    share, found = _CPU_S / max(len(threads) * len(options.models), 1), []
    for model in options.models:
        for count in threads:
            output = options.folder / f"cpu-{model.stem}-{count}.json"
            command = [sys.executable, str(_HERE / "compare.py"), str(model), "--runs", "1", "--measure"]
            command += [",".join(_WITHOUT_LOSS), "--threads", str(count), "--json", str(output)]
            for peer in options.peer:
                command += ["--peer", peer]
            found.append(SessionPart(f"{model.stem}, {count} threads", command, output, share))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    parts = parts_of(options, os.cpu_count() or 1)
    cpu_s = sum(part.needs_s for part in parts if not part.output.exists())
    gpu_minutes = max(options.minutes - cpu_s / 60, 0.0)
    if options.list:
        print(f"GPU cases: {gpu_minutes * 60:.0f} s")
        for part in parts:
            print(f"{part.name}: {part.needs_s:.0f} s{' (done)' if part.output.exists() else ''}")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    record = options.folder / _GPU_RECORD
    gpu = [sys.executable, str(_HERE / "gpu.py"), "--minutes", f"{gpu_minutes:.2f}", "--json", str(record)]
    status = subprocess.run([*gpu, "--page", str(options.folder / "gpu.md")], check=False).returncode
    for part in parts:
        left = end - time.monotonic()
        if part.output.exists() or left < part.needs_s / 2:
            continue
        try:
            subprocess.run(part.command, check=False, timeout=min(left, 3 * part.needs_s))
        except subprocess.TimeoutExpired:
            print(f"{part.name}: no result after {min(left, 3 * part.needs_s):.0f} s", flush=True)
    for line in scaling(options.folder):
        print(line)
    return status


def scaling(folder: Path) -> list[str]:
    """Return a line for each model and measure: its speed with each number of threads relative to one thread."""
    speeds: dict[tuple[str, str], dict[int, float]] = {}
    for path in sorted(folder.glob("cpu-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        model, _, count = path.stem.removeprefix("cpu-").rpartition("-")
        ours = [e for result in record["results"] for e in result["engines"] if e["engine"] == "octavo"]
        for measure, figures in (pair for engine in ours for pair in engine["measures"].items()):
            speeds.setdefault((model, measure), {})[int(count)] = figures["median"]
    lines = []
    for (model, measure), of in speeds.items():
        if 1 not in of:
            continue
        gains = ", ".join(f"{n}: {of[n] / of[1] / n:.2f}" for n in sorted(of))
        low = 8 in of and of[8] / of[1] / 8 < _WITHOUT_LOSS[measure]
        lines.append(f"{model}, {measure}, gain of each thread: {gains}" + (" (too low at 8)" if low else ""))
    return lines


if __name__ == "__main__":
    sys.exit(main())
