#!/usr/bin/env python3
"""Fails if an object of the native library holds instructions above its own instruction set.

Usage: tools/check_isa.py BUILD_FOLDER...   (folders of CMake, with CMakeFiles/kernels_avx2.dir and so on)

Two rules, on every object file: the disassembly uses no register or instruction of a higher level, and kernel
objects define nothing that the linker could merge with, or take for, another object's function.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LEVELS = ("base", "scalar", "avx2", "avx512", "avx512vnni", "amx", "no level")

# What a level must not contain: everything that only the levels from the given one on have.
# Nothing may use what no level asks of the processor, such as the second half of Ice Lake's AVX-512.
MARKS = (
    ("avx2", re.compile(r"\t(v(?!err|erw|mcall|mmcall)[a-z0-9]+)\b|%ymm")),
    ("avx512", re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]")),
    ("avx512vnni", re.compile(r"\tvpdp(busd|wssd)s?\b")),
    ("amx", re.compile(r"%tmm|\tv(dpbf16ps|cvtneps2bf16|cvtne2ps2bf16)")),
    ("no level", re.compile(r"\tvp(ermb|ermi2b|ermt2b|multishiftqb|shld|shrd|compress[bw]|expand[bw]|popcnt)")),
)


def main(folders: list[str]) -> int:
    objects = [path for folder in folders for path in sorted(Path(folder).rglob("*.o")) if _level(path)]
    levels = {_level(path) for path in objects}
    if missing := [level for level in LEVELS[:2] if level not in levels]:
        print(f"no objects of {', '.join(missing)} under {' '.join(folders)}")
        return 2
    complaints = [complaint for path in objects for complaint in _complaints(path)]
    print("\n".join(complaints) or f"{len(objects)} objects hold no instruction above their level")
    return bool(complaints)


def _level(path: Path) -> str | None:
    """The instruction set of an object by its folder; None: not ours."""
    for part in path.parts:
        if part.startswith("kernels_") and part.endswith(".dir"):
            return part.removeprefix("kernels_").removesuffix(".dir")
        if part in ("_native.dir", "nanobind-static.dir", "nanobind-static-abi3.dir"):
            return "base"
    return None


def _complaints(path: Path) -> Iterator[str]:
    level = _level(path)
    assert level is not None
    above = [(mark, pattern) for mark, pattern in MARKS if LEVELS.index(mark) > LEVELS.index(level)]
    function = "?"
    reported = set()
    for line in _output("objdump", "-d", "--no-show-raw-insn", str(path)):
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
            continue
        for mark, pattern in above:
            if (function, mark) not in reported and pattern.search(line):
                reported.add((function, mark))
                yield f"{path}: {function}: an instruction of {mark} in an object of {level}:{line.rstrip()}"
    if level != "base":
        for line in _output("nm", "--defined-only", "--extern-only", str(path)):
            yield f"{path}: defines {line.split()[-1]}, which the linker may merge with another instruction set's"


def _output(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["build"]))
