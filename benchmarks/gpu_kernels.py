"""Attention over the paged cache, and the small kernels between products, at the shapes of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_cases import Case, Figure, Machine, check, in_turns, seconds_of
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.kernels.attention import Sequences, decode_attention, prefill_attention
from octavo.backends.torch.kernels.cache_view import CacheView
from octavo.backends.torch.kernels.gate import gated
from octavo.backends.torch.kernels.norm import rms_norm
from octavo.backends.torch.kernels.recurrence import StateRows, delta_rule, selective_scan
from octavo.backends.torch.kernels.rope import HeadSteps, prepare_heads
from octavo.backends.torch.kernels.sample import Entries, has_filters, row_options, sample_rows
from octavo.batch import greedy_rows
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.recurrence import DeltaHeads, ScanHeads

_MOST_TOKENS = 1 << 20  # of a cache that is measured
CACHE_TYPES = {"bf16": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def params(machine: Machine) -> AttentionParams:
    s = machine.shapes
    return AttentionParams(0, s.heads, s.kv_heads, s.head_dim, s.head_dim**-0.5)


def cache_of(machine: Machine, blocks: int, block: int, kind: torch.dtype | None) -> CacheView:
    p = params(machine)
    shape = (blocks, p.num_kv_heads, block)
    keys, values = (machine.normal(*shape, p.head_dim) for _ in range(2))
    if kind is None:
        return CacheView(keys, values)
    if kind == torch.int8:
        scales = [torch.full(shape, 0.03, device=machine.device) for _ in range(2)]
        codes = [(x / 0.03).round().clamp(-127, 127).to(torch.int8) for x in (keys, values)]
        return CacheView(*codes, *scales)
    return CacheView(keys.to(kind), values.to(kind))


def _numbers(cache: CacheView, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one sequence [kv heads, tokens, dim] in float32."""
    found = []
    for x, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        assert x is not None
        wide = x[tables.long()].float()
        wide = wide if scales is None else wide * scales[tables.long()][..., None]
        found.append(wide.transpose(0, 1).flatten(1, 2))
    return found[0], found[1]


def _expected(machine: Machine, q: Tensor, cache: CacheView, seqs: Sequences, *, is_causal: bool) -> Tensor:
    """Compute the first sequence's attention with the library, in float32 [tokens, heads, dim]."""
    p, length = params(machine), int(seqs.lengths[0])
    keys, values = (x[:, :length] for x in _numbers(cache, seqs.tables[0]))
    share = p.num_heads // p.num_kv_heads
    keys, values = (x.repeat_interleave(share, 0)[None] for x in (keys, values))
    queries = q.float().transpose(0, 1)[None]
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal, scale=p.scale)[
        0
    ].transpose(0, 1)


def sequences(machine: Machine, batch: int, context: int, block: int, *, tokens: int = 1) -> tuple[Sequences, int]:
    """Return sequences in randomly ordered blocks, and the number of blocks."""
    blocks = -(-context // block)
    order = torch.randperm(batch * blocks, device=machine.device).int().reshape(batch, blocks)
    starts = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=machine.device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=machine.device)
    return Sequences(starts, lengths, order), batch * blocks


def _decode(machine: Machine, batch: int, context: int, kind: str, block: int = 16, part: int | None = None) -> float:
    """Return the seconds of one decode attention, after checking its result."""
    p = params(machine)

    def make() -> Callable[[], Tensor]:
        seqs, blocks = sequences(machine, batch, context, block)
        q = machine.normal(batch, p.num_heads, p.head_dim)
        cache = cache_of(machine, blocks, block, CACHE_TYPES[kind])
        return partial(decode_attention, q, cache, p, seqs, context, part_tokens=part)

    calls = in_turns(machine, make, cache_bytes(machine, batch, context, kind))
    q, cache, _, seqs, _ = calls[0].args  # type: ignore[attr-defined]
    found = calls[0]()
    assert isinstance(found, Tensor)
    check(
        f"decode {kind}, {batch} x {context}", found[:1], _expected(machine, q[:1], cache, seqs, is_causal=False), 2e-2
    )
    return seconds_of(machine, calls)


def cache_bytes(machine: Machine, batch: int, context: int, kind: str) -> float:
    p = params(machine)
    width = machine.dtype.itemsize if kind == "bf16" else 1
    scales = 4 / p.head_dim if kind == "int8" else 0
    return 2.0 * batch * context * p.num_kv_heads * p.head_dim * (width + scales)


