"""The GGUF reader returns what was written, and the same as the `gguf` package."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from octavo.errors import ModelLoadError
from octavo.loader.gguf import open_gguf, part_names
from octavo.quantization.packed import DenseWeight, GGMLWeight
from tests.support.gguf_writer import TYPE_IDS, Tensor, gguf, key, write_split
from tests.support.tiny_gguf import KEYS, tiny_gguf, tiny_keys, tiny_tensors


def judged(value: object) -> object:
    """A value of the `gguf` package in comparable form: arrays as lists."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def judge_of(path: Path) -> GGUFReader:
    """The reference reader over bytes in memory: of a mapped file its 250,000 slices take three times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", lambda path, **_: np.fromfile(path, np.uint8))
        return GGUFReader(path)


def assert_same_as_the_judge(path: Path, every_nth_tensor: int = 1) -> None:
    """The same keys, values, tensors and bytes as the reference reader."""
    ours, theirs = open_gguf(path), judge_of(path)
    keys = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(keys)
    for name, field in keys.items():
        assert judged(ours.metadata[name]) == judged(field.contents()), name
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.type_name == tensor.tensor_type.name
        assert info.shape == tuple(tensor.shape.tolist()[::-1])
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
    for tensor in theirs.tensors[::every_nth_tensor]:
        weight = ours.weight(tensor.name)
        np.testing.assert_array_equal(weight.dequantize(), dequantize(tensor.data, tensor.tensor_type))


def test_smollm2_as_the_judge_reads_it(smollm2_path: Path) -> None:
    assert_same_as_the_judge(smollm2_path, every_nth_tensor=90)


@pytest.mark.slow
def test_qwen_as_the_judge_reads_it(qwen_0_5b_path: Path) -> None:
    assert_same_as_the_judge(qwen_0_5b_path, every_nth_tensor=100)


scalars = st.one_of(
    st.booleans(),
    st.integers(-(1 << 31), (1 << 63) - 1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=40).filter(lambda t: "\0" not in t),
)
arrays = st.one_of(
    st.lists(st.text(max_size=20), min_size=1, max_size=8),
    st.sampled_from(["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8"]).flatmap(
        lambda dtype: st_numpy.arrays(
            dtype, st.integers(1, 20), elements={"allow_nan": False} if "f" in dtype else None
        )
    ),
)
names = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=20)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.dictionaries(names, scalars | arrays, max_size=8), st.sampled_from([2, 3]))
def test_whatever_is_written_is_read(tmp_path: Path, metadata: dict, version: int) -> None:
    path = tmp_path / "model.gguf"
    for name in ("general.alignment", "split.count"):  # which the reader itself obeys
        metadata.pop(name, None)
    path.write_bytes(gguf([key(name, value) for name, value in metadata.items()], tiny_tensors(), version=version))
    file = open_gguf(path)
    assert {name: judged(value) for name, value in file.metadata.items()} == {
        name: judged(value) for name, value in metadata.items()
    }
    for name, value in metadata.items():
        if isinstance(value, np.ndarray):
            assert file.metadata[name].dtype == value.dtype
        else:
            assert type(file.metadata[name]) is type(value)
    for tensor in tiny_tensors():
        np.testing.assert_array_equal(
            np.asarray(file.weight(str(tensor.name)).data).view(np.uint8).ravel(),
            np.frombuffer(tensor.content(), np.uint8),
        )


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_end_well(tmp_path: Path, content: bytes, kept: int) -> None:
    """Random bytes, with or without a valid beginning, are refused with a ModelLoadError and nothing else."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf()[:kept] + content)
    try:
        open_gguf(path).close()
    except ModelLoadError as error:
        refusal = str(error)
    else:
        refusal = str(path)
    assert refusal.startswith(str(path))


