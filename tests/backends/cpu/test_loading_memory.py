"""Peak memory while weights are packed: the packed weights and one matrix more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from octavo.backends import PackCacheOptions
from octavo.backends.cpu import _native
from octavo.backends.cpu.weights import load_matrices
from octavo.graph.values import Parameter
from octavo.loader.gguf import open_gguf
from octavo.loader.safetensors import open_safetensors
from octavo.loader.tensor_files import Source, Weights
from tests.support.gguf_writer import Tensor, gguf, key
from tests.support.quantize import random_weight
from tests.support.safetensors_writer import safetensors

N, K = 1024, 2048
COUNTS = {"F32": 8, "Q8_0": 24, "NVFP4": 24}  # of matrices


def loaded(path: Path, type_name: str, *, pack_cache: bool) -> dict[str, int]:
    """Bytes of a process of its own that packs all matrices of a model: packed, and resident at most."""
    program = (
        f"from tests.backends.cpu.test_loading_memory import child\nchild({str(path)!r}, {type_name!r}, {pack_cache})"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, "OCTAVO_CACHE": str(path.parent)}
    result = subprocess.run([sys.executable, "-c", program], env=env, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, int] = json.loads(result.stdout)
    return found


def child(path: str, type_name: str, pack_cache: bool) -> None:
    """Packs the matrices of a file with one thread, and prints the figures."""
    file = (open_gguf if path.endswith(".gguf") else open_safetensors)(Path(path))
    sources = {
        name: Source(tensor.type_name, tensor.shape, tensor.nbytes, (name,), partial(file.weight, name), name)
        for name, tensor in file.tensors.items()
    }
    weights = Weights(sources, file)
    load_matrices(Weights({"0": sources["0"]}, file), [Parameter("0", (N, K))], 1, None, None)  # code and buffers
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    options = PackCacheOptions("model", 1 << 30) if pack_cache else None
    packed = load_matrices(weights, [Parameter(name, (N, K)) for name in weights], 1, None, options)
    assert all(weight.is_view == pack_cache for weight in packed.values())
    assert {weight.type_name for weight in packed.values()} == {type_name}
    figures = {"packed": sum(w.nbytes for w in packed.values()), "peak": status("VmHWM") - before}
    sys.stdout.write(json.dumps(figures))


def status(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def write_model(directory: Path, type_name: str) -> Path:
    if type_name == "F32":
        tensors = {str(i): np.full((N, K), i, np.float32) for i in range(COUNTS[type_name])}
        path = directory / "model.safetensors"
        path.write_bytes(safetensors(tensors))
        return path
    content = random_weight(type_name, (N, K), 0).data.tobytes()
    path = directory / "model.gguf"
    blocks = [Tensor(str(i), type_name, (N, K), content) for i in range(COUNTS[type_name])]
    path.write_bytes(gguf([key("general.architecture", "llama")], blocks))
    return path


@pytest.mark.parametrize("pack_cache", [False, True])
@pytest.mark.parametrize(("type_name", "packed_as"), [("Q8_0", "Q8_0"), ("NVFP4", "NVFP4"), ("F32", "F32")])
def test_the_peak(type_name: str, packed_as: str, pack_cache: bool, tmp_path: Path) -> None:
    """The first start packs, and with a pack cache the second one maps."""
    path = write_model(tmp_path, type_name)
    one = _native.packed_nbytes(packed_as, N, K)
    for _ in range(1 + pack_cache):
        found = loaded(path, packed_as, pack_cache=pack_cache)
        assert found["packed"] == COUNTS[type_name] * one
        assert found["peak"] <= 1.1 * found["packed"] + one