def decode(machine: Machine, kind: str) -> list[Figure]:
    """Measure decode attention by batch and context."""
    found, s = [], machine.shapes
    for batch in s.batches:
        for context in s.contexts:
            if batch * context > _MOST_TOKENS:
                continue
            seconds = _decode(machine, batch, context, kind)
            share = machine.share(cache_bytes(machine, batch, context, kind), "read", seconds)
            name = f"batch {batch}, context {context}"
            found.append(Figure(name, seconds * 1e6, "microseconds", share))
            if kind == "bf16":
                machine.known[name] = seconds
            elif name in machine.known:
                found.append(Figure(f"bf16 over this, {name}", machine.known[name] / seconds, "x"))
    return found


def decode_choices(machine: Machine) -> list[Figure]:
    """Measure decode attention by block size and length of a part, to justify the defaults."""
    found = []
    for batch, context in ((1, 8192), (32, 4096)) if machine.is_gpu else ((1, 48),):
        for block in (16, 32, 64):
            for part in (128, 256, 512, 1024) if machine.is_gpu else (64,):
                seconds = _decode(machine, batch, context, "bf16", block, part)
                share = machine.share(cache_bytes(machine, batch, context, "bf16"), "read", seconds)
                name = f"batch {batch}, context {context}, blocks of {block}, parts of {part}"
                found.append(Figure(name, seconds * 1e6, "microseconds", share))
    return found


def prefill(machine: Machine) -> list[Figure]:
    """Measure attention of whole prompts, compared with the library's without pages."""
    found, p, block = [], params(machine), 16
    for tokens in (512, 2048, 4096, 16384) if machine.is_gpu else (20,):
        seqs, blocks = sequences(machine, 1, tokens, block, tokens=tokens)
        cache = cache_of(machine, blocks, block, None)
        q = machine.normal(tokens, p.num_heads, p.head_dim)
        call = partial(prefill_attention, q, cache, p, seqs)
        if tokens <= 4096:
            check(f"prefill {tokens}", call(), _expected(machine, q, cache, seqs, is_causal=True), 2e-2)
        seconds = seconds_of(machine, [call])
        operations = 2.0 * p.num_heads * p.head_dim * tokens * (tokens + 1)  # two products over the seen half
        share = machine.share(operations, "bf16 product", seconds)
        found.append(Figure(f"{tokens} tokens", operations / seconds * 1e-12, "TFLOP/s", share))
        if machine.is_gpu:
            keys, values = (x[None, :, :tokens].to(machine.dtype) for x in _numbers(cache, seqs.tables[0]))
            library = partial(
                functional.scaled_dot_product_attention, q.transpose(0, 1)[None], keys, values, is_causal=True,
                enable_gqa=True,
            )  # fmt: skip
            rate = operations / seconds_of(machine, [library]) * 1e-12
            found.append(Figure(f"library, {tokens} tokens", rate, "TFLOP/s"))
    return found


