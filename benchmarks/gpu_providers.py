"""Compare libraries with our kernels on the same inputs, for the table of the fastest one for each problem.

A figure's name is `PROBLEM: CONTENDER`. A library that is not here has its reason in the place of a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_cases import Case, Figure, Machine, check, in_turns, seconds_of
from gpu_kernels import params
from gpu_products import random_of, stack_of, tall
from torch import Tensor

from octavo.backends.torch.cache import LayerPages
from octavo.backends.torch.kernels.attention import Sequences, prefill_attention
from octavo.backends.torch.kernels.cache_view import CacheView
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.kernels.recurrence import StateRows, delta_rule, selective_scan
from octavo.backends.torch.plain import ProductEnd
from octavo.backends.torch.products import linear
from octavo.backends.torch.providers import fla, humming, sdpa, varlen
from octavo.backends.torch.providers.calls import ProvidedCalls
from octavo.backends.torch.providers.problems import (
    Place,
    ProductProblem,
    PromptProblem,
    StateProblem,
    mixture_problems,
)
from octavo.backends.torch.step import StepRows
from octavo.backends.torch.step_arrays import EqualSequences, StepArrays, VisibleBlocks
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.ops.recurrence import DeltaHeads, GatedDeltaRule, ScanHeads, SelectiveScan
from octavo.graph.values import TOKENS, Parameter, Value

FORMATS = ("I4_128_Z", "Q4_K", "Q6_K", "Q8_0", "MXFP4")
_BASE = 64
_UNIT = "microseconds"


def _place(machine: Machine) -> Place:
    return Place.of(machine.device, machine.dtype)


def _not_here(problem: str, name: str, reason: str) -> Figure:
    return Figure(f"{problem}: {name}, {reason}", 0.0, "not here")


def products(machine: Machine, type_name: str) -> list[Figure]:
    """Measure the widest product of a layer, with our kernels and with the provider."""
    out, width = machine.shapes.widest
    weight = random_of(type_name, (_BASE, width))
    small = planes_of(weight)
    assert small is not None
    reason = humming.can(ProductProblem.of(_place(machine), small, (out, width)))
    found = []
    for rows in (8, 16, 32, 64, 128, 256) if machine.is_gpu else (3,):

        def make(count: int = rows, p: Planes = small) -> Callable[[], Tensor]:
            return partial(linear, machine.normal(count, width), tall(p, out, machine), ProductEnd(), repeats=False)

        calls = in_turns(machine, make, small.nbytes * out / _BASE)
        problem = f"{type_name}, rows {rows}"
        found.append(Figure(f"{problem}: triton", seconds_of(machine, calls) * 1e6, _UNIT))
        if reason is not None:
            found.append(_not_here(problem, "humming", reason))
            continue
        inputs = [call.args[:2] for call in calls]  # type: ignore[attr-defined]
        theirs = [partial(humming.linear, x, humming.prepared(p, x.dtype), ProductEnd()) for x, p in inputs]
        numbers = torch.from_numpy(weight.dequantize()).to(machine.device).float()
        check(f"humming, {problem}", theirs[0]()[:, -_BASE:], inputs[0][0].float() @ numbers.T, 2e-2)
        found.append(Figure(f"{problem}: humming", seconds_of(machine, theirs) * 1e6, _UNIT))
    return found


def mixtures(machine: Machine, type_name: str) -> list[Figure]:
    """Measure a whole mixture, two of eight experts per row, with our kernels and with the provider."""
    from octavo.backends.torch import triton_calls

    s, top_k = machine.shapes, 2 if machine.is_gpu else 1
    inner = max(s.expert_rows, 256)  # the columns of a block of Q4_K
    shapes = ((s.experts, inner, s.hidden),) * 2 + ((s.experts, s.hidden, inner),)
    stacks = [stack_of(type_name, shape, machine) for shape in shapes]
    names = [Parameter(name, shape) for name, shape in zip(("gate", "up", "down"), shapes, strict=True)]
    router = Parameter("router", (s.experts, s.hidden))
    op = MoE(Value(0, TOKENS, s.hidden), router, *names, Routing(top_k))
    problems = mixture_problems(_place(machine), [(stack, stack.shape) for stack in stacks])
    reasons = [reason for problem in problems if problem is not None and (reason := humming.can(problem)) is not None]
    own: Any = triton_calls
    provided, found = ProvidedCalls(own, _place(machine), products=True), []
    for rows in (8, 32, 128, 512) if machine.is_gpu else (1,):
        chosen = torch.stack([torch.randperm(s.experts, device=machine.device)[:top_k] for _ in range(rows)])
        choice = chosen, torch.rand(rows, top_k, device=machine.device)
        x, problem = machine.normal(rows, s.hidden), f"experts, {type_name}, rows {rows}"
        results = []
        for name, calls in (("triton", own), ("humming", provided)):
            if name == "humming" and reasons:
                found.append(_not_here(problem, name, reasons[0]))
                continue
            call = partial(calls.experts, op, x, choice, stacks, [None] * 3, repeats=False)
            results.append(call().float())
            check(f"{name}, {problem}", results[-1], results[0], 2e-2)
            found.append(Figure(f"{problem}: {name}", seconds_of(machine, [call]) * 1e6, _UNIT))
    return found


def prompts(machine: Machine) -> list[Figure]:
    """Measure attention of whole prompts and of chunks after a prefix, over pages of 16 and of 256 tokens."""
    p, found = params(machine), []
    sizes = ((512, 512), (2048, 2048), (512, 8192), (16384, 16384)) if machine.is_gpu else ((20, 20), (5, 20))
    for block in (16, 256):
        for tokens, end in sizes:
            blocks = -(-end // block)
            table = torch.randperm(blocks, device=machine.device).int()[None]
            shape = (blocks, p.num_kv_heads, block, p.head_dim)
            pages = LayerPages(machine.normal(*shape), machine.normal(*shape), 0)
            numbers = partial(torch.tensor, dtype=torch.int32, device=machine.device)
            window = VisibleBlocks(table, numbers([0]), numbers([end]))
            positions = torch.arange(end - tokens, end, device=machine.device).int()[None]
            some = EqualSequences(None, positions, numbers([0, tokens]), (window,), (end,))
            q = machine.normal(tokens, p.num_heads, p.head_dim)
            view, seqs = CacheView(pages.keys, pages.values), Sequences(some.starts, window.end, table)
            own = partial(prefill_attention, q, view, p, seqs)
            problem = f"prompt, {tokens} of {end} tokens in pages of {block}"
            found.append(Figure(f"{problem}: triton", seconds_of(machine, [own], captured=False) * 1e6, _UNIT))
            for name, module in (("varlen", varlen), ("sdpa", sdpa)):
                reason = module.can(PromptProblem(_place(machine), p, pages.keys.dtype))
                if reason is not None and (machine.is_gpu or name == "varlen"):  # torch has SDPA on the CPU, too
                    found.append(_not_here(problem, name, reason))
                    continue
                out = q.new_empty(tokens, p.output_width)
                call = partial(module.attend, q, pages, p, some, out)
                check(f"{name}, {problem}", call().reshape(own().shape), own().float(), 2e-2)
                found.append(Figure(f"{problem}: {name}", seconds_of(machine, [call], captured=False) * 1e6, _UNIT))
    return found


def _arrays(machine: Machine, tokens: int) -> StepArrays:
    numbers = partial(torch.tensor, dtype=torch.int32, device=machine.device)
    positions = torch.arange(tokens, dtype=torch.int32, device=machine.device)
    none = positions[:0]
    rows = StepRows(positions, positions, torch.zeros_like(positions), none, numbers([0, tokens]), (0, tokens))
    return StepArrays(rows, none, none, (), numbers([0]), numbers([1]), numbers([[1]]))


def states(machine: Machine) -> list[Figure]:
    """Measure prompts through the states of linear attention."""
    found, (wide, count) = [], (128, 32) if machine.is_gpu else (16, 4)
    vectors = [-torch.rand(count, device=machine.device) for _ in range(3)]
    names = [Parameter(name, (count,)) for name in ("decay", "skip", "dt_bias")]
    delta, scan = DeltaHeads(count // 2, count, wide, wide), ScanHeads(count, wide, count // 4, wide)
    for tokens in (512, 4096) if machine.is_gpu else (5,):
        arrays = _arrays(machine, tokens)
        saves = torch.full((1, 1, 2), -1, dtype=torch.int32, device=machine.device)
        rows = StateRows(
            arrays.rows.first_rows, arrays.rows.sequences, arrays.rows.positions, arrays.state_slots, saves
        )  # fmt: skip
        qkv, few = machine.normal(tokens, 2 * count * wide), [machine.normal(tokens, count) for _ in range(2)]
        xbc = machine.normal(tokens, count * wide * 3 // 2)
        cases: list[tuple[Any, list[Tensor], list[Tensor], Any]] = [
            (
                GatedDeltaRule(Value(0, TOKENS, qkv.shape[1]), *(Value(i, TOKENS, count) for i in (1, 2)),
                               names[0], names[2], delta, 0),
                [qkv, *few], [vectors[0], vectors[2]], delta_rule,
            ),
            (
                SelectiveScan(Value(0, TOKENS, xbc.shape[1]), Value(1, TOKENS, count), *names, scan, 0),
                [xbc, few[0]], vectors, selective_scan,
            ),
        ]  # fmt: skip
        for op, values, weights, kernel in cases:
            kind = "gated delta rule" if isinstance(op, GatedDeltaRule) else "selective scan"
            state = machine.normal(2, *op.cache.shapes[0], dtype=torch.float32, scale=0.1)
            extra = (op.heads, op.eps) if isinstance(op, GatedDeltaRule) else (op.heads,)
            own = partial(kernel, tuple(values), state, tuple(weights), *extra, rows)
            problem = f"{kind}, {tokens} tokens"
            found.append(Figure(f"{problem}: triton", seconds_of(machine, [own], captured=False) * 1e6, _UNIT))
            reason = fla.can(StateProblem(_place(machine), kind, wide, wide))
            if reason is not None:
                found.append(_not_here(problem, "fla", reason))
                continue
            theirs = partial(fla.advanced, op, values, state, weights, arrays)
            check(f"fla, {problem}", theirs(), own().float(), 3e-2)
            found.append(Figure(f"{problem}: fla", seconds_of(machine, [theirs], captured=False) * 1e6, _UNIT))
    return found


CASES = [
    Case("providers, prompts", "providers", prompts, 20),
    *(Case(f"providers, {name}", "providers", partial(products, type_name=name), 25) for name in FORMATS),
    *(Case(f"providers, experts, {n}", "providers", partial(mixtures, type_name=n), 25) for n in ("Q4_K", "MXFP4")),
    Case("providers, states", "providers", states, 25),
]
