"""The ceilings of a device, measured in the same run as everything else: bandwidths, products, launches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from gpu_cases import Case, Figure, Machine, seconds_of
from torch import Tensor


def _kept(machine: Machine, name: str, rate: float, unit: str = "GB/s") -> Figure:
    machine.ceilings[name] = rate
    return Figure(name, rate * (1e-12 if unit == "TFLOP/s" else 1e-9), unit)


def bandwidth(machine: Machine) -> list[Figure]:
    """Measure copies, and reads alone."""
    count = machine.shapes.copied_bytes // 4
    source = machine.normal(count, dtype=torch.float32)
    target = torch.empty_like(source)
    copied = seconds_of(machine, [lambda: target.copy_(source)])
    read = seconds_of(machine, [source.sum])
    return [
        _kept(machine, "copy", 2 * source.nbytes / copied),
        _kept(machine, "read", source.nbytes / read),
    ]


def transfers(machine: Machine) -> list[Figure]:
    """Measure transfers between pinned host memory and the device, in one direction and in both."""
    found = []
    for megabytes in (1, 32, 256) if machine.is_gpu else (1,):
        host = [torch.ones(megabytes << 18, dtype=torch.float32, pin_memory=machine.is_gpu) for _ in range(2)]
        device = [machine.normal(megabytes << 18, dtype=torch.float32) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)] if machine.is_gpu else []  # type: ignore[no-untyped-call]

        def to_device(h: list[Tensor] = host, d: list[Tensor] = device) -> None:
            d[0].copy_(h[0], non_blocking=True)

        def to_host(h: list[Tensor] = host, d: list[Tensor] = device) -> None:
            h[1].copy_(d[1], non_blocking=True)

        def both(
            s: list[torch.cuda.Stream] = streams, run: tuple[Callable[[], None], ...] = (to_device, to_host)
        ) -> None:
            for stream, copy in zip(s, run, strict=False):
                with torch.cuda.stream(stream):
                    copy()

        for name, copy, times in (("to the device", to_device, 1), ("to the host", to_host, 1), ("both", both, 2)):
            copy()
            machine.wait()
            begin = time.perf_counter()
            for _ in range(8):
                copy()
            machine.wait()
            rate = 8 * times * host[0].nbytes / (time.perf_counter() - begin)
            found.append(_kept(machine, f"{name}, {megabytes} MB", rate))
    return found


def products(machine: Machine) -> list[Figure]:
    """Measure the highest rate of the library's products on random numbers, by type."""
    n = machine.shapes.square
    a, b = (machine.normal(n, n) for _ in range(2))
    found = [_kept(machine, "bf16 product", 2 * n**3 / seconds_of(machine, [lambda: a @ b.T]), "TFLOP/s")]
    codes = [torch.randint(-127, 128, (n, n), dtype=torch.int8, device=machine.device) for _ in range(2)]
    time_int8 = seconds_of(machine, [lambda: torch._int_mm(codes[0], codes[1].T)])
    found.append(_kept(machine, "int8 product", 2 * n**3 / time_int8, "TFLOP/s"))
    if machine.is_gpu and torch.cuda.get_device_capability()[0] >= 9:
        narrow = [x.to(torch.float8_e4m3fn) for x in (a, b)]
        one = torch.ones((), device=machine.device)

        def scaled() -> Tensor:
            return torch._scaled_mm(narrow[0], narrow[1].T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        found.append(_kept(machine, "fp8 product", 2 * n**3 / seconds_of(machine, [scaled]), "TFLOP/s"))
    return found


def launches(machine: Machine) -> list[Figure]:
    """Measure the minimum time between two kernels of a graph, and the host's time to start a graph and a kernel."""
    x = machine.normal(64)
    gap = seconds_of(machine, [lambda: x.add_(1.0)] * 64)
    count = 200 if machine.is_gpu else 5
    begin = time.perf_counter()
    for _ in range(count):
        x.add_(1.0)
    eager = (time.perf_counter() - begin) / count
    machine.wait()
    found = [
        Figure("small kernel in a graph", gap * 1e6, "microseconds"),
        Figure("host, one kernel", eager * 1e6, "microseconds"),
    ]
    if machine.is_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(300):  # about as many as a step has
                x.add_(1.0)
        graph.replay()
        machine.wait()
        begin = time.perf_counter()
        for _ in range(20):
            graph.replay()
        host = (time.perf_counter() - begin) / 20
        machine.wait()
        found.append(Figure("host, one graph of 300 kernels", host * 1e6, "microseconds"))
    return found


CASES = [
    Case("bandwidth", "ceilings", bandwidth, 10),
    Case("products of the library", "ceilings", products, 15),
    Case("transfers", "ceilings", transfers, 10),
    Case("launches", "ceilings", launches, 5),
]
