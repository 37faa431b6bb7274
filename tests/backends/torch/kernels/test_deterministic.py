"""`deterministic`: a sequence's logits are the same bits alone, in chunks, token by token, and in any batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from octavo.backends import ExecutorLimits
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.executor import TorchExecutor
from octavo.backends.torch.graphs import CudaReplay
from octavo.backends.torch.kernels.dense import dense_linear
from octavo.config import KVDtype
from tests.support.batches import Request, step
from tests.support.spanning import spanning_graph
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

HAS_GPU = torch.cuda.is_available()
LIMITS = ExecutorLimits(48, 4, 48, 48)
RNG = np.random.default_rng(11)
TOKENS = RNG.integers(0, 96, 8).tolist()  # of the sequence that is watched
STRANGERS = [RNG.integers(0, 96, n).tolist() for n in (20, 5, 17)]


@pytest.fixture(autouse=True)
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes the products of numpy, in which the order of a row's sums may depend on its place."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> Any:
        parts = (a[..., :, k, None].astype(dtype) * b[..., k, None, :].astype(dtype) for k in range(a.shape[-1]))
        return sum(parts, np.zeros((), dtype))

    if not HAS_GPU:
        monkeypatch.setattr(np, "matmul", matmul)


def executor(name: str, kv_dtype: KVDtype = "float16", *, deterministic: bool = True) -> TorchExecutor:
    from octavo.backends.torch import triton_calls

    backend = TorchBackend(torch.device("cpu"), torch.float32, deterministic=deterministic)
    if HAS_GPU:
        backend = replace(backend, device=torch.device("cuda"), dtype=torch.bfloat16, capture=CudaReplay)
    found = backend.compile(*tiny_graph(name), LIMITS, kv_dtype=kv_dtype)
    found.allocate_cache(24 * NUM_CACHE_GROUPS, 8, 16)
    found.calls = triton_calls  # type: ignore[assignment]
    return found


def logits(subject: TorchExecutor, chunks: list[int], strangers: list[list[int]], place: int = 0) -> np.ndarray:
    """The logits [8, vocab] of the watched sequence, computed in these chunks beside strangers' steps of any length."""
    request = Request([*TOKENS], [0, 1])
    others = [Request([*tokens], [2 + 3 * i, 3 + 3 * i, 4 + 3 * i]) for i, tokens in enumerate(STRANGERS)]
    found = []
    for chunk, counts in zip(chunks, strangers or [[]] * len(chunks), strict=True):
        scheduled = [(other, count) for other, count in zip(others, counts, strict=False) if count]
        scheduled.insert(min(place, len(scheduled)), (request, chunk))
        batch = step(scheduled, block_size=8, num_groups=NUM_CACHE_GROUPS)
        begin = sum(count for _, count in scheduled[: scheduled.index((request, chunk))])
        found.append(subject.submit(batch).wait().logits[begin : begin + chunk])
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("llama", "float16"),
        *(
            pytest.param(name, kv_dtype, marks=pytest.mark.slow)
            for name, kv_dtype in (
                ("llama", "int8"),
                ("gemma2", "float16"),
                ("gemma3n", "float16"),
                ("gpt-oss", "float16"),
                ("mixtral", "float16"),
                ("deepseek3", "float16"),
                ("qwen35", "float16"),
                ("lfm2", "float16"),
            )
        ),
    ],
)
def test_a_sequence_has_the_same_logits_alone_and_in_any_batch(
    name: str, kv_dtype: KVDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, torch's sigmoid rounds numbers at the end of a tensor differently (of routers, in float32)."""
    sigmoid = torch.sigmoid
    if not HAS_GPU:
        monkeypatch.setattr(torch, "sigmoid", lambda x: sigmoid(x.double()).to(x.dtype))
    subject = executor(name, kv_dtype)
    alone = logits(subject, [7, 1], [])
    for chunks, strangers, place in (([7, 1], [[17], [1, 0, 2]], 1), ([2, 5, 1], [[9, 3, 2], [1, 0, 3], [1, 1, 1]], 2)):
        np.testing.assert_array_equal(logits(subject, chunks, strangers, place), alone)
    subject.close()


def test_the_default_promises_less() -> None:
    """Else the test above would show nothing."""
    subject = executor("llama", deterministic=False)
    alone = logits(subject, [7, 1], [])
    in_chunks = logits(subject, [4, 3, 1], [])
    assert (in_chunks != alone).any()
    # Of a GPU's values in bfloat16, each may be rounded the other way.
    tolerance = 5e-2 if HAS_GPU else 5e-3
    np.testing.assert_allclose(in_chunks, alone, rtol=0, atol=tolerance * np.abs(alone).max())


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_a_row_of_a_product_depends_on_itself_alone(rows: int, device: torch.device) -> None:
    x, weight = torch.randn(rows, 83, device=device)[:, :70], torch.randn(37, 70, device=device)
    bias, residual = torch.randn(37, device=device), torch.randn(rows, 37, device=device)
    one_tile_linear = partial(dense_linear, deterministic=True)
    found = one_tile_linear(x, weight, bias, residual)
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    assert (found.double() - expected).norm() / expected.norm() < 1e-6
    for row in range(rows):
        own = one_tile_linear(x[row : row + 1], weight, bias, residual[row : row + 1])
        assert torch.equal(own[0], found[row])
    assert one_tile_linear(x[:0], weight).shape == (0, 37)
    halves = one_tile_linear(x.half(), weight.half(), dtype=torch.float32)
    assert (halves.double() + bias.double() + residual.double() - expected).norm() / expected.norm() < 3e-3


@pytest.mark.parametrize("rows", [1, 5])
def test_norms_over_the_columns_of_ranks_have_the_same_bits_in_any_batch(rows: int, backend: TorchBackend) -> None:
    from octavo.backends.torch import triton_calls

    found = []
    for count in (rows, 8):
        subject = replace(backend, deterministic=True).compile(*spanning_graph(), LIMITS)
        subject.calls = Mock(wraps=triton_calls)
        subject.allocate_cache(8, 8)
        found.append(subject.submit(step([(Request(TOKENS, [0]), count)], block_size=8)).wait().logits)
        assert subject.calls.linear.called  # a sum in one order
    np.testing.assert_array_equal(found[1][:rows], found[0])
