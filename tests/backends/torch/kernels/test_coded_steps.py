"""Steps of checkpoints that have their inputs rounded: products of codes with codes, beside the CPU backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from octavo.backends import get_backend
from octavo.backends.torch.coded import CodedRows, coded_bytes, has_products_of, places_in
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.plain import ProductEnd
from octavo.backends.torch.products import linear
from octavo.backends.torch.streamed_weights import StreamPlan, load_streamed
from octavo.backends.torch.workspace import Workspace
from octavo.errors import OctavoError
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.models import build_graph
from tests.models.test_parity import LIMITS, TOKENS, assert_close, logits_of
from tests.support.batches import Request, step
from tests.support.canonical import random_grouped
from tests.support.quantized_checkpoints import CASES, tiny_model, write

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
E4M3 = {**INT8, "type": "float", "strategy": "group", "group_size": 128}
# Of the layouts of `CASES`: what their configuration says of inputs.
MORE: dict[str, dict[str, Any]] = {
    "w8a8": {"input_activations": INT8},
    "float-row": {"input_activations": {**INT8, "type": "float"}},
    "float-block": {"input_activations": E4M3},
    "fp8-block": {"activation_scheme": "dynamic"},
    "fp8-tensor": {"activation_scheme": "static"},
    "fbgemm": {},
}


def _opened(name: str, more: dict[str, Any], path: Path, *, is_static: bool = False) -> Checkpoint:
    config, packer = CASES[name]
    if "config_groups" in config:
        groups: Any = config["config_groups"]
        config = {**config, "config_groups": {"group_0": {**groups["group_0"], **more}}}
    else:
        config = {**config, **more}
    write(tiny_model(), path, config, packer)
    if is_static:  # their scale and zero lie beside each weight; finer ones are made of the rows
        stored = load_file(path / "model.safetensors")
        stems = [tensor.removesuffix("weight_scale") for tensor in stored if tensor.endswith("weight_scale")]
        stored |= {f"{stem}input_scale": torch.ones(1) for stem in stems}
        save_file(stored, path / "model.safetensors")
    return open_checkpoint(path)


def _logits(
    checkpoint: Checkpoint, backend: TorchBackend, *, has_kernels: bool
) -> tuple[NDArray[np.float32], list[tuple[str, Any]]]:
    """The logits, and the names of the kernels called with what each has given."""
    from octavo.backends.torch import triton_calls

    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    executor: Any = backend.compile(graph, checkpoint.weights, LIMITS)
    executor.allocate_cache(10, 16)
    executor.calls = Mock(wraps=triton_calls) if has_kernels else None
    output = executor.submit(step([(Request(TOKENS, [9, 2]), len(TOKENS))], block_size=16)).wait()
    called = [(name, args) for name, args, _ in executor.calls.mock_calls] if has_kernels else []
    executor.close()
    return output.logits, called


def _judge() -> str:
    """The CPU backend, or the specification, which rounds no inputs, on a machine that is lent for its GPU alone."""
    try:
        get_backend("cpu")
    except OctavoError:  # the native module is not built
        return "reference"
    return "cpu"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("w8a8", "fp8-block") else pytest.mark.slow) for n in MORE]
)
def test_steps_multiply_codes(name: str, tmp_path: Path, backend: TorchBackend) -> None:
    """As plain torch with rounded inputs, and near the CPU backend, whose inputs have scales of 32 columns each."""
    checkpoint = _opened(name, MORE[name], tmp_path, is_static=name == "fp8-tensor")
    found, called = _logits(checkpoint, backend, has_kernels=True)
    products = [args[0] for which, args in called if which == "linear" and isinstance(args[1], Planes)]
    assert sum(isinstance(x, CodedRows) for x in products) == 3 * 2  # QKV, gate and up, down of two layers
    assert [which for which, _ in called].count("normed_codes") == 2 * 2
    plain, _ = _logits(checkpoint, backend, has_kernels=False)
    # A number between two codes may take either; those of E4M3 are a sixteenth of it apart.
    of_plain, of_cpu = (1e-2, 6e-2) if name == "w8a8" else (4e-2, 0.15)
    assert_close(found, plain, of_plain)
    assert_close(found, logits_of(checkpoint, _judge()), of_cpu)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("name", ["w8a8", pytest.param("float-block", marks=pytest.mark.slow)])
def test_a_step_that_wants_no_rows(name: str, tmp_path: Path, backend: TorchBackend, *, has_kernels: bool) -> None:
    from octavo.backends.torch import triton_calls

    checkpoint = _opened(name, MORE[name], tmp_path)
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    found = []
    for calls, first in ((None, 0), (triton_calls if has_kernels else None, 3)):
        executor: Any = backend.compile(graph, checkpoint.weights, LIMITS)
        executor.allocate_cache(10, 16)
        executor.calls, request = calls, Request(TOKENS[:5], [9])
        if first:
            batch = replace(step([(request, first)], block_size=16), logits_indices=np.zeros(0, np.int32))
            assert len(executor.submit(batch).wait().logits) == 0
        batch = step([(request, 5 - first)], block_size=16)
        found.append(executor.submit(batch).wait().logits[-2:])
    assert_close(found[1], found[0], 1e-2 if name == "w8a8" else 4e-2)


def test_codes_lie_in_the_workspace(tmp_path: Path, backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of norms and of gates."""
    found: list[Workspace] = []
    begin = Workspace.begin
    monkeypatch.setattr(Workspace, "begin", lambda self, node: (found.append(self), begin(self, node))[1])
    _, called = _logits(_opened("w8a8", MORE["w8a8"], tmp_path), backend, has_kernels=True)
    made = [args[0] for which, args in called if which == "linear" and isinstance(args[0], CodedRows)]
    assert len(made) == 3 * 2
    memory = found[0].bytes.untyped_storage().data_ptr()
    assert all(x.untyped_storage().data_ptr() == memory for rows in made for x in (rows.codes, rows.scales))


