"""The memory of a model on a GPU and beside it, and the speed to expect of the two together."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.memory import Sizes
from octavo.backends.split import SplitBackend, SplitSizes
from octavo.config import EngineConfig
from octavo.engine.devices import backend_of
from octavo.graph.cost import graph_cost
from octavo.graph.ops import StepSizes
from octavo.graph.segments import layer_borders


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """A model on a GPU and, where that is too small, on the CPU. Sizes in bytes.

    cpu_experts: layers of the GPU whose experts are on the CPU. limit_bytes: of the GPU's memory that may be used.
    tokens_per_s: at most, of all users together, from rates measured now.
    """

    num_layers: int
    gpu_layers: int
    cpu_experts: int
    limit_bytes: int
    gpu_weight_bytes: int
    gpu_workspace_bytes: int
    gpu_kv_bytes_per_token: int
    cpu_weight_bytes: int
    cpu_kv_bytes_per_token: int
    tokens_per_s: float


def device_needs(config: EngineConfig, sizes: Sizes, users: int, context: int) -> DeviceNeeds | None:
    """None on a backend without a device of its own. context: tokens of each user. Measures for about a second."""
    backend = backend_of(config)
    if not isinstance(backend, SplitBackend):
        return None
    count = len(layer_borders(sizes.graph))
    if isinstance(sizes, SplitSizes):
        parts = [(part.on_device, part.sizes) for part in sizes.parts]
        gpu, cpu, placement = sizes.on(device=True), sizes.on(device=False), sizes.placement
        gpu_layers, cpu_experts = placement.device_layers, placement.cpu_experts
    else:
        parts, gpu, cpu, gpu_layers, cpu_experts = [(True, sizes)], sizes, None, count, 0
    seconds, rates = 0.0, {side: backend.rates(on_device=side) for side in {side for side, _ in parts}}
    for on_device, part in parts:
        step = StepSizes(users, users, users, context, part.kv_element_bytes)
        seconds += rates[on_device].seconds(graph_cost(part.graph, step, part.weights))
    return DeviceNeeds(
        num_layers=count,
        gpu_layers=gpu_layers,
        cpu_experts=cpu_experts,
        limit_bytes=backend.device_limit().usable_bytes,
        gpu_weight_bytes=gpu.weight_bytes,
        gpu_workspace_bytes=gpu.workspace_bytes,
        gpu_kv_bytes_per_token=gpu.cache.token_bytes,
        cpu_weight_bytes=cpu.weight_bytes if cpu is not None else 0,
        cpu_kv_bytes_per_token=cpu.cache.token_bytes if cpu is not None else 0,
        tokens_per_s=users / seconds,
    )
