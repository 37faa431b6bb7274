"""The Linux control groups that this process belongs to."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def control_groups(controller: str, self_cgroup: Path, cgroups: Path) -> list[Path]:
    """Return the directories of this process's groups that have this controller (v1 or v2), innermost first.

    self_cgroup: `/proc/self/cgroup` or another file in its format.
    cgroups: the mount point.

    Empty if nothing can be read.
    """
    found = []
    with suppress(OSError, ValueError):
        for line in self_cgroup.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # In a container the path may be that of the host, which is not visible; its own group is the root then.
            parts = [part for part in path.split("/") if part not in ("", ".", "..")]
            if controllers == "" or controller in controllers.split(","):
                for root in dict.fromkeys((cgroups / controllers, cgroups / (controller if controllers else ""))):
                    found += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return found
