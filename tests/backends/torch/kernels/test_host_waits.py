"""Nothing in a step with the kernels waits for the device: the guard is up around all but the interpreter itself."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends import ExecutorLimits
from octavo.backends.torch import compile as compile_module
from octavo.backends.torch import executor as executor_module
from octavo.backends.torch.compile import TorchBackend
from tests.support.batches import Request, step
from tests.support.host_waits import refuse_waits
from tests.support.sampling_batches import sampling_batch
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

HAS_GPU = torch.cuda.is_available()
LIMITS = ExecutorLimits(32, 3, 32, 48)
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (13, 3)]


class Guard:
    """Where a test is: `is_up` while nothing may wait, and the interpreter of kernels, which looks at tensors, may.

    is_strict: on a GPU, torch itself refuses what waits within its operations, too, such as copies of memory that is
    not pinned. So constants have to be on the device already.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_up, self.is_strict, self.launches = False, False, 0
        grid = sys.modules["triton.runtime.interpreter"].GridExecutor
        launch = grid.__call__

        def interpreted(*args: Any, **options: Any) -> Any:
            self.launches += 1
            try:
                return launch(*args, **options)
            finally:
                self.launches -= 1

        monkeypatch.setattr(grid, "__call__", interpreted)
        refuse_waits(monkeypatch, lambda: not self.is_up or self.launches > 0)

    @property
    def is_up(self) -> bool:
        return self._is_up

    @is_up.setter
    def is_up(self, is_up: bool) -> None:
        self._is_up = is_up
        if HAS_GPU:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the mode is new, says torch
                torch.cuda.set_sync_debug_mode("error" if is_up and self.is_strict else "default")


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    from octavo.backends.torch import triton_calls

    for module in (compile_module, executor_module):
        monkeypatch.setattr(module, "triton_calls", lambda _: triton_calls)
    found = Guard(monkeypatch)
    yield found
    found.is_up = False


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        ("llama", False),
        ("llama", True),
        *(
            pytest.param(name, deterministic, marks=pytest.mark.slow)
            for name in ("lfm2", "mixtral", "gemma3n", "deepseek3")
            for deterministic in (False, True)
        ),
    ],
)
def test_nothing_waits_for_the_device_before_the_results(
    name: str, deterministic: bool, guard: Guard, backend: TorchBackend
) -> None:
    """Also with `deterministic`, here over an fp8 cache. On a GPU, all steps run again behind the strict guard."""
    backend = replace(backend, deterministic=deterministic)
    executor = backend.compile(*tiny_graph(name), LIMITS, kv_dtype="fp8" if deterministic else "float16")
    executor.allocate_cache(8 * NUM_CACHE_GROUPS, 8, 4)
    for is_strict in (False, True) if HAS_GPU else (False,):
        guard.is_strict = is_strict
        requests = [Request([*prompt, 5, 6, 7], [3 * i, 3 * i + 1]) for i, prompt in enumerate(PROMPTS)]
        for counts in ((9, 1), (1, 1)):
            batch = step(list(zip(requests, counts, strict=True)), block_size=8, num_groups=NUM_CACHE_GROUPS)
            options = sampling_batch(len(batch.logits_indices), temperature=0.7, top_k=5, num_logprobs=1)
            guard.is_up = True
            pending = executor.submit(replace(batch, sampling=options))
            guard.is_up = False
            assert (pending.wait().token_ids >= 0).all()


class Captured:
    """Implements `Replay`: a step that runs once, as before a capture, and from then on behind the strict guard.

    Numbers of the host are those of the capture in a CUDA graph, and a copy of them would end it.
    """

    def __init__(self, run: Callable[[], torch.Tensor], guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run, self._guard, self._monkeypatch = run, guard, monkeypatch
        self.output = run()
        self()

    def __call__(self) -> None:
        def guarded(whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def refuse(*args: Any, **options: Any) -> torch.Tensor:
                assert self._guard.launches, "a captured step copies numbers of the host"
                return whole(*args, **options)

            return refuse

        with self._monkeypatch.context() as patch:
            for name in ("tensor", "from_numpy", "as_tensor"):
                patch.setattr(torch, name, guarded(getattr(torch, name)))
            before, self._guard.is_strict, self._guard.is_up = self._guard.is_up, True, True
            found = self._run()
            self._guard.is_up = before
        assert found.data_ptr() == self.output.data_ptr()


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mixtral", "qwen35"))])
def test_a_step_that_is_captured_with_kernels_stays_on_the_device(
    name: str, guard: Guard, backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Captured] = []

    def capture(run: Callable[[], torch.Tensor]) -> Captured:
        made.append(Captured(run, guard, monkeypatch))
        return made[-1]

    found = []
    for subject in (backend, replace(backend, capture=capture)):
        executor = subject.compile(*tiny_graph(name), LIMITS)
        executor.allocate_cache(8 * NUM_CACHE_GROUPS, 8, 4)
        requests = [Request([7 * i + 5, 6], [i]) for i in range(3)]
        batch = step([(request, 1) for request in requests], block_size=8, num_groups=NUM_CACHE_GROUPS)
        found.append(executor.submit(batch).wait().logits)
    assert len(made) == 3  # of 3, 2 and 1 sequences
    assert len({replay.output.data_ptr() for replay in made}) == 1
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.item(),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        bool,
        int,
        float,
        lambda x: [1, 2][x],
    ],
    ids=["item", "cpu", "tolist", "numpy", "nonzero", "bool", "int", "float", "index"],
)
def test_the_guard_refuses(wait: Callable[[torch.Tensor], Any], guard: Guard) -> None:
    x = torch.tensor(1)
    wait(x)
    guard.is_up = True
    with pytest.raises(AssertionError, match="waits for the device"):
        wait(x)
    guard.is_up = False


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU, for which torch itself watches")
def test_the_strict_guard_refuses_what_waits_within_an_operation(guard: Guard, device: torch.device) -> None:
    x = torch.ones(4, device=device)
    is_chosen = x > 0
    guard.is_strict, guard.is_up = True, True
    with pytest.raises(RuntimeError, match="synchronizing"):
        x[is_chosen]
    with pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(4).to(device)
    guard.is_up = False
