"""`torch.nn.attention.varlen` for prompts: all sequences in one launch, with windows and GQA from torch 2.12 on.

With a block table, the function reads the pages directly. FlashAttention 2, which torch includes, requires page sizes
that are multiples of 256 tokens for that; smaller pages are gathered first.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.cache import LayerPages
from octavo.backends.torch.providers.pages import first_key, gathered
from octavo.backends.torch.providers.problems import Place, PromptProblem, unfit
from octavo.backends.torch.providers.sdpa import refused
from octavo.backends.torch.step_arrays import EqualSequences
from octavo.graph.ops.attention import AttentionParams

_MODULE = "torch.nn.attention.varlen"
_NEEDED = ("scale", "window_size", "enable_gqa")
_PAGE = 256  # tokens; pages that it reads directly are multiples of this size


@cache
def _parameters() -> frozenset[str]:
    """Return the names of the parameters of `varlen_attn`; empty if this torch lacks the function."""
    if find_spec(_MODULE) is None:
        return frozenset()
    return frozenset(inspect.signature(import_module(_MODULE).varlen_attn).parameters)


def absent(place: Place) -> str | None:
    """Return the reason why the function cannot be used here at all, or None if it can."""
    if lacking := [name for name in _NEEDED if name not in _parameters()]:
        return f"torch {torch.__version__} has no varlen_attn with {', '.join(lacking)}"
    return unfit(place)


def can(problem: PromptProblem) -> str | None:
    """Return the reason why the function cannot compute this attention, or None if it can."""
    return absent(problem.place) or refused(problem)


def reads_pages(block_size: int) -> bool:
    """Return True if pages of `block_size` tokens need not be gathered."""
    return {"block_table", "seqused_k"} <= _parameters() and block_size % _PAGE == 0


def attend(q: Tensor, pages: LayerPages, p: AttentionParams, some: EqualSequences, out: Tensor) -> Tensor:
    """Attend with q [n * t, num_heads, head_dim] of n sequences with t tokens each -> `out` [n * t, num_heads *
    head_dim].
    """
    call: Any = import_module(_MODULE).varlen_attn
    count, tokens = some.positions.shape
    block_size, window = pages.keys.shape[2], some.windows[pages.group]
    seen = (-1 if p.window is None else p.window - 1, 0)
    options: dict[str, Any] = {"scale": p.scale, "window_size": seen, "enable_gqa": True}
    if reads_pages(block_size):
        keys, values = (x.transpose(1, 2) for x in (pages.keys, pages.values))  # [pages, tokens, heads, dim]
        lengths, longest = window.end, max(some.ends)
        options |= {"block_table": window.tables, "seqused_k": window.end.int()}
    else:
        parts = [gathered(pages, p, some, number) for number in range(count)]
        keys, values = (torch.cat([part[i].transpose(0, 1) for part in parts]) for i in range(2))
        counts = [end - first_key(p, end, tokens, block_size) for end in some.ends]
        firsts = [end - length for end, length in zip(some.ends, counts, strict=True)]
        lengths, longest = window.end, max(counts)
        if any(firsts):
            lengths = window.end - (window.end - tokens + 1 - (p.window or 0)).clamp(min=0) // block_size * block_size
    ends = functional.pad(torch.cumsum(lengths, 0), (1, 0)).int()
    mixed = call(q, keys.to(q.dtype), values.to(q.dtype), some.starts.int(), ends, tokens, longest, **options)
    out.copy_(mixed.flatten(1))
    return out
