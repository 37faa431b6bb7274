"""Where a rank belongs: its stage of the pipeline, its part of the tensors, and the resulting graph."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.ops.moe import MoE
from octavo.graph.segments import as_stage, cut
from octavo.graph.shard import shard
from octavo.graph.shard_wishes import Steps
from octavo.graph.splits import even


@dataclass(frozen=True, slots=True)
class Ranks:
    """The number of pipeline stages, and the number of ranks that share each stage's tensors.

    whole_experts: see `shard`.
    Rank 0 belongs to the last stage: it samples, and it runs in the engine's process. The ranks of a stage have
    consecutive numbers.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    whole_experts: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> Ranks:
        """Return the ranks for an engine's options."""
        return cls(config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)

    @property
    def count(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def stage(self, rank: int) -> int:
        """Return a rank's stage. Stage 0 has the embedding."""
        return self.pipeline_parallel - 1 - rank // self.tensor_parallel

    def part(self, rank: int) -> int:
        """Return a rank's index among the ranks of its stage."""
        return rank % self.tensor_parallel

    def of_stage(self, stage: int) -> range:
        """Return the ranks of a stage."""
        first = (self.pipeline_parallel - 1 - stage) * self.tensor_parallel
        return range(first, first + self.tensor_parallel)


def rank_graph(graph: Graph, ranks: Ranks, rank: int, steps: Steps) -> Graph:
    """Return the part of a model that one rank computes. It is not optimized yet.

    Raises UsageError if there are fewer layers than stages, if a layer reads the cache of a layer in another stage, or
    if whole experts are requested for a model without experts.
    """
    if ranks.whole_experts and not any(isinstance(node.op, MoE) for node in graph.nodes):
        raise UsageError("enable_expert_parallel: this model has no experts; leave it out")
    segment = graph
    if ranks.pipeline_parallel > 1:
        num_layers = len({node.layer_index for node in graph.nodes} - {None})
        layers = even(num_layers, ranks.pipeline_parallel)
        if layers is None:
            raise UsageError(
                f"pipeline_parallel_size is {ranks.pipeline_parallel}, but the model has only {num_layers} layers; "
                f"give at most {num_layers}"
            )
        try:
            segments = cut(graph, [range(*each[0]) for each in layers.ranges])
        except GraphError as error:
            raise UsageError(
                f"pipeline_parallel_size {ranks.pipeline_parallel}: this model cannot be cut there ({error}); use "
                "tensor_parallel_size instead"
            ) from None
        segment = segments[ranks.stage(rank)]
    part, size = ranks.part(rank), ranks.tensor_parallel
    sharded = shard(segment, part, size, steps, whole_experts=ranks.whole_experts)
    if ranks.pipeline_parallel == 1:
        return sharded
    return as_stage(sharded, receives=ranks.stage(rank) > 0, sends=part == 0)