@pytest.mark.parametrize("alignment", [1, 64])
def test_codes_that_a_product_makes_itself_have_planned_memory(alignment: int, device: torch.device) -> None:
    """As of the output of attention, which takes a launch of its own."""
    weight = replace(random_grouped((40, 70), 0, bits=8, group=None), inputs="int8")
    planes = planes_of(weight)
    assert planes is not None
    found: list[torch.Tensor] = []

    def find(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found.append(torch.zeros(shape, dtype=dtype, device=device))
        return found[-1]

    x = torch.randn(5, 70, device=device)
    expected = linear(x, planes.to(device), ProductEnd(), repeats=False)
    assert torch.equal(linear(x, planes.to(device), ProductEnd(), repeats=False, find=find), expected)
    scales, codes = found
    assert codes.any()
    assert scales.all()
    sizes = sum(-(-tensor.nbytes // alignment) * alignment for tensor in found)
    assert sizes <= coded_bytes(5, 70, alignment)


def test_codes_in_the_place_of_numbers() -> None:
    memory = torch.zeros(5, 70, dtype=torch.bfloat16)
    find = places_in(memory)
    scales, codes = find((5, 3), torch.float32), find((5, 70), torch.int8)
    assert scales is not None
    assert codes is not None
    assert scales.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr() == memory.data_ptr()
    assert codes.data_ptr() - memory.data_ptr() == 64  # on a multiple of 16
    assert find((5, 70), torch.int8) is None


@pytest.mark.parametrize("name", ["w8a8", "float-row", "fp8-block"])
def test_inputs_that_the_checkpoint_does_not_round_stay_as_they_are(
    name: str, tmp_path: Path, backend: TorchBackend
) -> None:
    checkpoint = _opened(name, {}, tmp_path)
    found, _ = _logits(checkpoint, backend, has_kernels=False)
    assert_close(found, logits_of(checkpoint), 1e-3)


def test_a_device_without_such_products_leaves_inputs_as_they_are(
    tmp_path: Path, backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = _opened("w8a8", MORE["w8a8"], tmp_path)
    rounded, _ = _logits(checkpoint, backend, has_kernels=False)
    monkeypatch.setattr("octavo.backends.torch.weights.has_products_of", lambda *_: False)
    found, _ = _logits(checkpoint, backend, has_kernels=False)
    assert_close(found, logits_of(checkpoint), 1e-3)
    assert np.abs(found - rounded).max() > 1e-4 * np.abs(found).max()


@pytest.mark.parametrize(("capability", "kinds"), [((8, 0), ["int8"]), ((8, 9), ["int8", "e4m3"]), ((7, 5), [])])
def test_which_gpus_have_which_products(
    capability: tuple[int, int], kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert [kind for kind in ("int8", "e4m3") if has_products_of(kind, torch.device("cuda"))] == kinds


def test_streamed_layers_are_asked_for_the_device_that_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights are loaded into main memory, which says nothing of the GPU's products."""
    asked: list[torch.device] = []

    def has(_: str, device: torch.device) -> bool:
        asked.append(device)
        return False

    monkeypatch.setattr("octavo.backends.torch.weights.has_products_of", has)
    checkpoint = _opened("w8a8", MORE["w8a8"], tmp_path)
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    computes_on = torch.device("cpu", 0)
    held = load_streamed(graph, checkpoint.weights, torch.float32, computes_on, StreamPlan((0, 1)))
    assert set(asked) == {computes_on}
    assert all(planes.inputs is None for planes in held.planes.values())
    held.clear()