def test_files_of_the_other_writer(tmp_path: Path) -> None:
    """A file by the `gguf` package, with another alignment, reads the same in both readers."""
    path = tmp_path / "theirs.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_uint8("a.u8", 200)
    writer.add_int16("a.i16", -300)
    writer.add_float64("a.f64", 1 / 3)
    writer.add_uint64("a.u64", (1 << 64) - 1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "größer 中文 🐙")
    writer.add_array("a.texts", ["", "x", "żółć"])
    writer.add_array("a.bools", [True, False, True])
    writer.add_key_value("a.bytes", [1, 2, 3], GGUFValueType.ARRAY, GGUFValueType.UINT8)
    rng = np.random.default_rng(1)
    for i, shape in enumerate([(3,), (5, 7), (2, 3, 4), (2, 2, 2, 2)]):
        writer.add_tensor(f"t{i}", rng.normal(size=shape).astype(np.float16 if i % 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_the_judge(path)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_weights_lie_over_the_file(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensor = Tensor("t.weight", type_name, (2, 256))
    content = np.random.default_rng(0).integers(0, 255, tensor.nbytes(), np.uint8).tobytes()
    path.write_bytes(gguf([], [Tensor("t.weight", type_name, (2, 256), content)]))
    weight = open_gguf(path).weight("t.weight")
    assert weight.type_name == type_name
    assert weight.shape == (2, 256)
    assert isinstance(weight, DenseWeight if type_name in ("F32", "F16", "BF16") else GGMLWeight)
    assert not weight.data.flags.owndata
    assert not weight.data.flags.writeable
    assert weight.data.tobytes() == content


def test_every_type_has_a_size(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([], [Tensor(name, name, (3, 256)) for name in TYPE_IDS]))
    assert {info.type_name for info in open_gguf(path).tensors.values()} == set(TYPE_IDS)


def test_dimensions_are_turned_around(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([], [Tensor("t", "F32", (2, 3), np.arange(6, dtype=np.float32).tobytes())]))
    np.testing.assert_array_equal(open_gguf(path).weight("t").dequantize(), [[0, 1, 2], [3, 4, 5]])


def test_split_model_from_any_part(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    parts = write_split(tmp_path, "m", tiny_keys(), [tensors[:4], tensors[4:8], tensors[8:]])
    for part in parts:
        file = open_gguf(part)
        assert file.metadata["general.architecture"] == KEYS["general.architecture"]
        assert list(file.tensors) == [t.name for t in tensors]
        for tensor in tensors:
            assert np.asarray(file.weight(str(tensor.name)).data).tobytes() == tensor.content()
        assert [file.tensors[t].file for t in ("token_embd.weight", "blk.0.ffn_down.weight")] == [parts[0], parts[2]]
        file.close()


def test_split_model_without_metadata_tensors(tmp_path: Path) -> None:
    """The first part of a split model may hold no tensor at all."""
    parts = write_split(tmp_path, "m", tiny_keys(), [[], tiny_tensors()])
    assert len(open_gguf(parts[1]).tensors) == len(tiny_tensors())


def test_part_names() -> None:
    for directory in ("", "Q4_0/"):
        names = [f"{directory}a-b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        assert part_names(names[1], names.__contains__) == names
        with pytest.raises(ModelLoadError, match=r"1 of 3 parts are missing, first .*a-b-00003-of-00003.gguf"):
            part_names(names[0], names[:2].__contains__)
    assert part_names("a-00002-of-3.gguf", [].__contains__) == ["a-00002-of-3.gguf"]


def test_closing(tmp_path: Path) -> None:
    """Arrays outlive the file object; the file releases its descriptor and mapping."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())
    file = open_gguf(path)
    kept = file.weight("output_norm.weight")
    expected = kept.dequantize()
    file.close()
    file.close()
    np.testing.assert_array_equal(kept.dequantize(), expected)
    with pytest.raises(ModelLoadError, match="the model is closed"):
        file.weight("output_norm.weight")
    assert str(path) in Path("/proc/self/maps").read_text()
    del kept, file
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_released_pages_leave_memory(smollm2_path: Path) -> None:
    """A packed weight need not stay resident: the peak is the size of one file, not two."""
    program = f"""
from pathlib import Path
from octavo.loader.gguf import open_gguf
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
file = open_gguf(Path({str(smollm2_path)!r}))
weight = file.weight("token_embd.weight")
before = resident()
total = int(weight.data.max())
touched = resident()
file.release("token_embd.weight")
released = resident()
assert touched - before > 0.9 * weight.nbytes, (before, touched, weight.nbytes)
assert released - before < 0.1 * weight.nbytes, (before, released, weight.nbytes)
assert int(weight.data.max()) == total
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("other", ["", "x" * 255, "x" * 256, "xy\0y", "\0", "\0" * 9, "größer 中文", "ab\0" * 40])
def test_lists_of_strings_of_every_length(tmp_path: Path, other: str) -> None:
    """Runs of short strings are read at once: any other string may come before, between or after them."""
    short = [f"token {i} ä" for i in range(1000)]
    for strings in ([other], [other, *short], [*short, other], [*short, other, other, *short, "z"], [other] * 600):
        writer = GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_array("a.list", strings)
        writer.add_uint64("a.number", 7)  # the zeros after the list are not those of a string
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        metadata = open_gguf(tmp_path / "a.gguf").metadata
        assert metadata["a.list"] == strings
        assert metadata["a.number"] == 7


@pytest.mark.slow
def test_opening_the_large_model_is_fast(qwen_1_5b_path: Path) -> None:
    """Metadata and directory of 1.1 GB with 300,000 strings, the best of five, in under 0.2 s.

    Processor time, so that a busy machine does not count; the reader waits for nothing but the page cache.
    """
    seconds = []
    for _ in range(5):
        started = time.process_time()
        open_gguf(qwen_1_5b_path).close()
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.2
