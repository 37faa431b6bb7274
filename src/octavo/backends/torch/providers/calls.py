"""The kernels of a step, with a library in place of our own kernel for each problem where one was chosen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from octavo.backends.torch.cache import LayerPages
from octavo.backends.torch.coded import CodedRows, Find, nowhere
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.paged_step import StepKernels
from octavo.backends.torch.plain import ProductEnd
from octavo.backends.torch.providers import fla, humming
from octavo.backends.torch.providers.choice import OWN, choose, provider, state_problem
from octavo.backends.torch.providers.mixture import mixture
from octavo.backends.torch.providers.problems import Place, ProductProblem, PromptProblem, mixture_problems
from octavo.backends.torch.step_arrays import EqualSequences, StepArrays
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.recurrence import GatedDeltaRule, SelectiveScan, ShortConv

logger = logging.getLogger(__name__)

LEAST_PROMPT = 64  # libraries attend for sequences with at least this many tokens in a step


def provided(calls: StepKernels | None, place: Place, *, products: bool = True) -> StepKernels | None:
    """Return `calls`, wrapped with providers if the place allows them.

    products: also use providers for products; the weights must stay where they are.
    """
    if calls is None or place.repeats:
        return calls
    return cast(StepKernels, ProvidedCalls(calls, place, products=products))


class ProvidedCalls:
    """Implements `StepKernels` with providers."""

    def __init__(self, calls: StepKernels, place: Place, *, products: bool) -> None:
        """calls: kernels for all problems without a provider."""
        self._calls, self._place, self._has_products = calls, place, products
        self._layers: Any = WeakTensorKeyDictionary()  # by a matrix's codes, and freed with them
        self._mixtures: Any = (
            WeakTensorKeyDictionary()
        )  # by the first stack's codes: True if a provider takes all stacks
        self._failed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    def linear(
        self, x: Tensor | CodedRows, matrix: Planes | Tensor, end: ProductEnd, *, repeats: bool, find: Find = nowhere
    ) -> Tensor:
        """See `StepKernels`."""
        is_size = humming.LEAST_ROWS <= len(x) <= humming.MOST_ROWS
        if is_size and isinstance(x, Tensor) and not repeats and end.dtype in (None, x.dtype):
            layer = self._layer(matrix, x.dtype)
            if layer is not None:
                assert isinstance(matrix, Planes)
                return humming.linear(matrix.ordered(x), layer, end)
        return self._calls.linear(x, matrix, end, repeats=repeats, find=find)

    def experts(
        self,
        op: MoE,
        x: Tensor,
        choice: tuple[Tensor, Tensor],
        matrices: Sequence[Planes | Tensor],
        biases: Sequence[Tensor | None],
        *,
        repeats: bool,
    ) -> Tensor:
        """See `StepKernels`. A provider computes all three products of a mixture, or none."""
        is_size = len(x) >= humming.LEAST_ROWS and choice[0].numel() <= humming.MOST_ROWS * op.num_experts
        takes = is_size and not repeats and not op.limits_activated
        layers = self._layers_of(matrices, x.dtype) if takes else None
        if layers is None:
            return self._calls.experts(op, x, choice, matrices, biases, repeats=repeats)

        def grouped(rows: Tensor, number: int, ends: Tensor) -> Tensor:
            stack = matrices[number]
            assert isinstance(stack, Planes)
            return humming.expert_linear(stack.ordered(rows), layers[number], ends)

        def gated(gate: Tensor, up: Tensor) -> Tensor:
            found = self._calls.gated_product(gate, up, op.kind, None, None)
            assert isinstance(found, Tensor), "the product after it takes no codes"
            return found

        return mixture(op, x, choice, biases, grouped, gated)

    def _layers_of(self, stacks: Sequence[Planes | Tensor], dtype: torch.dtype) -> list[Any] | None:
        """Return the stacks of a mixture as a provider's layers, or None if no provider takes all of them."""
        first = stacks[0]
        if not self._has_products or not isinstance(first, Planes):
            return None
        if first.codes not in self._mixtures:
            found = mixture_problems(self._place, [(p if isinstance(p, Planes) else None, p.shape) for p in stacks])
            self._mixtures[first.codes] = all(q is not None and choose(q).winner != OWN for q in found)
        if not self._mixtures[first.codes]:
            return None
        layers = [self._layer(stack, dtype) for stack in stacks]
        if all(layer is not None for layer in layers):
            return layers
        self._mixtures[first.codes] = False
        for stack in stacks:
            assert isinstance(stack, Planes)
            self._layers.pop(stack.codes)
        return None

    def _layer(self, matrix: Planes | Tensor, dtype: torch.dtype) -> Any:
        """Return a matrix or a stack as a provider's layer, or None if no provider takes it."""
        if not self._has_products or not isinstance(matrix, Planes):
            return None
        if matrix.codes not in self._layers:
            self._layers[matrix.codes] = self._prepared(matrix, dtype)
        return self._layers[matrix.codes]

    def _prepared(self, p: Planes, dtype: torch.dtype) -> Any:
        problem = ProductProblem.of(self._place, p, p.shape)
        if choose(problem).winner == OWN:
            return None
        try:
            return humming.prepared(p, dtype)
        except Exception as error:  # third-party code, compiled at run time; our kernel computes the same
            if problem.title not in self._failed:
                self._failed.add(problem.title)
                reason = str(error).partition("\n")[0]
                logger.warning("%s: humming failed, so our own kernel is used: %s", problem.title, reason)
            return None

    def attend(
        self,
        q: Tensor,
        pages: LayerPages,
        p: AttentionParams,
        some: EqualSequences,
        sinks: Tensor | None,
        *,
        repeats: bool,
        memory: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """See `StepKernels`."""
        if some.positions.shape[1] >= LEAST_PROMPT and not repeats:
            problem = PromptProblem(self._place, p, pages.keys.dtype, sinks is not None)
            if (winner := choose(problem).winner) != OWN:
                out = q.new_empty((len(q), p.output_width)) if memory[0] is None else memory[0]
                found: Tensor = provider(winner).attend(q, pages, p, some, out)
                return found
        return self._calls.attend(q, pages, p, some, sinks, repeats=repeats, memory=memory)

    def advanced(
        self,
        op: ShortConv | GatedDeltaRule | SelectiveScan,
        values: Sequence[Tensor],
        state: Tensor,
        weights: Sequence[Tensor | None],
        arrays: StepArrays,
        out: Tensor | None,
    ) -> Tensor:
        """See `StepKernels`."""
        problem = state_problem(op, self._place)
        if problem is None or choose(problem).winner == OWN:
            return self._calls.advanced(op, values, state, weights, arrays, out)
        longest = max((end - begin for begin, end in pairwise(arrays.rows.starts)), default=0)
        if longest < fla.LEAST_TOKENS:
            return self._calls.advanced(op, values, state, weights, arrays, out)
        assert not isinstance(op, ShortConv)
        found = fla.advanced(op, values, state, weights, arrays)
        return found if out is None else out.copy_(found)