def rowwise(machine: Machine) -> list[Figure]:
    """Measure rotation with the cache write, norms and gates."""
    s, p, found = machine.shapes, params(machine), []
    angles = torch.rand(8192, 2, s.head_dim // 2, device=machine.device)
    weight = machine.normal(s.hidden)
    few, many = ((1, 32), 8192) if machine.is_gpu else ((1, 2), 5)
    for rows in (*few, many):
        blocks = -(-rows // 16)
        cache, places = cache_of(machine, blocks, 16, None), torch.randperm(rows, device=machine.device).int()
        qkv = machine.normal(rows, sum(p.widths))
        heads = partial(prepare_heads, qkv, cache, p, HeadSteps(angles), places, places)
        x = machine.normal(rows, s.hidden)
        norm = partial(rms_norm, x, weight, 1e-5)
        right = functional.rms_norm(x.float(), (s.hidden,), weight.float(), 1e-5)
        check(f"norm, rows {rows}", norm(), right, 1e-2)
        pairs = machine.normal(rows, 2 * s.intermediate)
        gate = partial(gated, pairs, "silu")
        a, b = pairs.float().chunk(2, dim=1)
        check(f"gate, rows {rows}", gate(), functional.silu(a) * b, 1e-2)
        values = qkv[:, sum(p.widths[:2]) :].reshape(rows, s.kv_heads, s.head_dim)
        heads()
        assert cache.values is not None
        check(f"heads, rows {rows}", cache.values[places // 16, :, places % 16], values.float(), 1e-2)
        moved = {"heads and cache": 2 * qkv.nbytes, "norm": 2 * x.nbytes, "gate": 1.5 * pairs.nbytes}
        for (name, nbytes), call in zip(moved.items(), (heads, norm, gate), strict=True):
            seconds = seconds_of(machine, [call])
            share = machine.share(nbytes, "copy", seconds)
            found.append(Figure(f"{name}, rows {rows}", seconds * 1e6, "microseconds", share))
    return found


def sampling(machine: Machine) -> list[Figure]:
    """Measure all steps from logits to tokens, on logits that fall with a token's rank as a model's do."""
    found, vocab = [], machine.shapes.vocab
    count = 32 if machine.is_gpu else 1
    ranks = torch.argsort(torch.rand(count, vocab, device=machine.device), dim=1)
    logits = -1.7 * torch.log(ranks.float() + 1)
    filters = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    cases: dict[str, dict[str, float]] = {
        "greedy": {}, "temperature": {"temperature": 0.8}, "filters": filters, "log-probabilities": {"num_logprobs": 5}
    }  # fmt: skip
    for name, options in cases.items():
        rows = greedy_rows(count)
        rows["seed"] = range(count)
        for key, value in options.items():
            rows[key] = value
        entries = Entries(torch.zeros(count, dtype=torch.int32, device=machine.device))
        chosen, num_top = row_options(rows, machine.device), int(options.get("num_logprobs", 0))
        call = partial(sample_rows, logits, chosen, entries, num_top, is_filtered=has_filters(rows))
        place = ranks.gather(1, call().token_ids.long()[:, None])
        most = {"temperature": vocab, "filters": 50}.get(name, 1)
        assert int(place.max()) < most, "a token that the filters exclude was drawn"
        found.append(Figure(f"{name}, rows {count}", seconds_of(machine, [call]) * 1e6, "microseconds"))
    return found


def states(machine: Machine) -> list[Figure]:
    """Measure one token of each of 32 sequences through the states of linear attention."""
    count, wide = (32, 128) if machine.is_gpu else (2, 16)
    heads, float32 = (32 if machine.is_gpu else 4), torch.float32
    ints = torch.arange(count, dtype=torch.int32, device=machine.device)
    starts = torch.arange(count + 1, dtype=torch.int32, device=machine.device)
    saves = torch.full((count, 2), -1, dtype=torch.int32, device=machine.device)
    rows = StateRows(starts, ints, torch.ones_like(ints), ints, saves)
    state = machine.normal(count, heads, wide, wide, dtype=float32)
    vectors = [-torch.rand(heads, device=machine.device) for _ in range(3)]
    delta = DeltaHeads(heads // 2, heads, wide, wide)
    values = (machine.normal(count, 2 * heads * wide), *(machine.normal(count, heads) for _ in range(2)))
    scan = ScanHeads(heads, wide, heads // 4, wide)
    inputs = (machine.normal(count, heads * wide * 3 // 2), machine.normal(count, heads))
    calls: dict[str, Callable[[], Tensor]] = {
        "gated delta rule": partial(delta_rule, values, state, (vectors[0], vectors[1]), delta, 1e-6, rows),
        "selective scan": partial(selective_scan, inputs, state, (vectors[0], vectors[1], vectors[2]), scan, rows),
    }
    found = []
    for name, call in calls.items():
        seconds = seconds_of(machine, [call])
        share = machine.share(2 * state.nbytes, "copy", seconds)
        found.append(Figure(f"{name}, rows {count}", seconds * 1e6, "microseconds", share))
    return found


CASES = [
    Case("decode attention, bf16", "kernels", partial(decode, kind="bf16"), 40),
    Case("prefill attention", "kernels", prefill, 30),
    Case("rows", "kernels", rowwise, 20),
    Case("sampling", "kernels", sampling, 15),
    Case("decode attention, choices", "kernels", decode_choices, 40),
    Case("decode attention, fp8", "kernels", partial(decode, kind="fp8"), 40),
    Case("decode attention, int8", "kernels", partial(decode, kind="int8"), 40),
    Case("states", "kernels", states, 15),
]
