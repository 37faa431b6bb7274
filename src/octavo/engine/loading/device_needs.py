"""The memory that a model needs on and off the GPU, and the speed to expect."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.memory import Sizes
from octavo.backends.placement import Placement
from octavo.backends.split import SplitBackend
from octavo.backends.split_sizes import SplitSizes
from octavo.config import EngineConfig
from octavo.engine.loading.devices import backend_of
from octavo.graph.segments import layer_borders


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """The needs of a model on a GPU and, if the GPU is too small, also on the CPU. Sizes are in bytes.

    cpu_experts: number of GPU layers whose experts are on the CPU.
    streamed_layers: number of layers copied to the GPU in each step; their weights are `cpu_weight_bytes`.
    reason: why layers are streamed, or computed on the CPU.
    limit_bytes: GPU memory that may be used.
    tokens_per_s: upper limit for all users together, from measured rates.
    """

    num_layers: int
    gpu_layers: int
    cpu_experts: int
    streamed_layers: int
    reason: str
    limit_bytes: int
    gpu_weight_bytes: int
    gpu_workspace_bytes: int
    gpu_kv_bytes_per_token: int
    cpu_weight_bytes: int
    cpu_kv_bytes_per_token: int
    tokens_per_s: float


def device_needs(config: EngineConfig, sizes: Sizes, users: int, context: int) -> DeviceNeeds | None:
    """Return a model's needs on a device, or None if the backend has no device of its own. Measures for about a second.

    context: tokens of each user.
    """
    backend = backend_of(config)
    if not isinstance(backend, SplitBackend):
        return None
    count = len(layer_borders(sizes.graph))
    placement, reason = Placement(count, count), ""
    parts: list[tuple[bool, Sizes]] = [(True, sizes)]
    gpu, cpu = sizes, None
    if isinstance(sizes, SplitSizes):
        parts = [(part.on_device, part.sizes) for part in sizes.parts]
        gpu, cpu, placement, reason = sizes.on(device=True), sizes.on(device=False), sizes.placement, sizes.reason
    seconds = backend.offload_rates().step_seconds(parts, users, users, context)
    return DeviceNeeds(
        num_layers=count,
        gpu_layers=placement.device_layers,
        cpu_experts=placement.cpu_experts,
        streamed_layers=placement.streamed_layers,
        reason=reason,
        limit_bytes=backend.device_limit().usable_bytes,
        gpu_weight_bytes=gpu.weight_bytes,
        gpu_workspace_bytes=gpu.workspace_bytes,
        gpu_kv_bytes_per_token=gpu.cache.token_bytes,
        cpu_weight_bytes=cpu.weight_bytes if cpu is not None else 0,
        cpu_kv_bytes_per_token=cpu.cache.token_bytes if cpu is not None else 0,
        tokens_per_s=users / seconds,
    )
