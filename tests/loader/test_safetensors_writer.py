"""Files that Octavo writes, read by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from octavo.errors import ModelWriteError
from octavo.loader.safetensors import INDEX_NAME, MAX_HEADER_BYTES, MAX_SHARDS, open_safetensors
from octavo.loader.safetensors_writer import SafeTensor, write_model, write_safetensors

ARRAYS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array(7, np.uint8),
    "c.scales": np.arange(6, dtype=np.float16).reshape(2, 3),
    "d.empty": np.zeros((0, 4), np.int32),
    "e.codes": np.arange(-4, 4, dtype=np.int8),
}
TYPES = {"float32": "F32", "uint8": "U8", "float16": "F16", "int32": "I32", "int8": "I8"}


def tensors() -> list[SafeTensor]:
    def chunks(array: NDArray[np.generic]) -> Iterator[bytes]:
        data = array.tobytes()
        yield from (data[:3], data[3:])

    return [SafeTensor(n, TYPES[a.dtype.name], a.shape, lambda a=a: chunks(a)) for n, a in ARRAYS.items()]  # type: ignore[misc]


def test_the_library_reads_a_file(tmp_path: Path) -> None:
    assert write_model(tmp_path, tensors()) == [tmp_path / "model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_have_an_index_and_at_most_the_size(tmp_path: Path) -> None:
    paths = write_model(tmp_path, tensors(), 50)
    assert [path.name for path in paths] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in ARRAYS.values())
    for name, shard in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / shard)[name], ARRAYS[name])
    assert index["weight_map"].keys() == ARRAYS.keys()
    assert open_safetensors(tmp_path / INDEX_NAME).tensors.keys() == ARRAYS.keys()


def test_a_tensor_of_the_wrong_size_leaves_no_file(tmp_path: Path) -> None:
    wrong = SafeTensor("x", "F32", (2,), lambda: [bytes(7)])
    with pytest.raises(ModelWriteError, match="'x' has 7 bytes; 8 are needed"):
        write_safetensors(tmp_path / "m.safetensors", [wrong])
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_appears_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelWriteError, match="appears twice"):
        write_safetensors(tmp_path / "m.safetensors", tensors()[:1] * 2)


def test_a_header_that_readers_refuse_is_not_written(tmp_path: Path) -> None:
    name = "a" * MAX_HEADER_BYTES
    with pytest.raises(ModelWriteError, match=r"1 tensors take a header of [\d,]+ bytes; the limit is"):
        write_safetensors(tmp_path / "m.safetensors", [SafeTensor(name, "U8", (1,), lambda: [bytes(1)])])
    assert not list(tmp_path.iterdir())


def test_as_many_shards_as_their_names_can_count(tmp_path: Path) -> None:
    many = [SafeTensor(f"t{i}", "U8", (1,), lambda: [bytes(1)]) for i in range(MAX_SHARDS + 1)]
    with pytest.raises(ModelWriteError, match=f"{MAX_SHARDS + 1} shards; the limit is {MAX_SHARDS}"):
        write_model(tmp_path, many, max_shard_bytes=1)
    assert not list(tmp_path.iterdir())
