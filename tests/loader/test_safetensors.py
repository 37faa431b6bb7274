"""Safetensors files and indexes: valid ones read as the library reads them, hostile ones are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from octavo.errors import ModelLoadError
from octavo.loader.safetensors import open_safetensors
from tests.support.limits import bounded
from tests.support.safetensors_writer import safetensors, with_header

ONES = np.ones((2, 4), np.float32)


def header(**entry: object) -> bytes:
    """A file with one tensor of 32 bytes, with some fields of its entry replaced."""
    fields = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32], **entry}
    return with_header(json.dumps({"t": fields}).encode(), bytes(32))


def two(first: tuple[int, int], second: tuple[int, int], size: int) -> bytes:
    """A file with two byte tensors at these offsets."""
    entries = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in {"a": first, "b": second}.items()
    }
    return with_header(json.dumps(entries).encode(), bytes(size))


def million_tensors() -> bytes:
    entry = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return with_header(("{" + ",".join(entry % i for i in range(1_000_000)) + "}").encode())


def many_tensors() -> bytes:
    entry = '"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return with_header(("{" + ",".join(entry % i for i in range(40_000)) + "}").encode())


HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    # another format under this name
    "pickle": (b"\x80\x02}q\x00X" + bytes(100), "offset 0: the header has .*: not a safetensors file, or truncated"),
    "zip": (b"PK\x03\x04\x14\x00\x00\x00\x08\x00" + bytes(100), "offset 0: the header has .*: not a safetensors file"),
    "ELF": (b"\x7fELF\x02\x01\x01\x00" + bytes(100), "offset 0: the header has .*: not a safetensors file"),
    # the header's length
    "empty": (b"", "offset 0: the file is empty"),
    "one byte": (b"\0", "offset 0: 1 bytes, too short"),
    "seven bytes": (bytes(7), "offset 0: 7 bytes, too short"),
    "no header": (bytes(8), "offset 8: the header starts with b'' instead of '{'"),
    "length beyond the file": (with_header(b"{}", length=100), "offset 0: the header has 100 bytes, .* ends after 8"),
    "length 101 MB": (with_header(b"{}", length=101 << 20), "offset 0: the header has 105906176 bytes, but the limit"),
    "length 2^64-1": (with_header(b"{}", length=(1 << 64) - 1), "offset 0: the header has 18446744073709551615 bytes"),
    # the header's text
    "not UTF-8": (with_header(b'{"\xff": 1}'), "offset 10: not UTF-8"),
    "not JSON after ü": (with_header('{"ü": nothing}'.encode()), "offset 15: not valid JSON"),
    "not JSON": (with_header(b"{nothing}"), "offset 9: not valid JSON"),
    "leading space": (with_header(b" {}"), "offset 8: the header starts with b' ' instead of"),
    "array": (with_header(b"[]"), r"offset 8: the header starts with b'\[' instead of"),
    "trailing garbage": (with_header(b"{} x"), "offset 11: not valid JSON"),
    "nested 200,000 deep": (with_header(b'{"a":' * 200_000), "offset 8: JSON nested too deeply"),
    "NaN": (with_header(b'{"t": NaN}'), "NaN is not valid JSON"),
    # keys
    "duplicate tensor": (with_header(b'{"t": {}, "t": {}}'), "offset 8: key 't' appears twice"),
    "metadata not strings": (with_header(b'{"__metadata__": {"a": 1}}'), "offset 8: __metadata__ must map strings"),
    "metadata a list": (with_header(b'{"__metadata__": []}'), "offset 8: __metadata__ must map strings"),
    # offsets
    "reversed": (header(data_offsets=[32, 0]), r"takes 32 bytes, but its data_offsets \[32, 0\] span -32"),
    "beyond the file": (
        header(shape=[16], data_offsets=[0, 64]),
        "tensor 't' is at bytes .*, but the file has .*: truncated?",
    ),
    "not from 0": (
        header(shape=[4], data_offsets=[16, 32]),
        r"offset \d+: the bytes from here to \d+ belong to no tensor",
    ),
    "not to the end": (
        header(shape=[4], data_offsets=[0, 16]),
        "offset .*: the tensors end here, but the file ends at",
    ),
    "overlap": (two((0, 20), (10, 30), 30), "tensor 'b' overlaps tensor 'a'"),
    "the same place": (two((0, 20), (0, 20), 20), "tensor 'b' overlaps tensor 'a'"),
    "hole": (two((0, 10), (20, 30), 30), "the bytes from here to .* belong to no tensor"),
    "negative offset": (header(data_offsets=[-32, 0]), r"impossible data_offsets \[-32, 0\]"),
    "float offset": (header(data_offsets=[0, 32.0]), "impossible data_offsets"),
    "true as offset": (header(data_offsets=[False, 32]), "impossible data_offsets"),
    "three offsets": (header(data_offsets=[0, 16, 32]), "impossible data_offsets"),
    "offset 2^64": (header(data_offsets=[0, 1 << 64]), "impossible data_offsets"),
    # shapes
    "shape too large": (header(shape=[2, 5]), "takes 40 bytes, but its data_offsets"),
    "shape that wraps": (header(shape=[1 << 62, 1 << 62]), "takes 85070591730234615865843651857942052864 bytes, but"),
    "negative dimension": (header(shape=[-2, -4]), r"impossible shape \[-2, -4\]"),
    "float dimension": (header(shape=[2.0, 4]), r"impossible shape \[2.0, 4\]"),
    "33 dimensions": (header(shape=[1] * 33), "impossible shape .*; at most 8 dimensions"),
    "shape a number": (header(shape=8), "impossible shape 8"),
    "entry a list": (with_header(b'{"t": [1]}'), "tensor 't' must have exactly dtype, shape and data_offsets"),
    "field missing": (with_header(b'{"t": {"dtype": "F32", "shape": []}}'), "must have exactly dtype, shape and"),
    "field too many": (header(pickle="x"), "tensor 't' must have exactly dtype, shape and data_offsets"),
    # types
    "unknown type": (header(dtype="F31"), "tensor 't' has the unknown type 'F31'"),
    "type a list": (header(dtype=["F32"]), r"tensor 't' has the unknown type \['F32'\]"),
    "odd count of 4-bit numbers": (header(dtype="F4", shape=[63]), "of type F4 .* takes 32 bytes, but"),
    # many tensors
    "10^6 tensors": (million_tensors, r"offset 0: the header has \d+ bytes, but the limit is 8388608"),
    "40,000 tensors": (many_tensors, "offset 8: 40000 tensors, the limit is 32768"),
    "10^6 lists": (
        with_header(b'{"t": [' + b"[]," * 1_000_000 + b"1]}"),
        "offset 8: JSON of 2000002 items, the limit is 524288",
    ),
    "10^6 numbers": (
        with_header(b'{"t": [' + b"999," * 1_000_000 + b"1]}"),
        "offset 8: JSON of 1000002 items, the limit is 524288",
    ),
    # truncation
    "truncated": (safetensors({"t": ONES})[:-1], "tensor 't' is at bytes .*, but the file has .*: truncated?"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file(case: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content() if callable(content) else content)
    with bounded(), pytest.raises(ModelLoadError, match=reason) as raised:
        open_safetensors(path)
    assert str(raised.value).startswith(f"{path}: offset ")
    assert len(str(raised.value)) < len(str(path)) + 400


def test_cut_anywhere(tmp_path: Path) -> None:
    content = safetensors({"a": ONES, "b": np.zeros(7, np.float16)}, {"format": "pt"})
    path = tmp_path / "model.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match=rf"^{re.escape(str(path))}: offset \d+: "):
            open_safetensors(path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_any_json_ends_well(tmp_path: Path, value: object) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header(json.dumps({"t": value}).encode(), bytes(32)))
    with pytest.raises(ModelLoadError, match=re.escape(str(path))):
        open_safetensors(path)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {
        "f32": torch.randn(3, 5),
        "f16": torch.randn(2, 3, 4).to(torch.float16),
        "bf16": torch.randn(7, 2).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    model = open_safetensors(path)
    assert set(model.tensors) == set(tensors)
    for name, expected in load_file(path).items():
        weight = model.weight(name)
        assert weight.shape == tuple(expected.shape)
        assert weight.type_name == {"bf16": "BF16", "f16": "F16"}.get(name, "F32")
        np.testing.assert_array_equal(weight.dequantize(), expected.float().numpy())
        assert not weight.data.flags.owndata
    model.release("f32")
    model.close()
    model.close()
    with pytest.raises(ModelLoadError, match="the model is closed"):
        model.weight("f32")


def test_careless_alignment(tmp_path: Path) -> None:
    """Some writers place tensors at unaligned offsets: these are copied and read correctly."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"a": np.zeros(3, np.uint8), "b": ONES}))
    np.testing.assert_array_equal(open_safetensors(path).weight("b").dequantize(), ONES)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8])
