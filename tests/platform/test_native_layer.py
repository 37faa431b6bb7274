"""The platform layer of csrc: this system's, and without futexes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.native_sources import CSRC, platform_sources

HERE = Path(__file__).parent
STRESS = HERE.parent / "backends" / "cpu" / "thread_pool_stress.cpp"


def run(folder: Path, sources: list[Path], *arguments: str) -> str:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    binary = folder / "program"
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{CSRC}", "-DOCTAVO_ISA=scalar"]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(binary)], check=True, timeout=200)
    result = subprocess.run([str(binary), *arguments], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("waits", ["linux", "portable"])
def test_the_layer_works(waits: str, tmp_path: Path) -> None:
    assert "the platform layer works" in run(tmp_path, [HERE / "platform_layer.cpp", *platform_sources(waits)])


def test_the_pool_of_threads_works_without_futexes(tmp_path: Path) -> None:
    sources = [CSRC / name for name in ("thread_pool.cpp", "memory.cpp", "isa.cpp", "kernels/add.cpp")]
    run(tmp_path, [STRESS, *sources, *platform_sources("portable")], "60")


def test_nothing_else_names_a_system() -> None:
    """Headers and macros of one system are used in csrc/platform alone."""
    words = (
        "sys/mman.h",
        "unistd.h",
        "linux/",
        "windows.h",
        "mach/",
        "futex",
        "madvise",
        "_WIN32",
        "__APPLE__",
        "syscall(",
    )
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in {".cpp", ".h"} and "platform" not in path.relative_to(CSRC).parts:
            found = [word for word in words if word in path.read_text()]
            assert not found, f"{path.relative_to(CSRC)} names {found}"
