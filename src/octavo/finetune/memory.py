"""Estimates the memory that training needs before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from octavo.backends.adapted_modules import AdaptedModule
from octavo.backends.learned_text import LearnedText
from octavo.engine.loading.progress_bar import size
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Attention
from octavo.graph.ops.linear import Linear, Logits
from octavo.graph.values import LOGITS

_FLOAT = 4
_OF_ADAPTER = 4 * _FLOAT  # a number, its gradient and two moments
_KEPT = 2  # copies of every value kept for gradients: itself, and its conversion to the next operation's type or order
_OF_SCORES = 3  # scores, masked scores, weights
_OF_LOGITS = 3  # logits, gradients, and what the loss takes at a time


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The largest step of a plan: tokens, trained tokens, and the sum of the squared lengths of its texts."""

    tokens: int
    learned: int
    squares: int

    @classmethod
    def of(cls, texts: Sequence[LearnedText], steps: Sequence[Sequence[int]]) -> StepLoad:
        lengths = [[len(texts[i].ids) for i in step] for step in steps]
        return cls(
            max(map(sum, lengths)),
            max(sum(texts[i].num_learned for i in step) for step in steps),
            max(sum(length**2 for length in each) for each in lengths),
        )


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes by purpose.

    weights: all frozen weights if they stay in memory, otherwise twice the largest one.
    """

    weights: int
    adapter: int
    values: int

    @property
    def total(self) -> int:
        return self.weights + self.adapter + self.values

    def __str__(self) -> str:
        return (
            f"{size(self.weights)} of frozen weights, {size(self.adapter)} of the adapter with its optimizer, about "
            f"{size(self.values)} for the values of a step"
        )


def training_memory(
    graph: Graph, modules: Sequence[AdaptedModule], rank: int, load: StepLoad, kept_bytes: int
) -> TrainingMemory:
    """Estimate the memory of a training run.

    kept_bytes: bytes per number of the frozen matrices; 0 if they are dequantized whenever needed.
    """
    matrices = {node.op.weight for node in graph.nodes if isinstance(node.op, Linear | Logits)}
    others = {parameter for node in graph.nodes for parameter in node.op.parameters} - matrices
    if kept_bytes:
        weights = sum(kept_bytes * prod(p.shape) for p in matrices) + sum(_FLOAT * prod(p.shape) for p in others)
        tied = {node.op.weight for node in graph.nodes if isinstance(node.op, Logits)}
        looked_up = {p for node in graph.nodes if not isinstance(node.op, Linear | Logits) for p in node.op.parameters}
        weights += sum(_FLOAT * prod(p.shape) for p in tied & looked_up)
    else:
        weights = 2 * _FLOAT * max(prod(p.shape) for p in matrices | others)
    values = sum(node.output.cols for node in graph.nodes if node.output.rows != LOGITS) * load.tokens * _FLOAT * _KEPT
    heads = sum(node.op.params.num_heads for node in graph.nodes if isinstance(node.op, Attention))
    values += heads * load.squares * _FLOAT * _OF_SCORES
    values += graph.output.cols * load.learned * _FLOAT * _OF_LOGITS
    return TrainingMemory(weights, _OF_ADAPTER * sum(module.num_numbers(rank) for module in modules), values)
