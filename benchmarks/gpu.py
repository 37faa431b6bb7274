"""Everything about speed on a GPU in one go: correctness, ceilings, kernels and whole models, within a time limit.

    python benchmarks/gpu.py --minutes 9 --json gpu.json [--only "bf16: decode"]
    python benchmarks/gpu.py --smoke --json smoke.json

The record is written after each case, and a run goes on with the record that is there. The cases run in a process of
their own: if one crashes it, the next ones run in a new one. `--smoke` needs no GPU: every case runs at tiny sizes on
the CPU, kernels under Triton's interpreter. Needs torch and numpy, and Octavo's native module only for `offload`; its
tests with whole models also want transformers, gguf and msgspec. `gpu_report.py` makes the page.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_report
from report import commit

if TYPE_CHECKING:
    from gpu_cases import Case, Figure, Machine

ROOT = Path(__file__).resolve().parents[1]
# Octavo need not be installed, and the tests' helpers never are. An installed one has its native library.
SOURCES = [str(ROOT), *([] if importlib.util.find_spec("octavo") else [str(ROOT / "src")])]
TESTS = ("tests/backends/torch/kernels", "tests/backends/torch/test_tokens.py")
PAGE = ROOT / "docs" / "lab" / "performance_gpu.md"
_BROKEN_DEVICE = 3  # exit status of a worker whose device takes no more work
_MOST_OVERRUN = 3  # times the seconds that a case needs; then its process is ended
_STARTED = "did not end"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="start no case that would end later; 0 writes only the page"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="the record, which is continued")
    parser.add_argument(
        "--page", type=Path, help=f"the page; the default is {PAGE.relative_to(ROOT)}, or none with --smoke"
    )
    parser.add_argument(
        "--only", default="", help="only the cases with these words in their name, also if they are done"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)  # seconds that are left
    return parser.parse_args(argv)


def read(path: Path) -> dict[str, Any]:
    """Read the record so far."""
    empty: dict[str, Any] = {"machine": {}, "ceilings": {}, "known": {}, "cases": {}}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else empty
    return found


def save(record: dict[str, Any], path: Path) -> None:
    """Save the record atomically, so that it is whole whenever the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(record, indent=1), encoding="utf-8")
    beside.replace(path)


def is_wanted(case: Case, record: dict[str, Any], only: str) -> bool:
    """Return True if a case must still run: once, and again on another commit if it had no figures."""
    if only:
        return only in case.name
    known = record["cases"].get(case.name)
    return known is None or (known["state"] != "done" and known["commit"] != commit())


def correctness(machine: Machine) -> list[Figure]:
    """Run the tests of the kernels, compiled for this GPU."""
    from gpu_cases import Figure, WrongResultError

    missing = [path for path in TESTS if not (ROOT / path).exists()]
    if missing:
        raise WrongResultError(f"there are no {missing}")
    if not machine.is_gpu:  # where every test run has them
        return [Figure("passed", 0.0, "tests")]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q", "-m", "not slow"]
    command += ["-n", "8", "--confcutdir=tests/backends/torch", "--continue-on-collection-errors", *TESTS]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    lines = done.stdout.splitlines()
    if done.returncode != 0:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise WrongResultError("; ".join(failed[:20]) or done.stdout[-1000:] + done.stderr[-1000:])
    passed = re.search(r"(\d+) passed", done.stdout)
    return [Figure("passed", float(passed[1]) if passed else 0.0, "tests")]


def all_cases() -> list[Case]:
    """Return the cases in the order in which a short time is best spent."""
    import gpu_ceilings
    import gpu_kernels
    import gpu_models
    import gpu_offload
    import gpu_peers
    import gpu_products
    import gpu_providers
    import gpu_real
    from gpu_cases import Case

    first = [Case("tests", "correctness", correctness, 240)]
    kernels = [*gpu_products.CASES, *gpu_providers.CASES, *gpu_kernels.CASES]
    last = [*gpu_offload.CASES, *gpu_peers.CASES]
    return [*gpu_ceilings.CASES, *first, *gpu_real.CASES, *gpu_models.CASES, *kernels, *last]