def test_types_that_are_no_weights(dtype: type, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"t": np.ones(4, dtype)}))
    with pytest.raises(ModelLoadError, match="is not a type for weights; F32, F16, BF16 and"):
        open_safetensors(path).weight("t")
    with pytest.raises(ModelLoadError, match="there is no tensor 'u'"):
        open_safetensors(path).weight("u")


class TestIndex:
    def write(self, directory: Path, weight_map: object = None, **notes: object) -> Path:
        directory.mkdir(exist_ok=True)
        (directory / "x-1.safetensors").write_bytes(safetensors({"a": ONES, "b": 2 * ONES}))
        (directory / "x-2.safetensors").write_bytes(safetensors({"c": 3 * ONES}))
        if weight_map is None:
            weight_map = {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": notes, "weight_map": weight_map}))
        return path

    def test_shards(self, tmp_path: Path) -> None:
        model = open_safetensors(self.write(tmp_path, total_size=96))
        assert {name: model.weight(name).dequantize()[0, 0] for name in model.tensors} == {"a": 1, "b": 2, "c": 3}

    def test_wrong_total_size_is_only_reported(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Published models have wrong totals, and the shards themselves are the better source."""
        open_safetensors(self.write(tmp_path, total_size=1234))
        assert "total_size is 1234, but the shards hold 96 bytes" in caplog.text

    @pytest.mark.parametrize(
        ("weight_map", "reason"),
        [
            ({}, "weight_map is missing, empty or not an object"),
            (["a"], "weight_map is missing, empty or not an object"),
            ({"a": 7}, "shard 7 is not the name of"),
            ({"a": "../x-1.safetensors"}, "shard '../x-1.safetensors' is not the name of"),
            ({"a": "/etc/passwd"}, "shard '/etc/passwd' is not the name of"),
            ({"a": "x\0.safetensors"}, "is not the name of"),
            ({"a": "x-9.safetensors"}, "1 of 1 shards are missing: x-9.safetensors; download the whole checkpoint"),
            ({str(i): f"{i}.safetensors" for i in range(2000)}, "more than 1000 shards"),
            (
                {"a": "x-2.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"},
                "x-1.safetensors: tensor 'a' is here, but the index puts it in x-2.safetensors",
            ),
            (
                {"a": "x-1.safetensors", "c": "x-2.safetensors"},
                "x-1.safetensors: tensor 'b' is here, but the index puts it in no shard",
            ),
            (
                {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors", "d": "x-2.safetensors"},
                "x-2.safetensors: tensor 'd' is missing, but the index puts it here",
            ),
        ],
    )
    def test_hostile_index(self, weight_map: object, reason: str, tmp_path: Path) -> None:
        with bounded(), pytest.raises(ModelLoadError, match=reason):
            open_safetensors(self.write(tmp_path, weight_map))

    def test_index_of_a_million_tensors(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, {str(i): "x-1.safetensors" for i in range(500_000)})
        with bounded(), pytest.raises(ModelLoadError, match=r"JSON of 500\d\d\d items, the limit is 262144"):
            open_safetensors(path)

    def test_tensor_in_two_shards(self, tmp_path: Path) -> None:
        path = self.write(tmp_path)
        (tmp_path / "x-2.safetensors").write_bytes(safetensors({"c": ONES, "a": ONES}))
        with pytest.raises(ModelLoadError, match=r"x-2.safetensors: tensor 'a' is here, but the index puts it in x-1"):
            open_safetensors(path)

    def test_links_lead_only_into_the_hub_cache(self, tmp_path: Path) -> None:
        """A symbolic link may lead only into the blobs of the hub's cache."""
        repository = tmp_path / "models--org--name"
        snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        path = self.write(snapshot)
        shard = snapshot / "x-1.safetensors"
        shard.rename(blobs / "0123")
        shard.symlink_to("../../blobs/0123")
        assert set(open_safetensors(path).tensors) == {"a", "b", "c"}
        elsewhere = tmp_path / "elsewhere"
        self.write(elsewhere)
        shard.unlink()
        shard.symlink_to(elsewhere / "x-1.safetensors")
        with pytest.raises(ModelLoadError, match=r"a link to .*elsewhere.*, outside the model directory"):
            open_safetensors(path)


def test_a_digest_tells_models_apart(tmp_path: Path) -> None:
    """Also on another machine: neither paths nor times matter."""
    digests = []
    for name, last in (("a", 7.0), ("b", 7.0), ("c", 8.0)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.safetensors"
        save_file({"x": torch.tensor([1.0, last]), "y": torch.zeros(2, 2)}, path)
        file = open_safetensors(path)
        digests.append(file.digest())
        file.close()
    assert digests[0] == digests[1] != digests[2]
