"""Compare steps of whole models on the GPU between our kernels and plain torch on the same device.

The models are the GGUF files of the folder OCTAVO_MODELS, by default `~/.cache/octavo-models`; without any, the case
says so. Each has a prompt in two chunks and then single tokens, with a cache of each type. Tiny models with random
weights cover every architecture.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from gpu_cases import Case, Figure, Machine, WrongResultError

from octavo.backends import ExecutorLimits
from octavo.backends.torch.compile import TorchBackend
from octavo.config import KVDtype
from octavo.engine.loading.model_graph import model_graph
from octavo.errors import OctavoError
from octavo.loader.checkpoint import open_checkpoint
from tests.support.batches import Request, step

_LIMITS = ExecutorLimits(128, 2, 128, 160)
_CHUNKS = (96, 24, 1, 1)
_TOLERANCE = {"float16": 3e-2, "fp8": 8e-2, "int8": 5e-2}
_CACHES: tuple[KVDtype, ...] = ("float16", "fp8", "int8")


def real(machine: Machine) -> list[Figure]:
    """Return the largest relative difference in the logits of each model."""
    folder = Path(os.environ.get("OCTAVO_MODELS", Path.home() / ".cache" / "octavo-models"))
    files = sorted(folder.glob("*.gguf")) if machine.is_gpu else []
    found = [Figure("models", float(len(files)), "models")]
    for path in files:
        for kind in _CACHES:
            error = _difference(machine, path, kind)
            if error > _TOLERANCE[kind]:
                raise WrongResultError(f"{path.stem}, {kind}: {error:.2e}, at most {_TOLERANCE[kind]:.0e} is right")
            found.append(Figure(f"{path.stem}, {kind}, largest difference", error, "of the logits"))
    return found


def _difference(machine: Machine, path: Path, kind: KVDtype) -> float:
    results = []
    with closing(open_checkpoint(path)) as checkpoint:
        graph = model_graph(checkpoint, _LIMITS.max_model_len)
        backend = TorchBackend(machine.device, machine.dtype)
        executor = backend.compile(graph, checkpoint.weights, _LIMITS, kv_dtype=kind)
        kernels = executor.calls
        tokens = np.random.default_rng(5).integers(10, 5000, sum(_CHUNKS)).tolist()
        for calls in (kernels, None):
            executor.calls = calls
            executor.allocate_cache(16, 16)
            request, logits = Request(tokens, [*range(10)]), []
            for count in _CHUNKS:
                batch = step([(request, count)], block_size=16, num_groups=len(graph.cache_layout.groups))
                logits.append(executor.submit(batch).wait().logits[-1])
            results.append(np.stack(logits))
        executor.close()
        torch.cuda.empty_cache()
    ours, plain = results
    return float(np.linalg.norm(ours - plain) / np.linalg.norm(plain))


def tiny(machine: Machine) -> list[Figure]:
    """Check tiny models of every architecture with random weights; the error names all models with wrong steps."""
    if not machine.is_gpu:  # the interpreter takes minutes; tests run some of them
        return [Figure("architectures", 0.0, "models")]
    from tests.support.tiny_models import CONFIGS

    found = [(name, _wrong(machine, name)) for name in CONFIGS]
    failed = [f"{name}: {reason}" for name, reason in found if reason is not None]
    if failed:
        raise WrongResultError(f"{len(failed)} of {len(CONFIGS)}: {'; '.join(failed)}")
    return [Figure("architectures", float(len(CONFIGS)), "models")]


def _wrong(machine: Machine, name: str) -> str | None:
    """Return the beginning of a tiny model's error, or None if its steps are right."""
    from tests.backends.torch.kernels.test_steps_with_kernels import assert_same
    from tests.support.tiny_models import tiny_graph

    try:
        assert_same(TorchBackend(machine.device, torch.float32), *tiny_graph(name), 5e-3)
    except (AssertionError, OctavoError, RuntimeError) as error:
        return " ".join(str(error).split())[:80]
    return None


CASES = [Case("real models", "correctness", real, 60), Case("tiny models", "correctness", tiny, 90)]
