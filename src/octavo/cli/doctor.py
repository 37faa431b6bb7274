"""`octavo doctor`: check this machine and the settings that Octavo will use."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo import __version__
from octavo.cli.terminal import write_facts, write_json
from octavo.engine.loading.progress_bar import size
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.backends import BackendDescription

_DEPENDENCIES = ("numpy", "tokenizers", "jinja2", "huggingface_hub", "click", "rich")
_INTERESTING_FLAGS = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm",
)  # fmt: skip
_SAMPLE_BYTES = 64 << 20  # per thread; larger than any cache
_SAMPLE_S = 0.25


@click.command()
@click.option("--json", "as_json", is_flag=True, help="write JSON")
def doctor(*, as_json: bool) -> None:
    """Check this machine: processor, memory, cache, dependencies.

    Also shows the instruction sets, and the number of threads with the reasons for it.
    """
    findings = examine()
    if as_json:
        write_json(findings)
        return
    write_facts(
        {
            "octavo": f"{findings['version']}, Python {findings['python']}, {findings['system']}",
            "processor": findings["processor"],
            "instruction sets": ", ".join(findings["cpu_flags"]) or "none that Octavo uses",
            "kernels": f"{findings['isa']}: {findings['isa_reason']}",
            "threads": f"{findings['threads']}: {'; '.join(findings['thread_reasons'])}",
            **({"torch": findings["torch"]} if findings["torch"] else {}),
            **({"kernel libraries": "; ".join(findings["kernel_libraries"])} if findings["kernel_libraries"] else {}),
            "memory": f"{size(findings['available_bytes'])} available",
            "read bandwidth": f"{findings['read_bytes_per_s'] / 1e9:.1f} GB/s (short measurement)",
            "models": f"{findings['cache_dir']}, {size(findings['cache_bytes'])}; {findings['network']}",
            "packed weights": f"{findings['pack_cache_dir']}, {size(findings['pack_cache_bytes'])} (included above)",
            "dependencies": ", ".join(f"{name} {version}" for name, version in findings["dependencies"].items()),
            "problems": "; ".join(findings["problems"]) or "none",
        },
        colours={"problems": "red" if findings["problems"] else "green"},
    )


def examine() -> dict[str, Any]:
    """Return findings by their names in the JSON output. Failed checks are under `problems`."""
    from octavo import env
    from octavo.bench import machine

    problems: list[str] = []
    processor = machine.processor()
    flags = processor.get("flags", processor.get("Features", "")).split()
    backend, available_bytes = _backend(problems)
    torch, libraries = _torch()
    cache = env.cache_dir()
    return {
        "version": __version__,
        "python": platform.python_version(),
        "system": machine.system(),
        "processor": processor.get("model name", platform.machine()),
        "cpu_flags": [flag for flag in _INTERESTING_FLAGS if flag in flags],
        "isa": backend.kernels,
        "isa_reason": backend.reason,
        "threads": backend.num_threads,
        "thread_reasons": list(backend.thread_reasons),
        "torch": torch,
        "kernel_libraries": libraries,
        "available_bytes": available_bytes,
        "read_bytes_per_s": _read_bandwidth(backend.num_threads),
        "cache_dir": str(cache),
        "cache_bytes": _folder_bytes(cache),
        "pack_cache_dir": str(env.pack_cache_dir()),
        "pack_cache_bytes": _folder_bytes(env.pack_cache_dir()),
        "network": "network disabled" if env.is_offline() else "network allowed",
        "dependencies": {name: _version(name, problems) for name in _DEPENDENCIES},
        "problems": problems,
    }


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _backend(problems: list[str]) -> tuple[BackendDescription, int]:
    """Return the description of the backend cpu, and its free memory in bytes."""
    from octavo.backends import BackendDescription, get_backend

    try:
        backend = get_backend("cpu")
        found = backend.describe()
    except OctavoError as error:
        problems.append(str(error))
        return BackendDescription("none", "no native library", 1), 0
    problems.extend(found.problems)
    return found, backend.memory().available_bytes


def _torch() -> tuple[str | None, list[str]]:
    """Return a description of the GPU that the backend `torch` would use, and the names of its kernel libraries.

    The description is None if torch is not installed.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return None, []
    from octavo.backends import get_backend

    try:
        found = get_backend("torch").describe()
    except (OctavoError, ImportError, OSError, RuntimeError) as error:  # torch or its driver is broken
        return f"{type(error).__name__}: {error}", []
    return f"{_version('torch', [])}: {found.kernels}, {found.reason}", list(found.libraries)


def _version(name: str, problems: list[str]) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        problems.append(f"{name} is not installed")
        return "missing"


def _read_bandwidth(num_threads: int) -> float:
    """Measure the memory read bandwidth of all threads together in bytes/s, as the best of a few measurements."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    arrays = [np.ones(_SAMPLE_BYTES // 8, np.uint64) for _ in range(num_threads)]
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        deadline = time.monotonic() + _SAMPLE_S
        while not best or time.monotonic() < deadline:
            started = time.perf_counter()
            list(pool.map(np.max, arrays))
            best = max(best, num_threads * _SAMPLE_BYTES / (time.perf_counter() - started))
    return best
