"""`torch.nn.functional.scaled_dot_product_attention` for prompts, one sequence at a time, over gathered keys."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from octavo.backends.torch.cache import LayerPages
from octavo.backends.torch.providers.pages import gathered
from octavo.backends.torch.providers.problems import Place, PromptProblem, unfit
from octavo.backends.torch.step_arrays import EqualSequences
from octavo.graph.ops.attention import AttentionParams


def absent(place: Place) -> str | None:
    """Return the reason why the function cannot be used here at all, or None if it can."""
    return unfit(place)


def can(problem: PromptProblem) -> str | None:
    """Return the reason why the function cannot compute this attention, or None if it can."""
    return absent(problem.place) or refused(problem) or (
        "a window would need a mask of all pairs" if problem.params.window is not None else None
    )  # fmt: skip


def refused(problem: PromptProblem) -> str | None:
    """Return the reason why none of torch's libraries can compute this attention, or None."""
    p = problem.params
    reasons = {
        "the keys are a latent": p.value_dim is not None and p.value_dim != p.head_dim,
        "a soft cap": p.softcap is not None,
        "slopes of positions (ALiBi)": p.alibi_slopes is not None,
        "sinks": problem.has_sinks,
        "chunks": p.chunked,
        "tokens of an image that see each other": bool(p.sees_spans),
        f"heads of {p.head_dim} columns": p.head_dim % 8 != 0 or p.head_dim > 256,
        f"the cache has {str(problem.cache_dtype).removeprefix('torch.')}": problem.cache_dtype.itemsize != 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def attend(q: Tensor, pages: LayerPages, p: AttentionParams, some: EqualSequences, out: Tensor) -> Tensor:
    """Attend with q [n * t, num_heads, head_dim] of n sequences with t tokens each -> `out` [n * t, num_heads *
    head_dim].
    """
    tokens = some.positions.shape[1]
    for number, end in enumerate(some.ends):
        rows = slice(number * tokens, (number + 1) * tokens)
        keys, values = (x[None].to(q.dtype) for x in gathered(pages, p, some, number))
        queries = q[rows].transpose(0, 1)[None]
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=causal_lower_right(tokens, end), scale=p.scale, enable_gqa=True
        )
        out[rows] = mixed[0].transpose(0, 1).flatten(1)
    return out
