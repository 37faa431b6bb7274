"""The backend as users meet it: its devices, its sizes, a real model, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.torch.compile import TorchBackend
from octavo.batch import Batch
from octavo.config import EngineConfig
from octavo.engine.loading.devices import backend_of
from octavo.errors import InsufficientMemoryError, UsageError
from tests.support.batches import Request, step
from tests.support.sampling_batches import sampling_batch
from tests.support.tiny_models import tiny_graph

LIMITS = ExecutorLimits(32, 4, 32, 64, max_logits_rows=3)


def prompt() -> Batch:
    return step([(Request(list(range(5, 27)), [0, 1, 2]), 22)], block_size=8)


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="torch has no device 'tpu'; give cpu, cuda or cuda:1"):
        get_backend("torch:tpu")
    with pytest.raises(UsageError, match="runs on cpu and cuda, not on meta"):
        get_backend("torch:meta")
    with pytest.raises(UsageError, match=r"cuda:99 does not exist: torch .* finds \d+ GPUs; choose another one"):
        get_backend("torch:cuda:99")
    with pytest.raises(UsageError, match="there is no backend 'reference:cpu'"):
        get_backend("reference:cpu")


def test_determinism_without_kernels_is_refused() -> None:
    """The kernels run on a GPU; numpy and torch's own products choose their sums by the number of rows."""
    with pytest.raises(UsageError, match=r"deterministic needs Triton's kernels, .* use the backend cpu, where"):
        backend_of(EngineConfig(backend="torch:cpu", deterministic=True))
    with pytest.raises(UsageError, match="deterministic works on a GPU and with the backend cpu, not with reference"):
        backend_of(EngineConfig(backend="reference", deterministic=True))
    assert backend_of(EngineConfig(backend="cpu", deterministic=True)) is get_backend("cpu")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_determinism_on_a_gpu(smollm2_path: Path) -> None:
    """A greedy and a drawn answer, alone and among thirty others."""
    prompts = [f"The number {i} is" for i in range(31)]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=48) for i in range(31)]
    with LLM(str(smollm2_path), device="cuda", deterministic=True, max_model_len=256) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        for i in (0, 7, 30):
            (alone,) = llm.generate([prompts[i]], params[i])
            assert alone.outputs[0].token_ids == together[i]


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("octavo.backends.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"needs torch: pip install 'octavo\[gpu\]'"):
        get_backend("torch")


def test_the_chosen_providers_are_logged_once_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    graph, weights = tiny_graph("llama")
    backend = get_backend("torch:cpu")
    lines = ("products of Q4_K: humming", "attention of prompts: varlen (sdpa: no)")
    caplog.set_level("INFO", logger="octavo.backends.torch")
    executor = backend.compile(replace(backend.sizes(graph, weights, LIMITS), providers=lines), weights, LIMITS)
    executor.allocate_cache(4, 8)
    for _ in range(2):
        executor.submit(prompt()).wait()
    logged = [record.getMessage() for record in caplog.records]
    assert [logged.count(line) for line in lines] == [1, 1]


def test_logits_beyond_the_rows_that_are_held_are_made_in_turns() -> None:
    graph, weights = tiny_graph("llama")
    outputs = []
    for limits in (LIMITS, replace(LIMITS, max_logits_rows=None)):
        executor = get_backend("torch:cpu").compile(graph, weights, limits)
        executor.allocate_cache(4, 8)
        options = sampling_batch(22, temperature=1, num_logprobs=np.arange(22) % 4 - 1)
        outputs.append(executor.submit(replace(prompt(), sampling=options)).wait())
    for name in ("token_ids", "ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(outputs[0], name), getattr(outputs[1], name))
    np.testing.assert_allclose(outputs[0].logits, outputs[1].logits, rtol=0, atol=1e-5)
    assert outputs[0].top_ids.shape == (22, 2)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("token_ids", 96, "token_ids are 5 to 96; they must be in 0 to 95"),
        ("positions", -1, "positions are -1 to 21"),
        ("slot_mapping", 32, "slot_mapping are 0 to 32; they must be in 0 to 31"),
        ("logits_indices", 22, "logits_indices and hidden_indices are 0 to 22"),
        ("block_tables", 4, "block_tables are 0 to 4; they must be in 0 to 3"),
        ("query_start_loc", 5, "must rise from 0 to the number of rows, 22"),
        ("seq_lens", 65, "seq_lens are 65 to 65"),
        ("seq_lens", 3, "seq_lens .* are smaller than the numbers of tokens in the step"),
    ],
)
def test_a_wrong_number_of_a_batch_is_refused_before_anything_runs(name: str, value: int, reason: str) -> None:
    graph, weights = tiny_graph("llama")
    executor = get_backend("torch:cpu").compile(graph, weights, LIMITS)
    executor.allocate_cache(4, 8)
    batch = prompt()
    array = getattr(batch, name).copy()
    array.reshape(-1)[-1 if name != "positions" else 0] = value
    with pytest.raises(ValueError, match=reason):
        executor.submit(replace(batch, **{name: array}))


