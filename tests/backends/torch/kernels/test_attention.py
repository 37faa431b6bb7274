"""Paged attention against the numpy meaning of the operation in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.backends.torch.kernels.attention import Sequences, decode_attention, prefill_attention
from octavo.backends.torch.kernels.cache_view import CacheView
from octavo.graph.cache import first_visible
from octavo.graph.ops.attention import AttentionParams, _attend

_PLAIN = AttentionParams(0, 4, 2, 64, 0.125)


class Case:
    """A cache of random blocks, in which blocks that nothing may read are NaN, and queries of several sequences."""

    def __init__(self, p: AttentionParams, counts: list[int], lengths: list[int], *, block: int, latent: bool) -> None:
        rng = np.random.default_rng(5)
        blocks = [-(-length // block) for length in lengths]
        num_blocks = sum(blocks) + 3
        order = rng.permutation(num_blocks)[: sum(blocks)]
        shape = (num_blocks, p.num_kv_heads, block)
        self.p, self.counts, self.lengths = p, counts, lengths
        keys, values = rng.normal(size=(*shape, p.head_dim)), rng.normal(size=(*shape, p.cache.value_dim))
        self.tables = rng.integers(10_000, 20_000, (len(counts), max([*blocks, 1]) + 2)).astype(np.int32)
        used, at = np.zeros((num_blocks, block), bool), 0
        for n, count in enumerate(blocks):
            self.tables[n, :count] = order[at : at + count]
            at += count
            low = first_visible(lengths[n] - counts[n], p.window, chunked=p.chunked)
            for position in range(low, lengths[n]):
                used[self.tables[n, position // block], position % block] = True
            self.tables[n, : low // block] = 30_000  # a block that has left the window
        keys.swapaxes(1, 2)[~used] = np.nan
        values.swapaxes(1, 2)[~used] = np.nan
        self.keys, self.values = torch.from_numpy(keys), None if latent else torch.from_numpy(values)
        self.q = torch.from_numpy(rng.normal(size=(sum(counts), p.num_heads, p.head_dim)))
        self.sinks = torch.from_numpy(rng.normal(size=p.num_heads))

    def sequences(self, device: torch.device) -> Sequences:
        starts = np.cumsum([0, *self.counts]).astype(np.int32)
        arrays = (starts, np.array(self.lengths, np.int32), self.tables)
        return Sequences(*(torch.from_numpy(a).to(device) for a in arrays))

    def expected(self, cache: CacheView | None = None, *, sinks: bool = False) -> torch.Tensor:
        """Of the numbers in the cache. In float64."""
        keys, values = self.keys, self.values
        if cache is not None:
            keys, values = _numbers(cache)
        out, token = [], 0
        for n, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            low = first_visible(length - count, self.p.window, chunked=self.p.chunked)
            at = np.arange(low, length)
            block, slot = self.tables[n, at // keys.shape[2]], at % keys.shape[2]
            k = keys.numpy()[block, :, slot]
            v = k[..., : self.p.cache.value_dim] if values is None else values.numpy()[block, :, slot]
            q = self.q.numpy()[token : token + count].reshape(count, -1)
            positions = np.arange(length - count, length, dtype=np.int32) - low
            out.append(_attend(q, k, v, (positions, positions), self.p, (self.sinks.numpy() if sinks else None, None)))
            token += count
        return torch.from_numpy(np.concatenate(out)).reshape(self.q.shape[0], self.p.num_heads, -1)


def _numbers(c: CacheView) -> tuple[torch.Tensor, torch.Tensor | None]:
    def wide(x: torch.Tensor, scales: torch.Tensor | None, factor: float) -> torch.Tensor:
        found = x.cpu().float().double()
        return found * factor if scales is None else found * scales.cpu().double()[..., None]

    values = None if c.values is None else wide(c.values, c.value_scales, c.value_factor)
    return wide(c.keys, c.key_scales, c.key_factor), values


def _check(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    assert (found.cpu().double() - expected).norm() / expected.norm() < tolerance


_PARAMS = {
    "plain": _PLAIN,
    "all heads of their own": replace(_PLAIN, num_heads=2),
    "seven share one": replace(_PLAIN, num_heads=14, head_dim=32),
    "dim 80, value 48": replace(_PLAIN, head_dim=80, value_dim=48),
    "dim 96": replace(_PLAIN, head_dim=96),
    "dim 128": replace(_PLAIN, head_dim=128),
    "dim 192, value 128": replace(_PLAIN, head_dim=192, value_dim=128, num_heads=2),
    "dim 256": replace(_PLAIN, head_dim=256, num_heads=2),
    "window": replace(_PLAIN, window=20),
    "chunked": replace(_PLAIN, window=16, chunked=True),
    "soft cap": replace(_PLAIN, softcap=3.0),
    "alibi": replace(_PLAIN, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
    "all at once": replace(_PLAIN, window=9, softcap=2.0, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
}


def _run(case: Case, cache: CacheView, device: torch.device, kind: str, sinks: bool) -> torch.Tensor:
    p = case.p
    slopes = None if p.alibi_slopes is None else torch.tensor(p.alibi_slopes, device=device)
    tables = (case.sinks.float().to(device) if sinks else None, slopes)
    q = case.q.float().to(device)
    if kind == "prefill":
        return prefill_attention(q, cache, p, case.sequences(device), tables_of=tables)
    parts = 64 if kind == "parts" else 512
    longest = max(case.lengths)
    return decode_attention(q, cache, p, case.sequences(device), longest, tables_of=tables, part_tokens=parts)


def _float_cache(case: Case, device: torch.device) -> CacheView:
    return CacheView(case.keys.float().to(device), None if case.values is None else case.values.float().to(device))


@pytest.mark.parametrize("name", _PARAMS)
@pytest.mark.parametrize("kind", ["decode", "parts", "prefill"])
def test_every_parameter(name: str, kind: str, device: torch.device) -> None:
    counts = [5, 1, 9] if kind == "prefill" else [1, 1, 1]
    case = Case(_PARAMS[name], counts, [37, 1, 130] if kind == "parts" else [37, 1, 50], block=8, latent=False)
    _check(_run(case, _float_cache(case, device), device, kind, sinks=False), case.expected())


@pytest.mark.parametrize("kind", ["decode", "parts", "prefill"])
def test_sinks(kind: str, device: torch.device) -> None:
    case = Case(replace(_PLAIN, window=30), [1, 1], [70, 3], block=16, latent=False)
    _check(_run(case, _float_cache(case, device), device, kind, sinks=True), case.expected(sinks=True))


@pytest.mark.parametrize("kind", ["decode", "parts", "prefill"])
def test_a_latent_whose_first_columns_are_the_values(kind: str, device: torch.device) -> None:
    p = AttentionParams(0, 20, 1, 80, 0.1, value_dim=64)
    case = Case(p, [1, 1] if kind != "prefill" else [3, 1], [70, 9], block=16, latent=True)
    _check(_run(case, _float_cache(case, device), device, kind, sinks=False), case.expected())


def test_padding_rows_are_zero_and_read_nothing(device: torch.device) -> None:
    case = Case(_PLAIN, [1, 1], [70, 3], block=16, latent=False)
    seqs = case.sequences(device)
    padded = Sequences(
        torch.arange(4, dtype=torch.int32, device=device),
        torch.cat([seqs.lengths, torch.zeros(1, dtype=torch.int32, device=device)]),
        torch.cat([seqs.tables, torch.full_like(seqs.tables[:1], 1 << 30)]),
    )
    q = torch.cat([case.q, case.q[:1]]).float().to(device)
    for parts in (64, 512):
        found = decode_attention(q, _float_cache(case, device), _PLAIN, padded, 128, part_tokens=parts)
        _check(found[:2], case.expected())
        assert torch.equal(found[2], torch.zeros_like(found[2]))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_types_of_the_cache(dtype: torch.dtype, kind: str, device: torch.device) -> None:
    case = Case(_PLAIN, [1, 1], [40, 3], block=16, latent=False)
    assert case.values is not None
    keys, values = case.keys.nan_to_num(0).float(), case.values.nan_to_num(0).float()
    if dtype == torch.int8:
        scales = [x.abs().amax(-1).clamp(min=1e-3) / 127 for x in (keys, values)]
        codes = [(x / s[..., None]).round().to(torch.int8) for x, s in zip((keys, values), scales, strict=True)]
        cache = CacheView(*(x.to(device) for x in codes), *(s.to(device) for s in scales))
    elif dtype == torch.float16:
        cache = CacheView(keys.half().to(device), values.half().to(device))
    else:
        cache = CacheView(
            (keys / 0.5).to(dtype).to(device), (values / 2).to(dtype).to(device), key_factor=0.5, value_factor=2.0
        )
    _check(_run(case, cache, device, kind, sinks=False), case.expected(cache))


def test_strides_of_the_engines_tensor(device: torch.device) -> None:
    case = Case(_PLAIN, [2, 4], [10, 33], block=16, latent=False)
    assert case.values is not None
    whole = torch.full((case.keys.shape[0], 3, 2, *case.keys.shape[1:]), float("nan"), device=device)
    whole[:, 1, 0], whole[:, 1, 1] = case.keys.float(), case.values.float()
    _check(_run(case, CacheView(whole[:, 1, 0], whole[:, 1, 1]), device, "prefill", sinks=False), case.expected())
