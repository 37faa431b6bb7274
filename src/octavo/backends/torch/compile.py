"""Compilation of graphs for a torch device, and the amount of memory that they will need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from octavo.backends import (
    BackendDescription,
    ExecutorLimits,
    PackCacheOptions,
    Paging,
    RankGroup,
    check_model_len,
)
from octavo.backends.memory import MemoryBudget, Sizes, StreamedSizes, host_memory
from octavo.backends.parameters import weight_of
from octavo.backends.rates import Rates
from octavo.backends.torch.adapters import table_bytes
from octavo.backends.torch.cache import CacheNumbers, cache_sizes, cache_types
from octavo.backends.torch.cache_factors import cache_factors
from octavo.backends.torch.eager import dequantized
from octavo.backends.torch.executor import StepMode, TorchExecutor, current, room_for, triton_calls
from octavo.backends.torch.graphs import Capture, CudaReplay
from octavo.backends.torch.operations import check_operation
from octavo.backends.torch.pieces import MOST_TOKENS
from octavo.backends.torch.providers import humming
from octavo.backends.torch.providers.choice import OWN, choices, choose, product_problems, report
from octavo.backends.torch.providers.problems import Place, ProductProblem
from octavo.backends.torch.rank_group import TorchRankGroup, join_group
from octavo.backends.torch.rates import measured_copy_rate, measured_rates
from octavo.backends.torch.streamed_weights import StreamPlan, load_streamed, places_of, streamed_parameters
from octavo.backends.torch.weights import (
    DeviceWeights,
    held_type,
    is_coded,
    multiplied_by_codes,
    plain_types,
    vector_type,
    without_kernel,
)
from octavo.backends.torch.workspace import step_plan, unplaced_bytes
from octavo.config import KVDtype, LoadProgress
from octavo.errors import UsageError
from octavo.graph import passes
from octavo.graph.adapters import with_low_rank
from octavo.graph.builder import Graph
from octavo.graph.domains import check_limits
from octavo.graph.layer_formats import layer_formats
from octavo.graph.passes import optimize
from octavo.graph.values import Parameter
from octavo.platform import memory
from octavo.quantization.packed import Weight

logger = logging.getLogger(__name__)

PASSES = (passes.fuse_attention, passes.fuse_gated_linears, passes.fuse_residual, passes.fuse_norm,
          passes.select_rows_early)  # fmt: skip
_SAMPLER_BYTES = 64  # per logit: float64 weights, sums, orders


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Implements `octavo.backends.Backend` on one device.

    dtype: type of matrices and of the values in a step.
    cache_dtype: type of keys and values that are not int8.
    capture: how to capture steps with one token per sequence.
    deterministic: a sequence's results do not depend on other sequences in the step.
    group: the ranks that compute the other parts of a graph.
    prompt_tokens: tokens of the largest captured step that contains parts of prompts; 0 means that none is captured.
    """

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype = torch.float16
    capture: Capture | None = None
    deterministic: bool = False
    group: TorchRankGroup | None = None
    prompt_tokens: int = 0

    PAGES_WEIGHTS = False

    @classmethod
    def on(cls, name: str | None = None) -> TorchBackend:
        """Return the backend on the device `name`, such as `cpu`, `cuda` or `cuda:1`.

        None means the GPU if there is one. Raises UsageError if the device is missing.
        """
        try:
            device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError:
            raise UsageError(f"torch has no device {name!r}; give cpu, cuda or cuda:1") from None
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"the torch backend runs on cpu and cuda, not on {device.type}")
        if device.type == "cuda" and not (
            torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        ):
            raise UsageError(
                f"the device {device} does not exist: torch {torch.__version__} finds "
                f"{torch.cuda.device_count()} GPUs; choose another one, or leave device and backend out"
            )
        if device.type == "cpu":
            return cls(device, torch.float32)
        return cls(device, torch.bfloat16, capture=CudaReplay, prompt_tokens=MOST_TOKENS)

    def compile(
        self,
        graph: Graph | Sizes,
        weights: Mapping[str, Weight],
        limits: ExecutorLimits,
        *,
        num_threads: int = 0,
        progress: LoadProgress | None = None,
        pack_cache: PackCacheOptions | None = None,
        kv_dtype: KVDtype = "float16",
    ) -> TorchExecutor:
        """See `octavo.backends.Backend.compile`."""
        if not isinstance(graph, Sizes):
            graph = self.sizes(graph, weights, limits, num_threads=num_threads, kv_dtype=kv_dtype)
        planned = graph
        for node in planned.graph.nodes:
            check_operation(node)
        check_model_len(planned.graph, limits)
        for line in planned.providers:
            logger.info("%s", line)
        with room_for("the weights", planned.weight_bytes):
            if isinstance(planned, StreamedSizes):
                on_disk = pack_cache if pack_cache is not None and pack_cache.resident_bytes is not None else None
                streamed = StreamPlan(planned.layers, on_disk, planned.host_bytes)
                held = load_streamed(planned.graph, weights, self.dtype, self.device, streamed, progress)
            else:
                held = DeviceWeights(planned.graph, weights, self.dtype, self.device, progress)
        sizes = (planned.cache, planned.workspace_bytes)
        types = cache_types(planned.kv_formats, self.cache_dtype)
        # CUDA graphs do not contain copies on other streams. Exchanges in captured steps have not been tried.
        capture = None if self.group is not None or held.streamed is not None else self.capture
        mode = StepMode(self.device, capture, self.deterministic, self.group, self.prompt_tokens)
        # Streamed layers have no numbers on the device yet.
        source = held.__getitem__ if held.streamed is None else dequantized(weights, keep=False)
        numbers = CacheNumbers(types, cache_factors(planned.graph, source, types))
        places = step_plan(
            planned.graph, limits, self.dtype, triton_calls(self.device), multiplied_by_codes(planned.matrices)
        )
        return TorchExecutor(planned.graph, held, limits, sizes, places, numbers, mode)

    def sizes(
        self,
        graph: Graph,
        weights: Mapping[str, Weight],
        limits: ExecutorLimits,
        *,
        num_threads: int = 0,  # noqa: ARG002 - torch decides
        kv_dtype: KVDtype = "float16",
    ) -> Sizes:
        """See `octavo.backends.Backend`."""
        check_limits(graph, limits.rows)
        graph = optimize(graph, with_low_rank(PASSES, limits.adapters))
        formats = layer_formats(graph, lambda p: weight_of(weights, p).dequantize(), kv_dtype)
        calls = triton_calls(self.device)
        written = without_kernel(graph, has_kernels=calls is not None)
        matrices = {
            p: held_type(weights, p, self.dtype, has_kernel=p not in written) for p in graph.parameters if p.is_matrix
        }
        types = plain_types(graph, self.dtype)
        held = {p: prod(p.shape) * types[p].itemsize for p in graph.parameters}
        held |= {p: found.packed_bytes for p, found in matrices.items()}
        place = Place.of(self.device, self.dtype, repeats=self.deterministic)
        cached = cache_types(formats, self.cache_dtype)
        providers: tuple[str, ...] = ()
        provided: dict[Parameter, ProductProblem] = {}
        if calls is not None:
            problems = product_problems(graph, matrices, place)
            provided = {p: q for p, q in problems.items() if choose(q).winner != OWN}
            # A library's packed form of a matrix takes memory in addition to the planes.
            held |= {p: held[p] + humming.extra_bytes(q) for p, q in provided.items()}
            providers = tuple(choice.line for choice in choices(graph, problems.values(), place, cached))
        values = step_plan(graph, limits, self.dtype, calls, multiplied_by_codes(matrices)).total_bytes
        coded = {p: held.type_name for p, held in matrices.items() if is_coded(held)}
        values += 0 if calls is None else unplaced_bytes(graph, limits, self.dtype, coded, provided)
        logits = max((limits.rows[v.rows] * v.cols for v in graph.outputs), default=0) if graph.makes_logits else 0
        beside = table_bytes(graph, self.dtype) + (0 if calls is None else calls.angles_bytes(graph, limits))
        return Sizes(
            graph,
            held,
            matrices,
            values + logits * _SAMPLER_BYTES + beside,
            cache_sizes(graph, cached, vector_type(self.dtype)),
            formats,
            providers=providers,
        )

    def streamed(self, sizes: Sizes, layers: Sequence[int]) -> StreamedSizes:
        """See `octavo.backends.split.Device`."""
        by_layer = [found for found in streamed_parameters(sizes.graph, layers).values() if found]
        largest = max((sum(-(-sizes.weights[p] // 256) * 256 for p in found) for found in by_layer), default=0)
        hosted = tuple(p for found in by_layer for p in found)
        return StreamedSizes(
            sizes.graph,
            sizes.weights,
            sizes.matrices,
            sizes.workspace_bytes,
            sizes.cache,
            sizes.kv_formats,
            tuple(layers),
            hosted,
            largest * places_of(len(by_layer)),
            providers=sizes.providers,
        )

    def copy_rate(self) -> float:
        """See `octavo.backends.split.Device`."""
        return measured_copy_rate(self.device)

    def expected_paging(
        self, sizes: Sizes, weights: Mapping[str, Weight], pack_cache: PackCacheOptions, sample: Path
    ) -> Paging:
        """Never called: see `PAGES_WEIGHTS`."""
        raise NotImplementedError

    def join_group(
        self,
        name: str,
        rank: int,
        size: int,
        buffer_bytes: int,  # noqa: ARG002 - values need no memory of the group
        given_up: Callable[[], str] | None = None,
    ) -> RankGroup:
        """See `octavo.backends.Backend`."""
        with current(self.device):
            group = join_group(name, (rank, size), self.device, given_up)
        group.compile = replace(self, group=group).compile
        return group

    def as_deterministic(self) -> TorchBackend:
        """See `octavo.backends.split.Device`."""
        if triton_calls(self.device) is None:
            raise UsageError(
                "deterministic needs Triton's kernels, which need a GPU: leave it out, or use the backend cpu, "
                "where answers never depend on the batch"
            )
        return replace(self, deterministic=True)

    @property
    def finds_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def uses_main_memory(self) -> bool:
        """See `octavo.backends.split.Device`."""
        return self.device.type == "cpu"

    def total_memory(self) -> int:
        """See `octavo.backends.split.Device`."""
        if self.device.type == "cpu":
            return memory.total_bytes()
        return torch.cuda.mem_get_info(self.device)[1]

    def rates(self) -> Rates:
        """See `octavo.backends.split.Device`."""
        return measured_rates(self.device, self.dtype)

    def memory(self) -> MemoryBudget:
        """See `octavo.backends.Backend`."""
        if self.device.type == "cpu":
            return host_memory()
        free, _ = torch.cuda.mem_get_info(self.device)
        # The next model can reuse memory that torch's allocator holds, although the system does not count it as free.
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryBudget(free + unused)

    def describe(self) -> BackendDescription:
        """See `octavo.backends.Backend`."""
        libraries = tuple(report(Place.of(self.device, self.dtype, repeats=self.deterministic)))
        if self.device.type == "cpu":
            reason = "no GPU is used: tensors are in main memory"
            return BackendDescription("torch", reason, torch.get_num_threads(), libraries=libraries)
        properties = torch.cuda.get_device_properties(self.device)
        return BackendDescription(
            f"torch on {properties.name}", f"compute capability {properties.major}.{properties.minor}", 1,
            libraries=libraries,
        )  # fmt: skip
