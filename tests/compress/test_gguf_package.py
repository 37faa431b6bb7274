"""Every type and mixture that is written, read by the `gguf` package: its keys, tensors, types and numbers are ours."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.backends.quantizers import quantizer_types
from octavo.compress.mixtures import MIXTURES
from octavo.loader.gguf import open_gguf
from octavo.quantization.packed import DENSE_TYPES
from tests.compress.models import write_model
from tests.compress.test_quantize import run

TERNARY = ("TQ1_0", "TQ2_0")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A model with random and one with ternary weights."""
    folder = tmp_path_factory.mktemp("sources")
    return {ternary: write_model(folder / f"{ternary}.gguf", ternary=ternary, tied=False) for ternary in (False, True)}


def check(path: Path, source: Path) -> set[str]:
    """Compares what both readers find in a file, and its keys with the source's; the types of its tensors."""
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    found = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert found.keys() == ours.metadata.keys() == open_gguf(source).metadata.keys() | {"general.quantization_version"}
    for name, value in found.items():
        np.testing.assert_array_equal(value, ours.metadata[name], err_msg=name)
    assert [tensor.name for tensor in theirs.tensors] == [*ours.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert tensor.tensor_type.name == info.type_name
        assert tuple(map(int, reversed(tensor.shape))) == info.shape
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
        np.testing.assert_array_equal(numbers, ours.weight(tensor.name).dequantize(), err_msg=tensor.name)
    return {info.type_name for info in ours.tensors.values()}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name: str, sources: dict[bool, Path], tmp_path: Path) -> None:
    source = sources[MIXTURES[name].base in TERNARY]
    code, _, error = run(source, tmp_path / "m.gguf", "--type", name)
    assert code == 0, error
    types = check(tmp_path / "m.gguf", source)
    assert MIXTURES[name].base in types or name == "mxfp4_moe"  # which is for experts
    assert gguf.GGUFReader(tmp_path / "m.gguf").fields["general.file_type"].contents() == MIXTURES[name].file_type


@pytest.mark.parametrize("name", sorted(quantizer_types() | DENSE_TYPES.keys()))
def test_types(name: str, sources: dict[bool, Path], tmp_path: Path) -> None:
    source = sources[name in TERNARY]
    code, _, error = run(source, tmp_path / "m.gguf", "--type", "f16", "--tensor-type", f"blk={name}")
    assert code == 0, error
    assert name in check(tmp_path / "m.gguf", source)


def test_experts(tmp_path: Path) -> None:
    """Stacks of matrices have three dimensions."""
    source = write_model(tmp_path / "source.gguf", experts=4)
    for name in ("mxfp4_moe", "q4_k_m", "iq3_s"):
        code, _, error = run(source, tmp_path / f"{name}.gguf", "--type", name)
        assert code == 0, error
        assert MIXTURES[name].base in check(tmp_path / f"{name}.gguf", source)
