"""The rates of a torch device, measured with its own operations in a fraction of a second."""

from __future__ import annotations

import torch

from octavo.backends.rates import Rates, best_rate

_GPU_BYTES, _CPU_BYTES = 1 << 30, 64 << 20  # beyond every cache
_GPU_ROWS, _CPU_ROWS = 4096, 512


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """dtype: of the products."""
    is_gpu = device.type == "cuda"

    def settled() -> None:
        if is_gpu:
            torch.cuda.synchronize(device)

    memory = torch.ones((_GPU_BYTES if is_gpu else _CPU_BYTES) // 4, dtype=torch.float32, device=device)

    def read() -> None:
        memory.sum()
        settled()

    rows = _GPU_ROWS if is_gpu else _CPU_ROWS
    matrix = torch.ones((rows, rows), dtype=dtype, device=device)

    def multiply() -> None:
        matrix @ matrix
        settled()

    copies = 0.0
    if is_gpu:
        pinned = torch.ones(_CPU_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(pinned, device=device)

        def copy() -> None:
            target.copy_(pinned, non_blocking=True)
            settled()

        copies = best_rate(_CPU_BYTES, copy)
    return Rates(best_rate(memory.nbytes, read), best_rate(2.0 * rows**3, multiply), copies)
