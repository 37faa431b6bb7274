"""Training of a low-rank adapter on top of frozen weights, through the differentiable form of a model's graph.

Hu et al., arXiv 2106.09685: y = W x + (alpha / rank) B A x, where only A and B are trained. B starts with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from octavo.backends.adapted_modules import AdaptedModule, ModulePart
from octavo.backends.learned_text import LearnedText
from octavo.backends.parameters import weight_of
from octavo.backends.torch.distillation import bfloat16_is_faster, log_probabilities
from octavo.backends.torch.eager import Texts, WeightSource, dequantized, logits_of
from octavo.graph.builder import Graph
from octavo.graph.values import Parameter
from octavo.quantization.packed import Weight

__all__ = ["LowRankOptions", "LowRankTrainer", "bfloat16_is_faster"]

ProductType = Literal["float32", "bfloat16"]
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True)
class LowRankOptions:
    """scale: alpha / rank.
    product_type: type of the products, which have float32 sums; everything else is float32.
    keeps_weights: keep frozen weights in memory in the product type; otherwise each is dequantized whenever it is
    needed, in the forward and the backward pass.
    """

    rank: int
    scale: float
    product_type: ProductType = "float32"
    keeps_weights: bool = True
    max_norm: float = 1.0
    seed: int = 0


class LowRankTrainer:
    """Holds A and B of every module and their optimizer. A step takes texts of any lengths, without padding.

    The same seed, texts and threads give the same numbers, even after `restore`.
    """

    def __init__(
        self, graph: Graph, weights: Mapping[str, Weight], modules: Sequence[AdaptedModule], options: LowRankOptions
    ) -> None:
        self._graph, self._options = graph, options
        self._dtype = getattr(torch, options.product_type)
        self._source = dequantized(weights, keep=options.keeps_weights)
        self._matrices = _matrices(weights, self._dtype, keep=options.keeps_weights)
        self._factors = _new_factors(modules, options)
        self._of_parameter = {part.parameter: (module.name, _rows(part)) for module in modules for part in module.parts}
        self._last: tuple[Tensor, Tensor] | None = None
        self._optimizer = torch.optim.AdamW(
            [tensor for pair in self._factors.values() for tensor in pair], betas=_BETAS, weight_decay=0.0, fused=True
        )

    def step(self, texts: Sequence[LearnedText], rate: float) -> float:
        """Take one AdamW step. Return the mean loss of the learned tokens before the step, in nats.

        Raises FloatingPointError for a loss that is not finite.
        """
        loss = self._loss(texts)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()}; use a lower learning rate")
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        [group] = self._optimizer.param_groups
        group["lr"] = rate
        torch.nn.utils.clip_grad_norm_(group["params"], self._options.max_norm)
        self._optimizer.step()
        return loss.item()

    def loss_of(self, texts: Sequence[LearnedText]) -> float:
        """Return the mean loss of the learned tokens without training."""
        with torch.no_grad():
            return self._loss(texts).item()

    def factors(self) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Return A [rank, in] and B [out, rank] of each module."""
        return {name: (a.detach().numpy(), b.detach().numpy()) for name, (a, b) in self._factors.items()}

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Return everything that a later `restore` needs: the factors and their moments."""
        found = {}
        for name, pair in self._factors.items():
            for letter, tensor in zip("AB", pair, strict=True):
                found[f"{name}.{letter}"] = tensor.detach().numpy()
                for key, moment in self._optimizer.state.get(tensor, {}).items():
                    found[f"{name}.{letter}.{key}"] = moment.detach().numpy().reshape(moment.shape or (1,))
        return found

    def restore(self, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Continue from `state`."""
        for name, pair in self._factors.items():
            for letter, tensor in zip("AB", pair, strict=True):
                tensor.data.copy_(torch.from_numpy(state[f"{name}.{letter}"]))
                keys = ("step", "exp_avg", "exp_avg_sq")
                moments = {key: state.get(f"{name}.{letter}.{key}") for key in keys}
                if moments["step"] is not None:
                    self._optimizer.state[tensor] = {
                        key: torch.from_numpy(np.array(value)).reshape(() if key == "step" else value.shape)
                        for key, value in moments.items()
                        if value is not None
                    }

    def _loss(self, texts: Sequence[LearnedText]) -> Tensor:
        ids = torch.from_numpy(np.concatenate([text.ids for text in texts]).astype(np.int64))
        learned = np.concatenate([text.is_learned for text in texts])
        starts = np.cumsum([0, *(len(text.ids) for text in texts)])
        learned[starts[:-1]] = False
        targets = torch.from_numpy(np.flatnonzero(learned))
        batch = Texts(ids, tuple(len(text.ids) for text in texts), targets - 1)
        logits = logits_of(self._graph, self._source, batch, self._product)
        self._last = None
        return -log_probabilities(logits, ids[targets, None]).mean()

    def _product(self, x: Tensor, parameter: Parameter) -> Tensor:
        narrow = self._narrowed(x)
        y: Tensor = _FrozenProduct.apply(narrow, lambda: self._matrices(parameter))  # type: ignore[no-untyped-call]
        if parameter.part is None and (found := self._of_parameter.get(parameter.name)) is not None:
            name, rows = found
            a, b = (factor.to(self._dtype) for factor in self._factors[name])
            y = torch.addmm(y, self._options.scale * functional.linear(narrow, a), b[rows].T)
        return y.to(x.dtype)

    def _narrowed(self, x: Tensor) -> Tensor:
        """Convert x to the type of the products; done once for products of the same rows, such as q, k and v."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, x.to(self._dtype))
        return self._last[1]


class _FrozenProduct(torch.autograd.Function):
    """The product of x [rows, in] and the transpose of a matrix [out, in].

    The backward pass fetches the matrix again, so that it need not be kept in memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Callable[[], Tensor]) -> Tensor:
        ctx.matrix = matrix
        return functional.linear(x, matrix())

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope @ ctx.matrix(), None


def _matrices(weights: Mapping[str, Weight], dtype: torch.dtype, *, keep: bool) -> WeightSource:
    """Return the frozen matrices in the type of the products."""
    kept: dict[Parameter, Tensor] = {}

    def source(parameter: Parameter) -> Tensor:
        if (found := kept.get(parameter)) is None:
            found = torch.from_numpy(weight_of(weights, parameter).dequantize()).to(dtype)
            if keep:
                kept[parameter] = found.clone() if dtype == torch.float32 else found
        return found

    return source


def _new_factors(modules: Sequence[AdaptedModule], options: LowRankOptions) -> dict[str, tuple[Tensor, Tensor]]:
    """Draw A as PEFT does, uniformly within 1 / sqrt(in), and set B to zeros."""
    generator = torch.Generator().manual_seed(options.seed)
    factors = {}
    for module in modules:
        a = torch.empty(options.rank, module.in_features)
        a.uniform_(-1 / math.sqrt(module.in_features), 1 / math.sqrt(module.in_features), generator=generator)
        factors[module.name] = (a.requires_grad_(), torch.zeros(module.out_features, options.rank, requires_grad=True))
    return factors


def _rows(part: ModulePart) -> slice | Tensor:
    """Return the rows of B that belong to a weight; a slice needs no copy."""
    first = int(part.rows[0])
    if np.array_equal(part.rows, np.arange(first, first + len(part.rows))):
        return slice(first, first + len(part.rows))
    return torch.from_numpy(part.rows)
