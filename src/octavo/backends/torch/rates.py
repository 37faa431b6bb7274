"""The rates of a torch device, measured with the backend's own operations in a fraction of a second."""

from __future__ import annotations

import torch

from octavo.backends.rates import Rates, best_rate

_GPU_BYTES, _CPU_BYTES = 1 << 30, 64 << 20  # larger than any cache
_GPU_ROWS, _CPU_ROWS = 4096, 512
_COPY_BYTES = 64 << 20


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the rates of a device.

    dtype: type of the products.
    """
    is_gpu = device.type == "cuda"

    def settled() -> None:
        if is_gpu:
            torch.cuda.synchronize(device)

    num_bytes = min(_GPU_BYTES, torch.cuda.mem_get_info(device)[0] // 4) if is_gpu else _CPU_BYTES
    memory = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)

    def read() -> None:
        memory.sum()
        settled()

    rows = _GPU_ROWS if is_gpu else _CPU_ROWS
    matrix = torch.ones((rows, rows), dtype=dtype, device=device)

    def multiply() -> None:
        matrix @ matrix
        settled()

    return Rates(best_rate(memory.nbytes, read), best_rate(2.0 * rows**3, multiply))


def measured_copy_rate(device: torch.device) -> float:
    """Measure the bytes per second from pinned main memory to the device."""
    is_gpu = device.type == "cuda"
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=is_gpu)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if is_gpu:
            torch.cuda.synchronize(device)

    return best_rate(source.nbytes, copy)
