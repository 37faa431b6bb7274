#!/usr/bin/env python3
"""Check that no object file of the native library uses instructions above its own instruction set.

Usage: tools/check_isa.py BUILD_FOLDER...   (CMake folders, with CMakeFiles/kernels_avx2.dir and so on)

Objects for another processor are read with the tools of its cross compiler. Each object file must obey two rules: its
disassembly has no register or instruction of a higher level, and kernel objects define nothing that the linker could
merge with another object's function or mistake for it.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# For each level, the instructions that only it and later levels have. At the end, instructions that no level requires,
# such as the second half of Ice Lake's AVX-512.
Levels = dict[str, re.Pattern[str] | None]
X86: Levels = {
    "base": None,
    "scalar": None,
    "avx2": re.compile(r"\t(v(?!err|erw|mcall|mmcall)[a-z0-9]+)\b|%ymm"),
    "avx512": re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]"),
    "avx512vnni": re.compile(r"\tvpdp(busd|wssd)s?\b"),
    "amx": re.compile(r"%tmm|\tv(dpbf16ps|cvtneps2bf16|cvtne2ps2bf16|perm(b|i2b|t2b)|pmultishiftqb|gf2p8[a-z]+)\b"),
    "no level": re.compile(r"\tvp(shld|shrd|compress[bw]|expand[bw]|popcnt)"),
}
# dotprod is ARMv8.2, which brings the atomic instructions of ARMv8.1.
ARM: Levels = {
    "base": None,
    "scalar": None,
    "neon": None,
    "dotprod": re.compile(r"\t([su]dot|(cas|swp|ld(add|clr|eor|set|[su]max|[su]min))[alhb]*|sqrdml[as]h)\b"),
    "i8mm": re.compile(r"\t((s|u|us)mmla|usdot|sudot)\b"),
    "no level": re.compile(r"\bz\d+\.[bhsd]\b|\tbf(cvt|dot|mlal|mmla)|\tf[a-z0-9]+\s+(h\d|v\d+\.[48]h, v\d+\.[48]h)"),
}
ELF_MACHINES = {62: ("x86_64", X86), 183: ("aarch64", ARM)}


def main(folders: list[str]) -> int:
    objects = [path for folder in folders for path in sorted(Path(folder).rglob("*.o")) if _level(path)]
    levels = {_level(path) for path in objects}
    if missing := [level for level in ("base", "scalar") if level not in levels]:
        print(f"no objects of {', '.join(missing)} under {' '.join(folders)}")
        return 2
    complaints = [complaint for path in objects for complaint in _complaints(path)]
    print("\n".join(complaints) or f"{len(objects)} objects hold no instruction above their level")
    return bool(complaints)


# For objects of any processor.
_BASE_FOLDERS = frozenset(
    f"{name}.dir"
    for name in (
        "octavo_base",
        "_native",
        "_native_tests",
        "_json_text",
        "kernel_agreement",
        "nanobind-static",
        "nanobind-static-abi3",
    )
)


def _level(path: Path) -> str | None:
    """Return the instruction set that an object's folder names, or None if the object is not ours."""
    for part in path.parts:
        if part.startswith("kernels_") and part.endswith(".dir"):
            return part.removeprefix("kernels_").removesuffix(".dir")
        if part in _BASE_FOLDERS:
            return "base"
    return None


def _complaints(path: Path) -> Iterator[str]:
    level = _level(path)
    assert level is not None
    machine, levels = ELF_MACHINES[int.from_bytes(path.read_bytes()[18:20], "little")]
    prefix = "" if platform.machine() == machine else f"{machine}-linux-gnu-"
    order = list(levels)
    above = [(mark, pattern) for mark, pattern in levels.items() if pattern and order.index(mark) > order.index(level)]
    function = "?"
    reported = set()
    for line in _output(f"{prefix}objdump", "-d", "--no-show-raw-insn", str(path)):
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
            continue
        for mark, pattern in above:
            if (function, mark) not in reported and pattern.search(line):
                reported.add((function, mark))
                yield f"{path}: {function}: an instruction of {mark} in an object of {level}:{line.rstrip()}"
    if level != "base":
        for line in _output(f"{prefix}nm", "--defined-only", "--extern-only", str(path)):
            yield f"{path}: defines {line.split()[-1]}, which the linker may merge with another instruction set's"


def _output(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["build"]))
