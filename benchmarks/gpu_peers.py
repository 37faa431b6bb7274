"""Products of four bits by other projects and by ours in the same shape: gemlite and exllamav3, which are optional.

A peer that is not installed is built from its source package in `build/peers`; `gpu_session.py` says how it gets there.
A peer that is not there, does not build or refuses has a figure `NAME: REASON` in the unit `not here`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_cases import Case, Figure, Machine, WrongResultError, check, in_turns, seconds_of
from gpu_products import random_of, tall
from torch import Tensor

from octavo.backends.torch.kernels.linear import linear
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.providers.grouped import grouped_codes

SOURCES = Path(__file__).resolve().parents[1] / "build" / "peers"
_BUILD_S = 240
_FORMAT, _BITS = "I4_128_Z", 4
_BASE = 64  # rows of the random weight, repeated to the height of a matrix


class PeerProduct(NamedTuple):
    """A product, its inputs in the peer's type, and the last `_BASE` rows of its matrix in float32."""

    call: Callable[[], Tensor]
    x: Tensor
    numbers: Tensor


class Peer(NamedTuple):
    """A project with kernels.

    compiler: a program that its build needs.
    """

    name: str
    compiler: str | None
    product: Callable[[Tensor, Planes], PeerProduct]


def gemlite_product(x: Tensor, p: Planes) -> PeerProduct:
    """The same codes, scales and zeros as ours."""
    core: Any = importlib.import_module("gemlite.core")
    codes, scales, zeros = grouped_codes(p)
    assert zeros is not None
    kind = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}[x.dtype]
    layer = core.GemLiteLinearTriton(
        _BITS, p.group, p.shape[1], p.shape[0],
        input_dtype=getattr(core.DType, kind), output_dtype=getattr(core.DType, kind),
    )  # fmt: skip
    layer.pack(codes.to(torch.uint8), scales.to(x.dtype), zeros.to(x.dtype), None)
    last = [each[-_BASE:].float() for each in (codes, scales, zeros)]
    scale, zero = (each.repeat_interleave(p.group, dim=1)[:, : p.shape[1]] for each in last[1:])
    return PeerProduct(partial(layer.forward, x), x, (last[0] - zero) * scale)


def exllamav3_product(x: Tensor, p: Planes) -> PeerProduct:
    """Random codes: every code of a trellis is legal. The kernels take float16."""
    exl3: Any = importlib.import_module("exllamav3.modules.quant.exl3")
    out, width = p.shape
    tiles = (width // 16, out // 16, 16 * _BITS)
    trellis = torch.randint(-(1 << 15), 1 << 15, tiles, dtype=torch.int16, device=x.device)
    signs = [(torch.randint(0, 2, (n,), device=x.device) * 2 - 1).half() for n in (width, out)]
    layer, half = exl3.LinearEXL3(None, width, out, suh=signs[0], svh=signs[1], trellis=trellis), x.half()
    return PeerProduct(partial(layer.forward, half, {}), half, layer.get_weight_tensor().T[-_BASE:].float())


PEERS = (Peer("gemlite", None, gemlite_product), Peer("exllamav3", "nvcc", exllamav3_product))


def refusal(peer: Peer, sources: Path = SOURCES) -> str | None:
    """The reason why a peer cannot be imported, after an attempt to build it; None if it can."""
    built = sources / "built"
    if str(built) not in sys.path:
        sys.path.append(str(built))
    if importlib.util.find_spec(peer.name) is not None:
        return None
    packages = sorted(sources.glob(f"{peer.name}-*.tar.gz"))
    if not packages:
        return f"not installed, and {sources} has no {peer.name}-*.tar.gz"
    if peer.compiler is not None and shutil.which(peer.compiler) is None:
        return f"its build needs {peer.compiler}, which is not on this machine"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    command += ["--target", str(built), str(packages[-1])]
    environment = os.environ | {"MAX_JOBS": str(os.cpu_count() or 1)}
    if torch.cuda.is_available():
        environment["TORCH_CUDA_ARCH_LIST"] = ".".join(map(str, torch.cuda.get_device_capability()))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return f"its build takes more than {_BUILD_S} s"
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines()]
        errors = [line for line in lines if "rror: " in line and line != "error: subprocess-exited-with-error"]
        return f"it does not build: {[*errors, f'exit status {done.returncode}'][0][:200]}"
    importlib.invalidate_caches()
    return None if importlib.util.find_spec(peer.name) else f"its package has no module {peer.name}"


def compared(machine: Machine, peer: Peer) -> list[Figure]:
    """The widest product of a layer by both, and the peer's time over ours."""
    if (reason := refusal(peer)) is not None:
        return [Figure(f"{peer.name}: {reason}", 0.0, "not here")]
    out, width = machine.shapes.widest
    small = planes_of(random_of(_FORMAT, (_BASE, width)))
    assert small is not None
    found = []
    for rows in (1, 8, 32, 128) if machine.is_gpu else (3,):

        def make(count: int = rows) -> Callable[[], object]:
            return partial(linear, machine.normal(count, width), tall(small, out, machine))

        calls = in_turns(machine, make, small.nbytes * out / _BASE)
        ours = seconds_of(machine, calls)
        found.append(Figure(f"ours, rows {rows}", ours * 1e6, "microseconds"))
        try:
            products = [peer.product(*call.args) for call in calls]  # type: ignore[attr-defined]
            first = products[0]
            check(f"{peer.name}, rows {rows}", first.call()[:, -_BASE:], first.x.float() @ first.numbers.T, 2e-2)
            theirs = seconds_of(machine, [product.call for product in products])
        except WrongResultError:
            raise
        except Exception as error:  # a peer may refuse in any way; ours keeps its figures
            return [*found, Figure(f"{peer.name}: {type(error).__name__}: {error}"[:300], 0.0, "not here")]
        found.append(Figure(f"{peer.name}, rows {rows}", theirs * 1e6, "microseconds"))
        found.append(Figure(f"{peer.name} over ours, rows {rows}", theirs / ours, "x"))
    return found


CASES = [
    Case(f"peers, {peer.name}", "peers", partial(compared, peer=peer), 40 if peer.compiler is None else _BUILD_S + 40)
    for peer in PEERS
]
