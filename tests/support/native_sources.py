"""Source files of the native library, for tests that compile only some of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
# As in .ci/native: with these checks GCC takes no address for a constant.
WITHOUT_POINTER_CHECKS = "-fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute,object-size,pointer-overflow"


def platform_sources(waits: str = "linux") -> list[Path]:
    """Return the sources of the platform layer on Linux.

    waits: `portable` uses no futexes.
    """
    found = [path for folder in ("posix", "linux") for path in sorted((CSRC / "platform" / folder).glob("*.cpp"))]
    return [path if path.name != "wait.cpp" else CSRC / "platform" / waits / "wait.cpp" for path in found]


def run_stress(
    sources: Sequence[Path],
    folder: Path,
    *arguments: str,
    sanitizer: str | None = None,
    suppressions: str = "",
    has_kernels: bool = True,
) -> None:
    """Compile a program in `folder` and run it. Fails if it does, or if the sanitizer prints a warning.

    suppressions: lines for ThreadSanitizer.
    has_kernels: whether a source registers kernels, which some checks of pointers prevent.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the native library needs a C++ compiler, and so does this test"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-I{CSRC}", "-DOCTAVO_ISA=scalar"]
    if sanitizer is not None:
        flags += [f"-fsanitize={sanitizer}", *([WITHOUT_POINTER_CHECKS] if has_kernels else [])]
    binary, file = folder / "stress", folder / "suppressions"
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(binary)], check=True)
    file.write_text(suppressions)
    environment = os.environ | {"TSAN_OPTIONS": f"suppressions={file}"}
    result = subprocess.run(
        [str(binary), *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WARNING" not in result.stderr
