"""The memory that each rank of a model needs, and what it exchanges with other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.distributed.ranks import Ranks, rank_graph
from octavo.engine.loading.model_graph import model_graph, model_sizes, steps_of
from octavo.graph.builder import Graph
from octavo.graph.ops.collective import AllGather, Collective
from octavo.graph.ops.moe import MoE
from octavo.graph.values import LOGITS, RowDomain
from octavo.loader.checkpoint import Checkpoint

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """The needs of one rank. Sizes are in bytes.

    exchanges: number of exchanges with the other ranks of its stage per step.
    exchanged_bytes_per_token: bytes sent to these ranks.
    logits_bytes_per_row: bytes sent for a row of logits that is gathered whole, because the best candidates of each
    rank are not enough to sample it.
    handed_on_bytes_per_token: bytes sent to the next stage.
    experts: index of the first expert and number of experts in each mixture, if the rank does not have all of them.
    """

    rank: int
    stage: int
    part: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    workspace_bytes: int
    exchanges: int
    exchanged_bytes_per_token: int
    logits_bytes_per_row: int
    handed_on_bytes_per_token: int
    experts: tuple[int, int] | None = None


def rank_needs(checkpoint: Checkpoint, config: EngineConfig, context: int) -> list[RankNeeds]:
    """Calculate the sizes of all ranks from the headers.

    context: tokens of the longest request.
    """
    whole, ranks, found = model_graph(checkpoint, context), Ranks.of(config), []
    steps = steps_of(checkpoint, config, whole)
    for rank in range(ranks.count):
        graph = rank_graph(whole, ranks, rank, steps)
        sizes = model_sizes(checkpoint, config, context, graph)
        exchanged = exchanges_of(graph)
        logits = [each.given for each in exchanged if each.rows is LOGITS]
        is_last = ranks.stage(rank) == ranks.pipeline_parallel - 1
        mixtures = [node.op for node in graph.nodes if isinstance(node.op, MoE)] if ranks.whole_experts else []
        found.append(
            RankNeeds(
                rank,
                ranks.stage(rank),
                ranks.part(rank),
                sizes.weight_bytes,
                sizes.cache.token_bytes,
                sizes.cache.bytes_per_seq,
                sizes.workspace_bytes,
                len(exchanged),
                _FLOAT_BYTES * (sum(each.given for each in exchanged) - sum(logits)),
                _FLOAT_BYTES * sum(logits),
                0 if is_last else _FLOAT_BYTES * sum(value.cols for value in graph.outputs),
                (mixtures[0].first_expert, mixtures[0].gate.shape[0]) if mixtures else None,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class RankExchange:
    """An exchange between a rank and the other ranks of its stage, in columns per row.

    given: columns that the rank contributes.
    moved: columns that go through its link, if the ranks form a ring.
    """

    rows: RowDomain
    given: int
    moved: float


def exchanges_of(graph: Graph) -> list[RankExchange]:
    """Return the exchanges in a rank's step. All logits are assumed to be gathered whole."""
    found = []
    for node in graph.nodes:
        if isinstance(node.op, Collective):
            others = (node.op.size - 1) / node.op.size
            # A sum goes around twice: first its parts, then the totals.
            times = 1 if isinstance(node.op, AllGather) else 2
            given = node.op.inputs[0].cols
            found.append(RankExchange(node.output.rows, given, times * others * node.output.cols))
    return found
