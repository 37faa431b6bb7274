"""Compiles the kernels for a GPU that is not present, and prints the resources they use as JSON.

`python -m tests.support.cross_compile 90` calls the kernels' functions with tensors that have no data (`meta`), so they
choose the same tiles and specializations as on a GPU; launches end after compilation. The output is the record of that
architecture, `tests/backends/torch/kernels/resources_90.json`. Names of cases may follow the architecture, to compile
only those.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class _Driver:
    """The part of Triton's driver that compilation needs."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


def compiled(arch: int, only: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield (case, compiled kernel) for every launch of the cases of `tests.support.kernel_cases`.

    only: names of cases; empty for all.
    """
    driver.set_active(_Driver(arch))
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ARG001
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(kernel)
        return kernel

    JITFunction.run = compile_only
    from tests.support import kernel_cases

    for case, call in kernel_cases.cases(arch):
        if only and case not in only:
            continue
        found.clear()
        call()
        assert found, f"{case} launches nothing"
        yield from ((case, kernel) for kernel in found)


def resources(kernel: Any) -> dict[str, int | str]:
    """Return the target, registers per thread, bytes of local memory (spills) and shared memory, and matrix
    instructions.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    ptx = kernel.asm["ptx"]
    [target] = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    return {
        "target": target,
        "registers": usage["REG"],
        "spilled": usage["STACK"] + usage["LOCAL"],
        "shared": int(kernel.metadata.shared),
        "warps": int(kernel.metadata.num_warps),
        "mma": len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", ptx)),
    }


def main() -> None:
    table: dict[str, dict[str, int | str]] = {}
    for case, kernel in compiled(int(sys.argv[1]), sys.argv[2:]):
        table[f"{case}: {kernel.name.lstrip('_')}"] = resources(kernel)
    rows = (f" {json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
    sys.stdout.write("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    torch.set_default_device("meta")
    main()
