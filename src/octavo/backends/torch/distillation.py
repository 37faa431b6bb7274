"""Training of a model's weights to predict a teacher's next tokens, through the differentiable form of its graph.

Hinton et al., arXiv 1503.02531; the reverse divergence as in Gu et al., MiniLLM, arXiv 2306.08543, without sampling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.torch.eager import Texts, WeightSource, dequantized, logits_of, overlaid
from octavo.graph.builder import Graph
from octavo.quantization.packed import Weight

DivergenceKind = Literal["forward", "reverse"]
_TINY = 1e-8
_ROUNDS = 20  # per comparison of products
_ROWS_AT_ONCE = 32  # rows of logits, few enough to stay in a CPU cache


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """The teacher's K most likely next tokens after each token of the texts.

    logprobs: log-probabilities over the whole vocabulary; the rest of the probability belongs to all other tokens.
    """

    texts: NDArray[np.int32]  # [texts, tokens]
    ids: NDArray[np.int32]  # [texts, tokens, K]
    logprobs: NDArray[np.float16]  # [texts, tokens, K]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """steps: number of AdamW steps over `batch` texts each; fewer if `seconds` run out.
    rate: highest learning rate; it rises during the first twentieth of the training and then falls along a cosine.
    temperature: if not 1, applied to both distributions, over the teacher's tokens only.
    in_bfloat16: compute products in bfloat16 with float32 sums; weights, their updates and the loss stay in float32.
    """

    steps: int
    batch: int = 4
    rate: float = 1e-4
    seconds: float = math.inf
    divergence: DivergenceKind = "forward"
    temperature: float = 1.0
    max_norm: float = 1.0
    seed: int = 0
    in_bfloat16: bool = False


def bfloat16_is_faster() -> bool:
    """Return True if this machine multiplies at least 1.5 times as fast in bfloat16 as in float32.

    The two types are measured alternately, so that other work on the machine slows both, and the best time of each is
    used. A tenth of a second is enough for many rounds, or for two if bfloat16 is emulated.
    """

    def seconds(a: Tensor, b: Tensor) -> float:
        start = time.perf_counter()
        torch.mm(a, b)
        return time.perf_counter() - start

    pairs = [
        (torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32)
    ]
    end = time.perf_counter() + 0.1
    rounds: list[list[float]] = []
    while len(rounds) < 2 or (len(rounds) < _ROUNDS and time.perf_counter() < end):
        rounds.append([seconds(*pair) for pair in pairs])
    narrow, wide = np.array(rounds).min(axis=0)
    return bool(1.5 * narrow < wide)


LossReport = Callable[[float, float], None]
"""Called after each step with the share of the work that is done, and the step's loss in nats."""


def divergence_of(
    logits: Tensor, ids: Tensor, logprobs: Tensor, kind: DivergenceKind, temperature: float = 1.0
) -> Tensor:
    """Return the mean divergence in nats between logits [rows, vocabulary] and a teacher's tokens [rows, K].

    The kind `forward` is KL(teacher || student), and `reverse` is KL(student || teacher). All tokens outside the
    teacher's list are treated as a single token. With a temperature other than 1 they are left out, and both
    distributions are over the list.
    """
    if temperature == 1.0:
        q = log_probabilities(logits, ids)
        p, q = (torch.cat([x, _rest(x)], dim=1) for x in (logprobs, q))
    else:
        p = torch.log_softmax(logprobs / temperature, dim=-1)
        q = torch.log_softmax(logits.gather(1, ids).float() / temperature, dim=-1)
    if kind == "reverse":
        p, q = q, p
    return (p.exp() * (p - q)).sum(dim=1).mean() * temperature**2


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the float32 log-probabilities of tokens [rows, K] under logits [rows, vocabulary] of any type."""
    found: Tensor = _LogProbabilities.apply(logits, ids)  # type: ignore[no-untyped-call]
    return found


class _LogProbabilities(torch.autograd.Function):
    """Differentiable log-probabilities, computed a few rows at a time.

    `log_softmax` would make three copies of the logits, often hundreds of megabytes each.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        total = torch.cat([part.float().logsumexp(1, keepdim=True) for part in torch.split(logits, _ROWS_AT_ONCE)])
        ctx.save_for_backward(logits, ids, total)
        return logits.gather(1, ids).float() - total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        logits, ids, total = ctx.saved_tensors
        made = torch.empty_like(logits)
        each = (logits, made, ids, total, slope, -slope.sum(1, keepdim=True))
        for part, out, at, all_of, own, rest in zip(*(torch.split(x, _ROWS_AT_ONCE) for x in each), strict=True):
            out.copy_((part - all_of).exp_().mul_(rest).scatter_add_(1, at, own))
        return made, None


def _rest(logprobs: Tensor) -> Tensor:
    """Return the logarithm of the probability that remains for all other tokens together."""
    return torch.log((1 - logprobs.exp().sum(dim=1, keepdim=True)).clamp(min=_TINY))


def train(
    graph: Graph,
    weights: Mapping[str, Weight],
    teacher: TeacherTokens,
    options: TrainingOptions,
    report: LossReport = lambda _share, _loss: None,
) -> dict[str, NDArray[np.float32]]:
    """Train and return the weights of `graph` by name, in float32.

    The same seed gives the same batches.
    Raises FloatingPointError if the loss is not finite.
    """
    names = sorted({parameter.name for parameter in graph.parameters})
    trained = {name: torch.tensor(weights[name].dequantize(), requires_grad=True) for name in names}
    source = overlaid(dequantized(weights), trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rng = np.random.default_rng(options.seed)
    start, order = time.monotonic(), np.empty(0, np.intp)
    for step in range(options.steps):
        passed = (time.monotonic() - start) / options.seconds
        share = max(step / options.steps, passed)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(share * 20 + 1 / options.steps, 0.5 + 0.5 * math.cos(math.pi * share))
        if len(order) < options.batch:
            order = np.concatenate([order, rng.permutation(len(teacher.texts))])
        chosen, order = order[: options.batch], order[options.batch :]
        loss = _loss(graph, source, teacher, chosen.tolist(), options)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss of step {step} is {loss.item()}; use a lower rate")
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained.values(), options.max_norm)
        optimizer.step()
        report(max((step + 1) / options.steps, (time.monotonic() - start) / options.seconds), loss.item())
    return {name: tensor.detach().numpy() for name, tensor in trained.items()}


def _loss(
    graph: Graph, source: WeightSource, teacher: TeacherTokens, chosen: Sequence[int], options: TrainingOptions
) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=options.in_bfloat16):
        logits = logits_of(graph, source, Texts.of(teacher.texts[chosen].tolist()))
    count = logits.shape[0]
    ids = torch.tensor(teacher.ids[chosen].reshape(count, -1), dtype=torch.int64)
    logprobs = torch.tensor(teacher.logprobs[chosen].reshape(count, -1).astype(np.float32))
    return divergence_of(logits, ids, logprobs, options.divergence, options.temperature)
