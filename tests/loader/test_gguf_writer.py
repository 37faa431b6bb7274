"""The GGUF writer: judged by our reader and by the `gguf` package; an interrupted file never looks whole."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from octavo.errors import ModelLoadError, ModelWriteError
from octavo.loader.gguf import MAX_PARTS, open_gguf
from octavo.loader.gguf_writer import MetadataValue, OutputTensor, typed_metadata, write_gguf

METADATA: dict[str, MetadataValue] = {
    "general.architecture": "llama",
    "general.name": "Grüße",
    "a.u8": np.uint8(255),
    "a.i8": np.int8(-128),
    "a.u16": np.uint16(65535),
    "a.i16": np.int16(-32768),
    "a.u32": 4294967295,
    "a.i32": -5,
    "a.u64": 1 << 63,
    "a.i64": -(1 << 40),
    "a.f32": 0.1,
    "a.f64": np.float64(0.1),
    "a.bool": True,
    "a.list": ["", "x", "\u2581y"],
    "a.empty": [],
    "a.floats": np.array([1.5, -2.5], np.float32),
    "a.ints": np.array([1, -2, 3], np.int32),
    "a.bools": np.array([True, False]),
}


def some_tensors() -> list[OutputTensor]:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((3, 5)).astype(np.float32)
    blocks = rng.integers(0, 256, 2 * 34, np.uint8)
    return [
        OutputTensor("token_embd.weight", "F32", (3, 5), lambda: [plain.view(np.uint8)[:1], plain.view(np.uint8)[1:]]),
        OutputTensor("output_norm.weight", "F16", (7,), lambda: [np.arange(7, dtype=np.float16).tobytes()]),
        OutputTensor("blk.0.ffn_up.weight", "Q8_0", (2, 32), lambda: [blocks]),
        OutputTensor("blk.0.ffn_up_exps.weight", "BF16", (2, 3, 4), lambda: [bytes(range(48))]),
    ]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert write_gguf(path, METADATA, some_tensors()) == [path]
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    ours, theirs = open_gguf(path), GGUFReader(path)
    read = typed_metadata(ours.metadata, ours.number_types)
    for key, value in METADATA.items():
        np.testing.assert_array_equal(read[key], np.float32(value) if key == "a.f32" else value)
        judged = theirs.fields[key].contents()
        np.testing.assert_array_equal(judged, np.float32(value) if key == "a.f32" else value)
    types = {"a.u32": np.uint32, "a.i32": np.int32, "a.u64": np.uint64, "a.i64": np.int64, "a.f32": np.float32}
    for key, kind in types.items():
        assert type(read[key]) is kind
        assert theirs.fields[key].parts[-1].dtype == kind
    for tensor, judged_tensor in zip(some_tensors(), theirs.tensors, strict=True):
        data = b"".join(bytes(np.frombuffer(chunk, np.uint8)) for chunk in tensor.chunks())
        assert judged_tensor.name == tensor.name
        assert judged_tensor.data.tobytes() == data == ours.array(tensor.name).tobytes()
        assert ours.tensors[tensor.name].shape == tensor.shape == tuple(int(n) for n in judged_tensor.shape[::-1])
        assert judged_tensor.data_offset % 32 == 0


def test_written_again_it_is_the_same_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(first, {**METADATA, "general.alignment": 64}, some_tensors())
    file = open_gguf(first)
    copies = [
        OutputTensor(name, info.type_name, info.shape, lambda name=name: [file.array(name)])  # type: ignore[misc]
        for name, info in file.tensors.items()
    ]
    write_gguf(second, typed_metadata(file.metadata, file.number_types), copies)
    assert first.read_bytes() == second.read_bytes()
    assert all(tensor.data_offset % 64 == 0 for tensor in GGUFReader(second).tensors)


def test_parts_have_llama_cpps_names_and_keys(tmp_path: Path) -> None:
    paths = write_gguf(tmp_path / "m.gguf", METADATA, some_tensors(), max_part_bytes=80)
    assert [p.name for p in paths] == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    whole = open_gguf(paths[1])
    assert list(whole.tensors) == [tensor.name for tensor in some_tensors()]
    assert whole.metadata["general.name"] == "Grüße"
    for i, path in enumerate(paths):
        fields = GGUFReader(path).fields
        keys = [fields[f"split.{key}"] for key in ("no", "count", "tensors.count")]
        assert [field.contents() for field in keys] == [i, 3, 4]
        assert [field.parts[-1].dtype for field in keys] == [np.uint16, np.uint16, np.int32]
        assert ("a.list" in fields) == (i == 0)
        assert len(GGUFReader(path).tensors) == 1 or sum(int(t.n_bytes) for t in GGUFReader(path).tensors) <= 80


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (OutputTensor("a", "Q4_K", (2, 32), list), "a row of 32 values is not a whole number of Q4_K blocks of 256"),
        (OutputTensor("a", "F32", (2,), lambda: [b"1234"]), "has 4 bytes; its type needs 8"),
        (OutputTensor("x" * 64, "F32", (2,), list), "a name of 64 bytes"),
        (OutputTensor("a", "F32", (1 << 40, 64), list), "the result takes 281,474,976,710,688 bytes, but only"),
    ],
)
def test_a_wrong_tensor_is_refused_and_leaves_nothing(tmp_path: Path, tensor: OutputTensor, reason: str) -> None:
    with pytest.raises(ModelWriteError, match=reason):
        write_gguf(tmp_path / "m.gguf", {}, [tensor])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [object(), [1, 2], np.zeros((2, 2)), 1 << 64, np.float16(1)])
def test_a_value_that_the_format_lacks_is_refused_by_its_key(tmp_path: Path, value: MetadataValue) -> None:
    with pytest.raises(ModelWriteError, match=r"key 'some\.key' cannot be written"):
        write_gguf(tmp_path / "m.gguf", {"some.key": value}, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("alignment", [0, 4, 24, -32, "32"])
def test_an_alignment_that_readers_cannot_follow_is_refused(tmp_path: Path, alignment: MetadataValue) -> None:
    with pytest.raises(ModelWriteError, match=r"general\.alignment is .* a power of two of at least 8"):
        write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, some_tensors())
    assert not list(tmp_path.iterdir())


def test_a_name_is_written_once(tmp_path: Path) -> None:
    with pytest.raises(ModelWriteError, match=r"tensor 'output_norm\.weight' appears twice"):
        write_gguf(tmp_path / "m.gguf", {}, [*some_tensors(), some_tensors()[1]])
    assert not list(tmp_path.iterdir())


def test_every_part_has_the_alignment(tmp_path: Path) -> None:
    paths = write_gguf(tmp_path / "m.gguf", {"general.alignment": 64}, some_tensors(), max_part_bytes=64)
    assert len(paths) > 1
    for path in paths:
        reader = GGUFReader(path)
        assert (reader.alignment, reader.data_offset % 64) == (64, 0)
        assert all(tensor.data_offset % 64 == 0 for tensor in reader.tensors)


def test_as_many_parts_as_the_format_has_numbers_for(tmp_path: Path) -> None:
    tensors = [OutputTensor(f"t{i}", "F32", (1,), lambda: [bytes(4)]) for i in range(MAX_PARTS + 1)]
    with pytest.raises(ModelWriteError, match=f"parts of 4 bytes make {MAX_PARTS + 1} files; the limit is {MAX_PARTS}"):
        write_gguf(tmp_path / "m.gguf", {}, tensors, max_part_bytes=4)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_stays_whole_when_the_new_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, METADATA, some_tensors())
    before = path.read_bytes()
    with pytest.raises(ModelWriteError):
        write_gguf(path, {}, [OutputTensor("a", "F32", (2,), lambda: [b"1234"])])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


SLOW_WRITER = """
import signal, sys
from pathlib import Path
from octavo.loader.gguf_writer import OutputTensor, write_gguf
def chunks():
    yield bytes(1 << 20)
    print("half", flush=True)
    signal.pause()
write_gguf(Path(sys.argv[1]), {"general.architecture": "llama"}, [OutputTensor("a", "F32", (1 << 19,), chunks)])
"""


def test_a_killed_writer_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with subprocess.Popen([sys.executable, "-c", SLOW_WRITER, path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        with pytest.raises(ModelWriteError, match="another process is writing this file"):
            write_gguf(path, {}, some_tensors())
        writer.send_signal(signal.SIGKILL)
    partial = tmp_path / "m.gguf.partial"
    assert [p.name for p in tmp_path.iterdir()] == [partial.name]
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        open_gguf(partial)
    write_gguf(path, METADATA, some_tensors())  # writes over what was left
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert len(open_gguf(path).tensors) == 4


def test_a_disk_that_fills_up_ends_in_one_line(tmp_path: Path) -> None:
    """The limit of the size of files stands for the disk: the system refuses the write half-way."""
    script = SLOW_WRITER.replace("signal.pause()", "yield bytes(1 << 20)")
    limit = 3 << 19
    result = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "m.gguf"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert "ModelWriteError" in result.stderr
    assert "m.gguf.partial: File too large" in result.stderr
    assert not list(tmp_path.iterdir())
