"""Source files of the native library, for tests that compile only some of them."""

from __future__ import annotations

from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"


def platform_sources(waits: str = "linux") -> list[Path]:
    """Return the sources of the platform layer on Linux.

    waits: `portable` uses no futexes.
    """
    found = [path for folder in ("posix", "linux") for path in sorted((CSRC / "platform" / folder).glob("*.cpp"))]
    return [path if path.name != "wait.cpp" else CSRC / "platform" / waits / "wait.cpp" for path in found]
