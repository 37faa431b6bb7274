"""The choice of a provider for each problem of a graph: the first that can solve it, with the reasons why others
cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from octavo.backends.memory import PackedType
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.providers.problems import (
    KernelProblem,
    Place,
    ProductProblem,
    PromptProblem,
    StateProblem,
    mixture_problems,
)
from octavo.backends.torch.weights import is_coded, products_with_codes, row_of_planes
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Attention, AttentionParams, FusedAttention
from octavo.graph.ops.base import Op
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.recurrence import GatedDeltaRule, SelectiveScan
from octavo.graph.values import Parameter

OWN = "triton"
# In the order of preference.
_CANDIDATES: dict[type, tuple[str, ...]] = {
    ProductProblem: ("humming",),
    PromptProblem: ("varlen", "sdpa"),
    StateProblem: ("fla",),
}


class ProviderChoice(NamedTuple):
    """winner: module of the chosen provider, or `OWN`.
    refusals: modules that were asked before it, with their reasons for refusing.
    """

    title: str
    winner: str
    refusals: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        """A human-readable line about this choice."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals)
        return f"{self.title}: {self.winner}" + (f" ({reasons})" if reasons else "")


def provider(name: str) -> Any:
    """Return the module of a provider. It imports the library it adapts only when its functions are called."""
    return import_module(f"octavo.backends.torch.providers.{name}")


@cache
def choose(problem: KernelProblem) -> ProviderChoice:
    """Choose the provider of a problem."""
    refusals: list[tuple[str, str]] = []
    for name in _CANDIDATES[type(problem)]:
        reason = provider(name).can(problem)
        if reason is None:
            return ProviderChoice(problem.title, name, tuple(refusals))
        refusals.append((name, reason))
    return ProviderChoice(problem.title, OWN, tuple(refusals))


def state_problem(op: Op, place: Place) -> StateProblem | None:
    """Return the problem of an operation with states, or None if no library supports the operation."""
    if isinstance(op, GatedDeltaRule):
        return StateProblem(place, "gated delta rule", op.heads.key_dim, op.heads.value_dim)
    if isinstance(op, SelectiveScan):
        return StateProblem(place, "selective scan", op.heads.state_dim, op.heads.head_dim)
    return None


def choices(
    graph: Graph, products: Iterable[ProductProblem], place: Place, cache_types: Mapping[int, torch.dtype]
) -> list[ProviderChoice]:
    """Return the choices for all problems of a graph, without repeated lines.

    products: values of `product_problems`.
    cache_types: types of keys and values by layer.
    """
    problems: list[KernelProblem] = []
    for node in graph.nodes:
        op = node.op
        if isinstance(op, Attention | FusedAttention) and op.distance_bias is None:
            p: AttentionParams = op.params
            problems.append(PromptProblem(place, p, cache_types[p.layer], op.sinks is not None))
        elif (found := state_problem(op, place)) is not None:
            problems.append(found)
    problems += products
    return list({choice.line: choice for choice in map(choose, problems)}.values())


def product_problems(
    graph: Graph, matrices: Mapping[Parameter, PackedType], place: Place
) -> dict[Parameter, ProductProblem]:
    """Return the problems of the matrices and stacks of experts that are held as codes."""

    def planes(p: Parameter) -> Planes | None:
        return row_of_planes(matrices[p].type_name, p.shape) if p in matrices and is_coded(matrices[p]) else None

    found = {
        parameter: ProductProblem.of(place, row, parameter.shape)
        for parameter in products_with_codes(graph, matrices)
        if (row := planes(parameter)) is not None
    }
    for op in (node.op for node in graph.nodes if isinstance(node.op, MoE)):
        problems = mixture_problems(place, [(planes(p), p.shape) for p in op.products])
        found |= {p: problem for p, problem in zip(op.products, problems, strict=True) if problem is not None}
    return found


def report(place: Place) -> list[str]:
    """Return one line for each provider, with the reason if it cannot be used here."""
    names = [name for candidates in _CANDIDATES.values() for name in candidates]
    return [f"{name}: {provider(name).absent(place) or 'ready'}" for name in names]
