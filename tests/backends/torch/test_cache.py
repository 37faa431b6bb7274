"""The int8 and fp8 caches on torch tensors: their numbers, their bytes, and the layers that keep float16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.torch.cache import CacheNumbers, PagedCache
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.executor import TorchExecutor
from octavo.batch import Batch
from octavo.config import KVDtype
from octavo.errors import UsageError
from octavo.graph.builder import Graph
from octavo.graph.passes import optimize
from octavo.quantization.packed import DenseWeight, Weight
from tests.support.batches import Request, step
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

LIMITS = ExecutorLimits(32, 4, 32, 64)
PROMPT = np.random.default_rng(5).integers(0, 96, 24).tolist()


def copying(batch: Batch, *pairs: tuple[int, int]) -> Batch:
    batch.block_copies = np.array(pairs, np.int32)
    return batch


def test_numbers_come_back_within_half_a_step_and_move_with_their_block() -> None:
    graph = optimize(tiny_graph("llama")[0], ())
    types = {kv.layer: torch.int8 for kv in graph.kv_caches}
    cache = PagedCache(graph, (4, 8, 0), torch.device("cpu"), types)
    kv = graph.kv_caches[-1]
    torch.manual_seed(0)
    keys = torch.randn(11, kv.num_kv_heads, kv.key_dim) * torch.logspace(-3, 3, 11)[:, None, None]
    values = torch.randn(11, kv.num_kv_heads, kv.value_dim)
    keys[3] = 0
    cache.write(kv.layer, torch.arange(8, 19), keys, values)
    cache.copy(copying(step([(Request([5], [0]), 1)], block_size=8), (1, 0), (2, 3)))
    for table in ([1, 2], [0, 3]):
        found = cache.read(kv.layer, torch.tensor([table]))
        for numbers, back in zip((keys, values), found, strict=True):
            half = numbers.abs().amax(dim=-1, keepdim=True) / 254
            assert ((back[0, :11] - numbers).abs() <= half * 1.001).all()


def test_other_layers_of_a_block_stay_as_they_are() -> None:
    graph = optimize(tiny_graph("gemma3")[0], ())
    layers = [kv.layer for kv in graph.kv_caches]
    types = {layer: torch.int8 if layer % 2 else torch.float16 for layer in layers}
    cache = PagedCache(graph, (4, 8, 0), torch.device("cpu"), types)
    kv = graph.kv_caches[0]
    numbers = [torch.full((8, kv.num_kv_heads, dim), 1.0) for dim in (kv.key_dim, kv.value_dim)]
    group = [other for other in layers if cache.layers[other].group == cache.layers[layers[0]].group]
    for i, layer in enumerate(group):
        cache.write(layer, torch.arange(8), *(x * (i + 1) for x in numbers))
    for i, layer in enumerate(group):
        for back in cache.read(layer, torch.tensor([[0]])):
            torch.testing.assert_close(back.float(), torch.full_like(back, i + 1.0).float())


def test_numbers_of_fp8_come_back_within_a_sixteenth_and_never_as_nan() -> None:
    graph = optimize(tiny_graph("llama")[0], ())
    types = {kv.layer: torch.float8_e4m3fn for kv in graph.kv_caches}
    kv = graph.kv_caches[-1]
    cache = PagedCache(graph, (4, 8, 0), torch.device("cpu"), types, factors={kv.layer: (2.0**-6, 8.0)})
    torch.manual_seed(0)
    keys = torch.randn(11, kv.num_kv_heads, kv.key_dim) / 16
    values = torch.randn(11, kv.num_kv_heads, kv.value_dim) * 30
    keys[2], values[3] = 1e9, -1e9
    cache.write(kv.layer, torch.arange(8, 19), keys, values)
    cache.copy(copying(step([(Request([5], [0]), 1)], block_size=8), (1, 0), (2, 3)))
    found = [x[0, :11] for x in cache.read(kv.layer, torch.tensor([[0, 3]]))]
    for numbers, back, factor in zip((keys, values), found, (2.0**-6, 8.0), strict=True):
        wanted = numbers.clamp(-448 * factor, 448 * factor)
        assert ((back - wanted).abs() <= wanted.abs() / 16 + factor * 2**-10).all()


def test_factors_put_keys_and_values_where_e4m3_has_its_bits() -> None:
    """Values a thousand times smaller than others would be lost without."""
    graph, weights = tiny_graph("llama")
    for name in [n for n in weights if n.endswith("v_proj.weight")]:
        weights[name] = DenseWeight(weights[name].dequantize() / np.float32(1000))
    for name in [n for n in weights if n.endswith("o_proj.weight")]:
        weights[name] = DenseWeight(weights[name].dequantize() * np.float32(1000))
    errors = []
    for has_factors in (True, False):
        expected, found = (compiled(graph, weights, kind) for kind in ("float16", "fp8"))
        factors = dict(found._numbers.factors)
        assert {layer: v < 2.0**-8 < k for layer, (k, v) in factors.items()} == dict.fromkeys(factors, True)
        if not has_factors:
            found._numbers = CacheNumbers(found._numbers.types, {})
        judged, rounded = (logits_of(executor) for executor in (expected, found))
        errors.append(np.linalg.norm(judged - rounded) / np.linalg.norm(judged))
    assert errors[0] < 0.1 < errors[1]


def compiled(graph: Graph, weights: dict[str, Weight], kv_dtype: KVDtype) -> TorchExecutor:
    return TorchBackend(torch.device("cpu"), torch.float32).compile(graph, weights, LIMITS, kv_dtype=kv_dtype)


def logits_of(executor: TorchExecutor) -> np.ndarray:
    executor.allocate_cache(4 * NUM_CACHE_GROUPS, 8)
    batch = step([(Request(PROMPT, [0, 1, 2]), 24)], block_size=8, num_groups=NUM_CACHE_GROUPS)
    found = executor.submit(batch).wait().logits
    assert found is not None
    return found


def test_which_layers_take_fp8() -> None:
    """Not those whose keys have a bias, or are values, too."""
    formats = {}
    for name in ("llama", "gemma3", "qwen2", "deepseek3"):
        graph, weights = tiny_graph(name)
        executor = compiled(graph, weights, "fp8")
        formats[name] = executor.cache_sizes.format
    small, plain = "float8_e4m3fn", "float16"
    assert formats == {"llama": small, "gemma3": small, "qwen2": plain, "deepseek3": plain}


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_other_backends_refuse_fp8_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"kv_dtype fp8 needs a GPU; {name} supports float16 and int8"):
        get_backend(name).sizes(*tiny_graph("llama"), LIMITS, kv_dtype="fp8")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_logits_are_close_to_those_of_float16(name: str) -> None:
    graph, weights = tiny_graph(name)
    logits, sizes = [], []
    for kv_dtype in ("float16", "int8", "fp8"):
        executor = get_backend("torch:cpu").compile(graph, weights, LIMITS, kv_dtype=kv_dtype)
        executor.allocate_cache(4 * NUM_CACHE_GROUPS, 8)
        request = Request(PROMPT, [0, 1, 2])
        for count in (15, 8, 1):
            batch = step([(request, count)], block_size=8, num_groups=NUM_CACHE_GROUPS)
            found = executor.submit(batch).wait().logits
        logits.append(found)
        sizes.append(executor.cache_sizes)
    assert 0 < np.linalg.norm(logits[0] - logits[1]) < 0.05 * np.linalg.norm(logits[0])
    assert 0 < np.linalg.norm(logits[0] - logits[2]) < 0.1 * np.linalg.norm(logits[0])
    assert [each.format for each in sizes] == ["float16", "int8", "float8_e4m3fn"]
    assert max(each.token_bytes for each in sizes[1:]) < 0.8 * sizes[0].token_bytes


def test_layers_whose_keys_have_a_bias_keep_float16() -> None:
    graph, weights = tiny_graph("qwen2")
    executor = get_backend("torch:cpu").compile(graph, weights, LIMITS, kv_dtype="int8")
    assert executor.cache_sizes.format == "float16"
