#!/usr/bin/env python3
"""Check the promises about the CPU install, in the environment that runs this script.

There is no torch and no transformers among the dependencies, everything takes at most 200 MB, and `import octavo` takes
at most 0.15 s.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from importlib import metadata

MAX_MEGABYTES = 200
MAX_IMPORT_SECONDS = 0.15
FORBIDDEN = {"torch", "transformers"}


def closure(name: str) -> dict[str, metadata.Distribution]:
    """Return the distribution and all its dependencies, without extras, by normalized name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in found:
            continue
        try:
            found[key] = metadata.distribution(key)
        except metadata.PackageNotFoundError:
            continue  # needed on another platform only
        needed = [r for r in found[key].requires or [] if "extra ==" not in r]
        waiting.extend(re.split(r"[\s;<>=!~\[(]", r, maxsplit=1)[0] for r in needed)
    return found


def installed_bytes(distribution: metadata.Distribution) -> int:
    total = 0
    for file in distribution.files or []:
        path = file.locate()
        if path.suffix != ".pyc" and path.is_file():
            total += path.stat().st_size
    return total


def import_seconds() -> float:
    """Return the seconds that `import octavo` adds to interpreter startup when files are in the page cache: the best of
    seven runs.
    """

    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    run("import octavo")
    both = [(run("import octavo"), run("pass")) for _ in range(7)]
    return min(with_octavo for with_octavo, _ in both) - min(alone for _, alone in both)


def main() -> int:
    distributions = closure("octavo")
    sizes = {name: installed_bytes(d) / 1e6 for name, d in distributions.items()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:8]:
        print(f"{size:8.1f} MB  {name}")
    seconds = import_seconds()
    print(f"{sum(sizes.values()):8.1f} MB  in all, {len(sizes)} distributions (limit {MAX_MEGABYTES} MB)")
    print(f"import octavo: {seconds * 1000:.0f} ms (limit {MAX_IMPORT_SECONDS * 1000:.0f} ms)")
    problems = [f"{name} is a dependency" for name in sorted(FORBIDDEN & set(sizes))]
    if sum(sizes.values()) > MAX_MEGABYTES:
        problems.append("too large")
    if seconds > MAX_IMPORT_SECONDS:
        problems.append("import too slow")
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
