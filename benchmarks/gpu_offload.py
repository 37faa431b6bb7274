"""Models that do not fit on a GPU: layers are streamed to it in each step, or computed by the CPU."""

from __future__ import annotations

import math
from typing import Any

from gpu_cases import Case, Figure, Machine, WrongResultError
from gpu_models import decode_s, loaded, prompt_s

from octavo.backends import Executor, get_backend
from octavo.backends.split import Device, SplitBackend
from octavo.backends.torch.compile import TorchBackend
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.graph.segments import layer_borders

_TYPE = "bf16"


def _backend(machine: Machine) -> TorchBackend:
    return TorchBackend(machine.device, machine.dtype)


def stream(machine: Machine) -> list[Figure]:
    """Stream all layers, and compare a prompt's time with the longer of copying and computing; 1 is optimal."""
    s = machine.shapes
    resident = {count: prompt_s(loaded(machine, _TYPE), count) for count in s.prefills}
    copied = 0

    def place(graph: Any, weights: Any, limits: Any) -> Executor:
        nonlocal copied
        backend = _backend(machine)
        sizes = backend.streamed(backend.sizes(graph, weights, limits), range(len(layer_borders(graph))))
        copied = sizes.host_bytes
        return backend.compile(sizes, weights, limits)

    model = loaded(machine, _TYPE, place)
    try:
        rate = _backend(machine).copy_rate()
        found = [Figure("copied in a step", copied * 1e-9, "GB"), Figure("copy rate", rate * 1e-9, "GB/s")]
        for count, computing in resident.items():
            seconds = prompt_s(model, count)
            longer = max(math.ceil(count / s.step_tokens) * copied / rate, computing)
            found += [
                Figure(f"prompt of {count}, streamed", count / seconds, "tokens/s"),
                Figure(f"prompt of {count}, over the longer part", seconds / longer, "x"),
            ]
    finally:
        model.executor.close()
    return found


def offload(machine: Machine) -> list[Figure]:
    """Measure decoding one sequence and prompts with half of the layers off the GPU, both ways."""
    try:
        cpu = get_backend("cpu")
    except OctavoError as error:
        raise WrongResultError(f"the CPU cannot compute here: {error}") from error
    s, found = machine.shapes, []
    device: Device = _backend(machine)
    for way in ("cpu", "stream"):
        config = EngineConfig(device=None, gpu_layers=s.layers // 2, gpu_offload=way)
        model = loaded(machine, _TYPE, SplitBackend(device, cpu, config).compile)
        try:
            found.append(Figure(f"{way}, batch 1", 1 / decode_s(model, 1), "tokens/s"))
            found += [Figure(f"{way}, prompt of {n}", n / prompt_s(model, n), "tokens/s") for n in s.prefills]
        finally:
            model.executor.close()
    return found


CASES = [Case("stream", "offload", stream, 90), Case("offload", "offload", offload, 120)]
