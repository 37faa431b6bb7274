"""Mixtures of experts: the choice of a row's experts, and the operation that routes rows and runs the experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.graph.cuts import Cut
from octavo.graph.ops.base import Evaluation, Op, StepSizes, describe, require, require_parameter
from octavo.graph.ops.rowwise import ACTIVATIONS, require_activation, sigmoid
from octavo.graph.product_cuts import Experts
from octavo.graph.values import Parameter, RowDomain, Value


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of `top_k` experts for each row, and their weights. Shazeer et al., arXiv 1701.06538.

    scoring: softmax or sigmoid over the router's outputs, computed before the choice. A softmax over only the chosen
    outputs (Mixtral, gpt-oss) is `softmax` with `normalize`. The third scoring, `sparsemixer`, is used by Phi 3.5 MoE
    (arXiv 2409.12136): the weight of each chosen expert is its share in a softmax of the outputs. This softmax leaves
    out the experts already chosen, and outputs that are more than 2 * jitter * max(|output|, best) below the best
    remaining output.
    normalize: divide the chosen weights by their sum.
    scale: factor for the weights, applied after `normalize`.
    on_input: the weights multiply the rows that experts read instead of their outputs (Llama 4).
    num_groups: number of groups of neighbouring experts; only experts of the best `top_groups` groups are chosen. The
    score of a group is the sum of its `group_best` highest scores: one in DeepSeek V2 (arXiv 2405.04434), two in V3
    (2412.19437).
    num_identities: number of choices, the last ones, that return the row itself and have no matrices (LongCat Flash,
    arXiv 2509.01322).

    If scores are equal, the expert or group with the lower number is chosen first.
    """

    top_k: int
    scoring: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    on_input: bool = False
    jitter: float = 0.0
    num_identities: int = 0

    def check(self, experts: int) -> None:
        """Raise GraphError unless the fields fit each other and the number of choices.

        experts: number of choices, including identities.
        """
        known = ("softmax", "sigmoid", "sparsemixer")
        require(self.scoring in known, f"scoring is {self.scoring!r}; it must be one of {', '.join(known)}")
        is_plain = not (self.normalize or self.on_input) and self.num_groups == 1
        require(self.scoring != "sparsemixer" or is_plain, "sparsemixer allows no groups and no change of its weights")
        groups = self.num_groups
        require(groups >= 1 and experts % groups == 0, f"num_groups {groups} does not divide {experts} experts")
        require(1 <= self.top_groups <= groups, f"top_groups {self.top_groups} of {groups} groups")
        size = experts // groups
        require(1 <= self.group_best <= size, f"group_best {self.group_best} of {size} experts in a group")
        eligible = size * self.top_groups
        require(1 <= self.top_k <= eligible, f"top_k {self.top_k} of {eligible} experts")
        identities = self.num_identities
        require(0 <= identities < experts, f"num_identities {identities} of {experts} choices leaves no expert")

    def choose(self, logits: Array, bias: Array | None, factors: Array | None = None) -> tuple[NDArray[np.intp], Array]:
        """Return the chosen experts, best first, and their weights, both [rows, top_k].

        logits: router outputs, [rows, experts].
        bias: added to the scores for the choice but not for the weights, [experts].
        factors: factor of each expert's weight, applied last, [experts].
        """
        if self.scoring == "sparsemixer":
            return self._mix_sparsely(logits)
        if self.scoring == "softmax":
            scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
        else:
            scores = sigmoid(logits)
        rank = scores if bias is None else scores + bias
        if self.num_groups > 1:
            groups = rank.reshape(len(rank), self.num_groups, rank.shape[1] // self.num_groups)
            best = np.sort(groups, axis=-1)[..., -self.group_best :].sum(axis=-1)
            kept = np.argsort(-best, axis=-1, kind="stable")[:, : self.top_groups]
            is_kept = np.zeros(best.shape, bool)
            np.put_along_axis(is_kept, kept, True, axis=-1)
            rank = np.where(is_kept[..., None], groups, -np.inf).reshape(rank.shape)
        chosen = np.argsort(-rank, axis=-1, kind="stable")[:, : self.top_k]
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if self.normalize:
            # The addend is DeepSeek's: all chosen scores may have underflowed.
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        weights = weights * self.scale
        return chosen, weights if factors is None else weights * factors[chosen]

    def _mix_sparsely(self, logits: Array) -> tuple[NDArray[np.intp], Array]:
        left, weights = logits.copy(), np.empty((len(logits), self.top_k), logits.dtype)
        chosen = np.empty(weights.shape, np.intp)
        for i in range(self.top_k):
            chosen[:, i] = left.argmax(axis=-1)
            best = left.max(axis=-1, keepdims=True)
            is_far = (best - logits) / np.maximum(np.abs(logits), best) > 2 * self.jitter
            weights[:, i] = 1.0 / np.where(is_far, 0.0, np.exp(left - best)).sum(axis=-1)
            np.put_along_axis(left, chosen[:, i, None], -np.inf, axis=-1)
        return chosen, weights


@dataclass(frozen=True, slots=True)
class MoE(Op):
    """Sum over a row's experts of weight_e * (down_e h + bias), h = kind(min(g, limit)) * (clip(u, limit) + up_offset),
    where g = gate_e x + bias and u = up_e x + bias. With `routing.on_input`, weight_e multiplies x instead. An identity
    that a row chooses adds weight_e * x.

    limit: None means no limits. gpt-oss uses quick_gelu, limit 7 and offset 1.
    limits_activated: limit kind(g) instead of g (Step 3.5).

    The router's outputs are router x + router_bias, computed from router_x instead of x if that is given.
    selection_bias affects only the choice of experts; expert_scale multiplies their weights (`Routing.choose`). Experts
    without a gate use `up` instead.

    A rank may hold only some of the experts, as parts of their stacks. The sum is then over the row's experts on this
    rank; the router is whole and chooses among all experts.
    """

    row_wise: ClassVar[bool] = True
    cut: ClassVar[Cut[Any]] = Experts()

    x: Value
    router: Parameter  # [choices, columns of router_x or x]; choices: the experts, then the identities
    gate: Parameter  # [experts, intermediate, hidden]
    up: Parameter
    down: Parameter  # [experts, hidden, intermediate]
    routing: Routing
    kind: str = "silu"
    limit: float | None = None
    up_offset: float = 0.0
    router_bias: Parameter | None = None  # [choices]
    selection_bias: Parameter | None = None  # [choices]
    gate_bias: Parameter | None = None  # [experts, intermediate], plain
    up_bias: Parameter | None = None
    down_bias: Parameter | None = None  # [experts, hidden], plain
    expert_scale: Parameter | None = None  # [choices]
    router_x: Value | None = None  # input of the router; None means x
    first_expert: int = 0  # number of the first expert on this rank
    adds_identities: bool = True  # False if another rank does
    limits_activated: bool = False

    def infer_shape(self) -> tuple[RowDomain, int]:
        require_activation(self.kind)
        require(self.limit is None or self.limit > 0, f"limit {self.limit} is not positive")
        require(len(self.gate.shape) == 3, f"{self.gate.name} {list(self.gate.shape)} is not [experts, out, in]")
        held, intermediate, hidden = self.gate.shape
        self.routing.check(self.num_choices)
        experts = self.num_experts
        first = self.first_expert
        is_part = held == experts or all(p.part is not None and p.part.begin == first for p in self.expert_parameters)
        require(is_part and first + held <= experts, f"experts {first} to {first + held - 1} are not part of {experts}")
        require(hidden == self.x.cols, f"x {describe(self.x)} does not fit {self.gate.name} {list(self.gate.shape)}")
        other = self.router_x or self.x
        require_parameter(self.router, self.num_choices, other.cols)
        require_parameter(self.up, *self.gate.shape)
        require_parameter(self.down, held, hidden, intermediate)
        for vector in (self.router_bias, self.selection_bias, self.expert_scale):
            require_parameter(vector, self.num_choices)
        require(other.rows is self.x.rows, f"router_x {describe(other)} has other rows than x {describe(self.x)}")
        for bias, cols in ((self.gate_bias, intermediate), (self.up_bias, intermediate), (self.down_bias, hidden)):
            require_parameter(bias, held, cols)
            require(bias is None or bias.plain, "biases of experts must be plain parameters")
        return self.x.rows, hidden

    def flops(self, sizes: StepSizes) -> int:
        held, intermediate, hidden = self.gate.shape
        choices = self.num_choices
        per_expert = 2 * len(self.products) * intermediate * hidden + 5 * intermediate + 2 * hidden
        here = self.routing.top_k * per_expert * held // choices  # if rows choose evenly
        return sizes.rows(self.x.rows) * (2 * math.prod(self.router.shape) + 4 * choices + here)

    def weight_fraction(self, parameter: Parameter, sizes: StepSizes) -> float:
        if parameter not in self.expert_parameters:
            return 1.0
        # The expected share of chosen experts, if tokens choose evenly.
        return 1.0 - (1.0 - self.routing.top_k / self.num_choices) ** sizes.rows(self.x.rows)

    @property
    def num_choices(self) -> int:
        """The number of experts and identities that the router chooses from."""
        return self.router.shape[0]

    @property
    def num_experts(self) -> int:
        """The number of experts with matrices, on all ranks."""
        return self.num_choices - self.routing.num_identities

    @property
    def products(self) -> tuple[Parameter, ...]:
        return tuple(dict.fromkeys((self.gate, self.up, self.down)))

    @property
    def expert_parameters(self) -> tuple[Parameter, ...]:
        """The matrices and biases of the experts, each [experts, ...]; a row reads only its experts' parts."""
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return (*self.products, *(bias for bias in biases if bias is not None))

    def evaluate(self, step: Evaluation) -> Array:
        x = step.values[self.x]
        routed = x if self.router_x is None else step.values[self.router_x]
        logits = _biased(self.multiply(step, routed, self.router, slice(None)), self.router_bias, step)
        bias, factors = (None if p is None else step.weights[p] for p in (self.selection_bias, self.expert_scale))
        chosen, weights = self.routing.choose(logits, bias, factors)
        out = np.zeros_like(x)
        first, held = self.first_expert, self.gate.shape[0]
        for expert in np.unique(chosen) - first:
            if not 0 <= expert < held:
                continue  # another rank has it
            rows, place = np.nonzero(chosen == expert + first)
            weight = weights[rows, place, None]
            scaled = x[rows] * weight if self.routing.on_input else x[rows]
            gate = _biased(self.multiply(step, scaled, self.gate, rows, expert), self.gate_bias, step, expert)
            up = _biased(self.multiply(step, scaled, self.up, rows, expert), self.up_bias, step, expert)
            hidden = self._gated(gate, up)
            y = _biased(self.multiply(step, hidden, self.down, rows, expert), self.down_bias, step, expert)
            out[rows] += y if self.routing.on_input else weight * y
        if self.routing.num_identities and self.adds_identities:
            out += x * np.where(chosen < self.num_experts, 0.0, weights).sum(axis=1, keepdims=True)
        return out

    def _gated(self, gate: Array, up: Array) -> Array:
        """Return h from the products of gate and up."""
        activation = ACTIVATIONS[self.kind]
        if self.limit is None:
            return activation(gate) * (up + self.up_offset)
        up = np.clip(up, -self.limit, self.limit)
        if self.limits_activated:
            limited: Array = np.minimum(activation(gate), self.limit)
            return limited * (up + self.up_offset)
        return activation(np.minimum(gate, self.limit)) * (up + self.up_offset)

    def multiply(
        self,
        step: Evaluation,
        x: Array,
        weight: Parameter,
        rows: NDArray[np.intp] | slice,  # noqa: ARG002 - for adapters, which differ by row
        expert: int | None = None,
    ) -> Array:
        """Multiply x by a weight, or by one expert's weight. x was computed from `rows` of the operation's input."""
        return step.product(x, weight, expert)


def _biased(y: Array, bias: Parameter | None, step: Evaluation, expert: int | None = None) -> Array:
    """Return y plus a bias, or plus one expert's bias."""
    if bias is None:
        return y
    table = step.weights[bias]
    return y + (table if expert is None else table[expert])
