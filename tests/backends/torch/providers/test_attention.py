"""Attention of torch's libraries over the pages of a layer, against the numpy meaning of the operation."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as varlen_module

from octavo.backends.torch.cache import LayerPages
from octavo.backends.torch.providers import sdpa, varlen
from octavo.backends.torch.step_arrays import EqualSequences, VisibleBlocks
from octavo.graph.cache import first_visible
from octavo.graph.ops.attention import AttentionParams, _attend

_REAL = varlen_module.varlen_attn
PLAIN = AttentionParams(0, 4, 2, 16, 0.25)


class Case:
    """Sequences of these lengths, of each of which the last tokens are queries, in blocks of a random order."""

    def __init__(self, p: AttentionParams, tokens: int, ends: tuple[int, ...], block: int) -> None:
        rng = np.random.default_rng(3)
        counts = [-(-end // block) for end in ends]
        blocks = 1 + sum(counts)
        self.p, self.tokens = p, tokens
        shape = (blocks, p.num_kv_heads, block, p.head_dim)
        self.pages = LayerPages(*(torch.from_numpy(rng.normal(size=shape)).float() for _ in range(2)), 0)
        order, tables = rng.permutation(np.arange(1, blocks)), np.zeros((len(ends), max(counts)), np.int32)
        for number, count in enumerate(counts):
            tables[number, :count] = order[sum(counts[:number]) :][:count]
            if p.window is not None:  # blocks that nobody sees any more are given to others
                low = first_visible(ends[number] - tokens, p.window, chunked=p.chunked)
                tables[number, : low // block] = 0
        positions = torch.tensor([[*range(end - tokens, end)] for end in ends], dtype=torch.int32)
        starts = torch.arange(len(ends) + 1, dtype=torch.int32) * tokens
        window = VisibleBlocks(
            torch.from_numpy(tables), torch.zeros(len(ends), dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
        )
        self.some = EqualSequences(None, positions, starts, (window,), ends)
        self.q = torch.from_numpy(rng.normal(size=(len(ends) * tokens, p.num_heads, p.head_dim))).float()

    def expected(self) -> np.ndarray:
        found, p, block = [], self.p, self.pages.keys.shape[2]
        for number, end in enumerate(self.some.ends):
            at = np.arange(first_visible(end - self.tokens, p.window, chunked=p.chunked), end)
            table = self.some.windows[0].tables[number].numpy()
            k, v = (x.numpy()[table[at // block], :, at % block] for x in (self.pages.keys, self.pages.values))
            q = self.q[number * self.tokens :][: self.tokens].flatten(1).numpy()
            positions = np.arange(end - self.tokens, end, dtype=np.int32) - at[0]
            found.append(_attend(q, k, v, (positions, positions), p, (None, None)))
        return np.concatenate(found)

    def check(self, module: Any) -> None:
        out = torch.full((len(self.q), self.p.output_width), torch.nan)
        assert module.attend(self.q, self.pages, self.p, self.some, out) is out
        np.testing.assert_allclose(out.numpy(), self.expected(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("ends", [(5,), (5, 5), (5, 9, 30)])
def test_sdpa_from_the_first_token_on_and_behind_a_prefix(ends: tuple[int, ...]) -> None:
    Case(PLAIN, 5, ends, 8).check(sdpa)


def fake_varlen(query: Tensor, key: Tensor, value: Tensor, *ends: Any, **options: Any) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as torch 2.13 documents it, for tensors on the CPU."""
    signature = inspect.signature(_REAL)
    signature.bind(query, key, value, *ends, **options)
    cu_seq_q, cu_seq_k, max_q, max_k = ends
    seqused_k, block_table, window_size = (options.get(n) for n in ("seqused_k", "block_table", "window_size"))
    assert options["enable_gqa"]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    found = torch.empty_like(query)
    ends_q, ends_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    for n in range(len(ends_q) - 1):
        rows = slice(ends_q[n], ends_q[n + 1])
        length = ends_k[n + 1] - ends_k[n]
        if block_table is None:
            k, v = (x[ends_k[n] : ends_k[n + 1]] for x in (key, value))
        else:
            assert seqused_k is not None
            assert seqused_k.dtype == block_table.dtype == torch.int32
            length = int(seqused_k[n])
            k, v = (x[block_table[n].long()].flatten(0, 1)[:length] for x in (key, value))
        count = rows.stop - rows.start
        assert count <= max_q
        assert length <= max_k
        i, j = torch.arange(count)[:, None] + length - count, torch.arange(length)
        mask = (j <= i + window_size[1]) & ((window_size[0] < 0) | (j >= i - window_size[0]))
        share = query.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(share, dim=1).transpose(0, 1) for x in (k, v))
        scores = (query[rows].transpose(0, 1) @ k.transpose(1, 2)) * options["scale"]
        found[rows] = (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return found


fake_varlen.__signature__ = inspect.signature(_REAL)  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [None, 4, 12])
@pytest.mark.parametrize("block", [8, 256])
def test_varlen_with_and_without_a_block_table(block: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen)
    assert varlen.reads_pages(block) == (block == 256)
    Case(replace(PLAIN, window=window), 5, (5, 30, 7), block).check(varlen)
