"""What a model will take of memory, from its headers, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.backends.cpu.passes import PASSES
from octavo.backends.cpu.sizes import cache_bytes_per_token, estimate_workspace_bytes
from octavo.backends.cpu.threads import plan_threads
from octavo.config import EngineConfig
from octavo.engine.load import executor_limits
from octavo.graph.builder import Graph
from octavo.graph.layer_formats import layer_formats
from octavo.graph.passes import optimize
from octavo.loader.checkpoint import Checkpoint
from octavo.models import build_graph


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """In bytes. weights: of each parameter of the optimized graph, by name."""

    graph: Graph
    weights: dict[str, int]
    workspace_bytes: int
    kv_bytes_per_token: int

    @property
    def kv_element_bytes(self) -> float:
        return self.kv_bytes_per_token / max(self.graph.kv_elements_per_token, 1)

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())


def model_sizes(checkpoint: Checkpoint, config: EngineConfig, context: int) -> ModelSizes:
    """The arithmetic, from the graph and the headers. context: tokens of the longest request."""
    graph = optimize(build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes), PASSES)
    formats = layer_formats(graph, lambda p: checkpoint.weights[p.name].dequantize(), config.kv_dtype)
    limits = executor_limits(config, context)
    return ModelSizes(
        graph=graph,
        weights={parameter.name: checkpoint.weights[parameter.name].nbytes for parameter in graph.parameters},
        workspace_bytes=estimate_workspace_bytes(graph, limits, plan_threads(config.num_threads).count),
        kv_bytes_per_token=cache_bytes_per_token(graph, formats),
    )