def test_entries_of_block_tables_that_are_not_read_may_be_anything() -> None:
    graph, weights = tiny_graph("llama")
    executor = get_backend("torch:cpu").compile(graph, weights, LIMITS)
    executor.allocate_cache(4, 8)
    batch = prompt()
    wide = np.pad(batch.block_tables, ((0, 0), (0, 0), (0, 2)), constant_values=10**6)
    expected = executor.submit(batch).wait().logits
    np.testing.assert_array_equal(executor.submit(replace(batch, block_tables=wide)).wait().logits, expected)


@pytest.mark.parametrize(("part", "what"), [("compile.DeviceWeights", "weights"), ("executor.PagedCache", "KV cache")])
def test_a_full_gpu_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch, part: str, what: str) -> None:
    def full(*_arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    graph, weights = tiny_graph("llama")
    backend = get_backend("torch:cpu")
    executor = backend.compile(graph, weights, LIMITS)
    monkeypatch.setattr(f"octavo.backends.torch.{part}", full)
    calls = {
        "weights": partial(backend.compile, graph, weights, LIMITS),
        "KV cache": partial(executor.allocate_cache, 8, 16),
    }
    with pytest.raises(InsufficientMemoryError, match=rf"no room for the {what}, \d.* GiB.*lower gpu_memory"):
        calls[what]()


def test_in_bfloat16_a_step_is_close_to_float32() -> None:
    """As on a GPU: matrices and values in bfloat16, vectors and logits in float32."""
    graph, weights = tiny_graph("llama")
    logits = []
    for dtype in (torch.bfloat16, torch.float32):
        executor = TorchBackend(torch.device("cpu"), dtype).compile(graph, weights, LIMITS)
        executor.allocate_cache(4, 8)
        logits.append(executor.submit(prompt()).wait().logits)
    assert logits[0].dtype == np.float32
    assert 0 < np.linalg.norm(logits[0] - logits[1]) < 0.05 * np.linalg.norm(logits[1])


def test_work_is_done_on_the_gpu_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches, streams and events are of the current GPU, which is not the tensors' one by itself."""
    entered: list[torch.device] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", enter)
    executor = get_backend("torch:cpu").compile(*tiny_graph("llama"), LIMITS)
    executor.allocate_cache(4, 8)
    seen: list[torch.device] = []
    monkeypatch.setattr(executor, "device", torch.device("cuda:1"))
    monkeypatch.setattr(executor, "_run", lambda _: seen.extend(entered))
    executor.submit(prompt())
    assert seen == [torch.device("cuda:1")]
    assert not entered


def test_memory_that_torch_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server could not load a second model in place of the first."""
    for name, found in (("mem_get_info", (1000, 9000)), ("memory_reserved", 5000), ("memory_allocated", 1500)):
        monkeypatch.setattr(torch.cuda, name, lambda _, found=found: found)
    assert TorchBackend(torch.device("cuda:0"), torch.bfloat16).memory().available_bytes == 1000 + 3500


@pytest.mark.slow
def test_a_real_model_answers_as_the_specification_and_the_cpu_do(smollm2_path: Path) -> None:
    """The CPU rounds the rows of its products to int8: at a tie its token may be the second or third one."""
    prompts, found = ["The capital of France is", "1, 2, 3,", "Once upon a time"], {}
    for backend, count in (("torch:cpu", 24), ("cpu", 24), ("reference", 8)):
        with LLM(str(smollm2_path), backend=backend, max_model_len=64, kv_cache_memory="64MiB") as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, logprobs=5))
            found[backend] = [output.outputs[0] for output in outputs]
    same = 0
    for own, cpu, judge in zip(found["torch:cpu"], found["cpu"], found["reference"], strict=True):
        assert own.token_ids[:8] == judge.token_ids
        pairs = zip(own.token_ids, cpu.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        same += len(own.token_ids) if at is None else at
        if at is not None:
            candidates = own.logprobs[at]
            assert candidates[own.token_ids[at]].logprob - candidates[cpu.token_ids[at]].logprob < 0.3
    assert same >= 24