def described() -> dict[str, Any]:
    """Return the GPU and the versions, for the record."""
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gb": properties.total_memory * 1e-9,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/gpu.py --minutes 9 --json gpu.json",
    }


def work(args: argparse.Namespace, seconds: float) -> int:
    """Run the remaining cases as long as there is time."""
    sys.path[1:1] = SOURCES
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined
    import torch
    from gpu_cases import TINY, Machine, Shapes

    end = time.monotonic() + seconds
    record = read(args.json)
    torch.set_num_threads(1 if args.smoke else 8)
    device = torch.device("cpu" if args.smoke else "cuda")
    machine = Machine(device, TINY if args.smoke else Shapes(), record["ceilings"], record["known"])
    if not args.smoke:
        record["machine"] = described()
    for case in all_cases():
        if not is_wanted(case, record, args.only):
            continue
        if not args.smoke and time.monotonic() + case.needs_s > end:
            print(f"{case.name}: no time left for about {case.needs_s:.0f} s", flush=True)
            continue
        record["cases"][case.name] = {"state": _STARTED, "group": case.group, "commit": commit(), "figures": []}
        save(record, args.json)
        record["cases"][case.name] |= outcome(case, machine)
        save(record, args.json)
        if not args.smoke and _is_broken():
            return _BROKEN_DEVICE
    return 0


def outcome(case: Case, machine: Machine) -> dict[str, Any]:
    """Run one case and return its state and figures. Its process ends if it takes several times as long as it may."""
    from gpu_cases import WrongResultError, as_json

    begin = time.perf_counter()
    if machine.is_gpu:
        faulthandler.dump_traceback_later(_MOST_OVERRUN * case.needs_s, exit=True)
    found: dict[str, Any] = {"state": "done"}
    try:
        found["figures"] = as_json(case.run(machine))
    except WrongResultError as error:
        found |= {"state": "wrong result", "error": str(error)}
    except Exception as error:  # the other cases still have their figures
        found |= {"state": "failed", "error": f"{type(error).__name__}: {error}"[:600]}
        traceback.print_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    found["seconds"] = round(time.perf_counter() - begin, 2)
    print(f"{case.name}: {found['state']} in {found['seconds']:.1f} s {found.get('error', '')}", flush=True)
    for figure in found.get("figures", []):
        share = "" if figure["fraction"] is None else f"  {figure['fraction']:.0%}"
        print(f"    {figure['name']}: {figure['value']:.4g} {figure['unit']}{share}", flush=True)
    return found


def _is_broken() -> bool:
    """Return True if the device no longer accepts work from this process, as after an illegal access."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    is_worker = args.worker is not None or args.smoke
    status = work(args, args.worker or 0.0) if is_worker else supervise(args)
    page = args.page or (None if args.smoke or args.worker is not None else PAGE)
    if page is not None:
        gpu_report.write(read(args.json), page)
        print(f"the page is {page}")
    failed = [name for name, case in read(args.json)["cases"].items() if case["state"] != "done"]
    if args.smoke and failed:
        print("failed: " + ", ".join(failed))
        return 1
    return status


def supervise(args: argparse.Namespace) -> int:
    """Start workers until the time is over or nothing is left. Without a GPU, report that."""
    import torch

    if args.minutes > 0 and not torch.cuda.is_available():
        print("torch finds no GPU, so nothing is measured; --smoke runs every case at tiny sizes on the CPU")
        return 1
    end = time.monotonic() + 60 * args.minutes
    status = _BROKEN_DEVICE if args.minutes > 0 else 0
    while status != 0 and (left := end - time.monotonic()) > 0:
        command = [sys.executable, __file__, "--worker", str(left), "--json", str(args.json), "--only", args.only]
        status = subprocess.run(command, check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
