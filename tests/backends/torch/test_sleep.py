"""Executors that sleep: nothing stays on the device, nothing is lost, and every number is the same afterwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.backends import PackCacheOptions, SleepingExecutor
from octavo.backends.placement import spread
from octavo.backends.torch.compile import TorchBackend
from octavo.errors import UsageError
from octavo.graph.segments import layer_borders
from tests.models.test_steps import LIMITS, in_chunks
from tests.support.text_models import save_decoder
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

BACKEND = TorchBackend(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("streams", [None, "memory", "disk"])
@pytest.mark.parametrize("name", ["llama", "lfm2", "qwen2moe", "deepseek3"])
def test_the_logits_after_a_sleep(
    name: str, streams: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """streams: where the weights of streamed layers are."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    graph, weights = tiny_graph(name)
    sizes = BACKEND.sizes(graph, weights, LIMITS)
    if streams:
        count = len(layer_borders(graph))
        sizes = BACKEND.streamed(sizes, spread(count, count))
    pack_cache = PackCacheOptions("model", 1 << 30, 0) if streams == "disk" else None
    executor = BACKEND.compile(sizes, weights, LIMITS, pack_cache=pack_cache)
    assert isinstance(executor, SleepingExecutor)
    executor.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
    expected = in_chunks(executor, [17, 12, 1])
    if executor._weights.streamed is not None:
        executor._weights.streamed.ring.settle()
    held = executor._weights.tensors
    old = {tensor.untyped_storage().data_ptr() for tensor in held}
    copies = [tensor.clone() for tensor in held]
    executor.sleep()
    executor.sleep()  # does nothing
    asleep = executor._weights.tensors
    assert not old & {tensor.untyped_storage().data_ptr() for tensor in asleep}  # none was forgotten
    assert executor._cache.num_blocks == 0
    executor.wake_up()
    executor.wake_up()
    awake = executor._weights.tensors
    between = {tensor.untyped_storage().data_ptr() for tensor in asleep}
    assert not between & {tensor.untyped_storage().data_ptr() for tensor in awake}
    for before, after in zip(copies, awake, strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before.numpy(), after.numpy())
    np.testing.assert_array_equal(in_chunks(executor, [17, 12, 1]), expected)
    executor.close()


def test_a_cached_prefix_is_forgotten_and_a_request_wakes_the_engine(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    prompt = "the quick brown fox jumps over the lazy dog and then it sleeps"
    with LLM(str(save_decoder(tmp_path)), backend="torch:cpu", max_model_len=160, max_num_seqs=2) as llm:
        first = llm.generate(prompt, greedy)[0]
        assert llm.generate(prompt, greedy)[0].num_cached_tokens
        llm._session.sleep().result()
        again = llm.generate(prompt, greedy)[0]
        assert not again.num_cached_tokens
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.outputs[0].logprobs == first.outputs[0].logprobs


def test_an_engine_without_a_device_cannot_sleep(tmp_path: Path) -> None:
    with LLM(str(save_decoder(tmp_path)), backend="cpu", max_model_len=160, max_num_seqs=2) as llm:
        with pytest.raises(UsageError, match="weights are already in main memory"):
            llm._session.sleep().result()
        llm._session.wake_up().result()
