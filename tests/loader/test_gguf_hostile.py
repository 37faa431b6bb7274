"""Hostile GGUF headers: each is refused with a ModelLoadError that gives offset and reason.

Every case must also stay within 2 seconds and 64 MiB of memory.
"""

from __future__ import annotations

import os
import random
import re
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.loader.gguf import open_gguf
from tests.support.gguf_writer import ARRAY, BOOL, STRING, Tensor, gguf, key, raw_key, string, write_split
from tests.support.limits import bounded
from tests.support.tiny_gguf import tiny_gguf, tiny_keys, tiny_tensors

U64 = (1 << 64) - 1
ARCHITECTURE = key("general.architecture", "llama")
EMBEDDING = Tensor("token_embd.weight", "F32", (4, 8))


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return raw_key("a", ARRAY, struct.pack("<IQ", kind, count) + content)


def one(**changes: object) -> bytes:
    """A file with one tensor, with some of its fields replaced."""
    fields = {"name": "t.weight", "type_name": "F32", "shape": (4, 8), **changes}
    return gguf([ARCHITECTURE], [Tensor(**fields)])  # type: ignore[arg-type]


def nested(depth: int) -> bytes:
    content = struct.pack("<IQ", 4, 1) + struct.pack("<I", 7)
    for _ in range(depth - 1):
        content = struct.pack("<IQ", ARRAY, 1) + content
    return gguf([raw_key("a", ARRAY, content)])


HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    # the first bytes
    "empty": (b"", "offset 0: the file is empty"),
    "three bytes": (b"GGU", "offset 0: the magic number takes 4 bytes, but the file ends after 3"),
    "wrong magic": (gguf(magic=b"GGML"), r"offset 0: not a GGUF file: it starts with b'GGML'"),
    "swapped magic": (gguf(magic=b"FUGG"), "offset 0: not a GGUF file.*byte-swapped"),
    "zip": (b"PK\x03\x04" + bytes(60), "offset 0: not a GGUF file.*pickle checkpoints are not supported"),
    "old format": (b"tjgg" + bytes(60), "offset 0: not a GGUF file.*older than GGUF"),
    "big endian": (gguf(version=3 << 24), "offset 4: a big-endian GGUF file"),
    "version 0": (gguf(version=0), "offset 4: GGUF version 0"),
    "version 1": (gguf(version=1), "offset 4: GGUF version 1"),
    "version 4": (gguf(version=4), "offset 4: GGUF version 4"),
    "version 2^32-1": (gguf(version=U64 >> 32), "offset 4: GGUF version 4294967295"),
    # counts
    "2^64-1 tensors": (gguf(num_tensors=-1), "offset 8: 18446744073709551615 tensors, but the file has room for 0"),
    "2^32 tensors": (gguf(num_tensors=1 << 32), "offset 8: 4294967296 tensors, but the file has room for 0"),
    "one tensor too many": (gguf([ARCHITECTURE], [EMBEDDING], num_tensors=2), "offset .*: "),
    "2^64-1 keys": (gguf(num_keys=-1), "offset 16: 18446744073709551615 keys, but the file has room for 0"),
    "2^63 keys": (gguf(num_keys=1 << 63), "offset 16: 9223372036854775808 keys, but the file has room for 0"),
    "a million keys": (
        lambda: gguf([raw_key(f"{i:07}", 0, b"\0") for i in range(100_000)]),
        "offset 16: 100000 keys, but the limit is 65536",
    ),
    "70,000 tensors": (
        lambda: gguf(num_tensors=70_000) + bytes(70_000 * 33),
        "offset 8: 70000 tensors, but the limit is 65536",
    ),
    # keys
    "key length 2^64-1": (
        gguf([string("k", U64) + bytes(20)]),
        "offset 24: a key has a length of 18446744073709551615",
    ),
    "key of 65,536 bytes": (gguf([key("k" * 65_536, 1)]), "offset 24: a key has a length of 65536 bytes, the limit"),
    "key beyond the file": (gguf([string("k" * 20, 4000)]), "offset 32: a key takes 4000 bytes, but the file ends"),
    "empty key": (gguf([key("", 1)]), "offset 24: key '' is empty"),
    "key not UTF-8": (gguf([key(b"ab\xff", 1)]), "offset 34: a key is not UTF-8"),
    "key with NUL": (gguf([key("a\0b", 1)]), "offset 24: key .* contains a NUL byte"),
    "duplicate key": (gguf([key("k", 1), key("k", 1)]), "offset 41: key 'k' appears twice"),
    "key with two types": (gguf([key("k", 1), key("k", "x")]), "offset 41: key 'k' appears twice"),
    # values
    "type 13": (gguf([raw_key("k", 13, bytes(16))]), "offset 33: key 'k' has the unknown type 13"),
    "type -1": (gguf([raw_key("k", -1, bytes(16))]), "offset 33: key 'k' has the unknown type 4294967295"),
    "bool 2": (gguf([raw_key("k", BOOL, b"\x02")]), "offset 37: key 'k' holds a bool with the value 2"),
    "bool array with 7": (gguf([array(BOOL, 3, b"\0\x07\x01")]), "offset 50: key 'a' holds a bool with the value 7"),
    "arrays nested 64 deep": (nested(64), "offset 37: key 'a' is an array of arrays"),
    "array of unknown type": (gguf([array(99, 1, bytes(8))]), "offset 37: key 'a' has the unknown type 99"),
    "value beyond the file": (
        gguf([raw_key("k", STRING, string("x", 5000))]),
        "offset 45: the value of 'k' takes 5000",
    ),
    "value of 2^64-1 bytes": (
        gguf([raw_key("k", STRING, string("x", U64))]),
        "offset 37: the value of 'k' has a length",
    ),
    "value cut": (gguf([raw_key("k", 10, bytes(3))], num_keys=1) + b"", "offset 37: the value of 'k' takes 8 bytes"),
    "value not UTF-8": (gguf([key("k", "a")])[:-1] + b"\x80", "offset 45: the value of 'k' is not UTF-8"),
    "array that wraps": (gguf([array(10, 1 << 61)]), "offset 41: 2305843009213693952 items in 'a', but the file has"),
    "array beyond the file": (gguf([array(0, 1000, bytes(10))]), "offset 41: 1000 items in 'a', but the file has room"),
    "strings that wrap": (gguf([array(STRING, U64 // 8 + 1)]), "offset 41: 2305843009213693952 strings in 'a', but"),
    "string in a list too long": (
        gguf([array(STRING, 2, string("x") + string("y", 1 << 40))]),
        "offset 58: string 1 of 'a' has a length of 1099511627776 bytes, the limit is 65536",
    ),
    "string in a list beyond the file": (
        gguf([array(STRING, 2, string("x") + string("y", 99))]),
        "offset 66: string 1 of 'a' takes 99 bytes, but the file ends after 1",
    ),
    "list cut": (
        gguf([array(STRING, 2, string("x" * 60))]),
        "offset 117: the length of string 1 of 'a' takes 8 bytes, but the file ends after 0",
    ),
    "string in a list not UTF-8": (
        gguf([array(STRING, 1, string(b"a\xc3\x28"))]),
        "offset 58: string 0 of 'a' is not UTF-8",
    ),
    "token of 1 MB": (
        lambda: tiny_gguf({"tokenizer.ggml.tokens": ["x" * 1_000_000]}),
        "has a length of 1000000 bytes, the limit",
    ),
    "10^7 tokens": (
        lambda: gguf([array(STRING, 10_000_000, string("t") * 10_000_000)]),
        "offset 41: 10000000 strings in 'a', but the limit is 1048576",
    ),
    "lists of a million strings": (
        lambda: gguf([array(STRING, 600_000, bytes(8 * 600_000)), key("b", [""] * 600_000)]),
        "600000 strings in 'b', but the limit is 448576",
    ),
    "40 MB of strings": (
        lambda: gguf([array(STRING, 1000, string("x" * 40_000) * 1000)]),
        r"offset 335\d\d\d\d\d: string 8\d\d of 'a' goes beyond the first 33554432 bytes, the limit for a header",
    ),
    "40 MB of numbers": (
        lambda: gguf([key(f"k{i}", np.zeros(1 << 20, np.uint64)) for i in range(5)]),
        "the value of 'k3' goes beyond the first 33554432 bytes",
    ),
    "10^7 numbers": (lambda: gguf([array(0, 10_000_000, bytes(10_000_000))]), "10000000 items in 'a', but the limit"),
    # alignment
    **{
        f"alignment {value!r:.10}": (
            gguf([key("general.alignment", value)]),
            f"offset 24: general.alignment is {value!r}",
        )
        for value in (0, 1, 3, 4, 1 << 31, -32, "32", True)
    },
    "alignment after all": (
        gguf([key("general.alignment", 64)], [EMBEDDING, Tensor("b", "F32", (3, 8)), Tensor("c", "F32", (8,))]),
        "offset .*: tensor 'c' is at offset 224, which is not a multiple of 64",
    ),
    # dimensions
    "no dimensions": (one(num_dimensions=0), "offset 85: tensor 't.weight' has 0 dimensions"),
    "5 dimensions": (one(dimensions=(1, 1, 1, 1, 1)), "offset 85: tensor 't.weight' has 5 dimensions"),
    "2^32-1 dimensions": (one(num_dimensions=U64 >> 32), "offset 85: tensor 't.weight' has 4294967295 dimensions"),
    "dimension 0": (one(dimensions=(8, 0)), r"offset 89: tensor 't.weight' has the impossible shape \(0, 8\)"),
    "dimension -1": (one(dimensions=(8, -1)), "offset 89: tensor 't.weight' has the impossible shape"),
    "dimension 2^63": (one(dimensions=(8, 1 << 63)), "offset 89: tensor 't.weight' has the impossible shape"),
    "elements that wrap": (
        one(dimensions=(1 << 32, 1 << 32)),
        "tensor 't.weight' is at bytes 128 to 7378697629483820",
    ),
    "bytes that wrap": (one(dimensions=(1 << 31, 1 << 31)), "tensor 't.weight' is at bytes 128 to 1844674407370955"),
    "bytes near 2^64": (one(dimensions=((1 << 62) - 1,)), "tensor 't.weight' is at bytes 128 to 1844674407370955"),
    "rows of half a block": (
        one(type_name="Q4_0", shape=(4, 48)),
        "offset 105: tensor 't.weight' of type Q4_0 has rows of 48 values, which is not a multiple of 32",
    ),
    "rows of a part of a superblock": (one(type_name="Q4_K", shape=(4, 896)), "has rows of 896 values"),
    # types and names
    **{
        f"type id {type_id}": (
            one(type_id=type_id),
            f"offset 105: tensor 't.weight' has type {type_id % (1 << 32)}, which",
        )
        for type_id in (4, 5, 31, 36, 1000, -1)
    },
    "empty name": (one(name=""), "offset 69: tensor name '' is empty"),
    "name of 64 bytes": (one(name="x" * 64), "offset 69: a tensor name has a length of 64 bytes, the limit is 63"),
    "name of 2^40 bytes": (
        gguf([ARCHITECTURE], [Tensor("x", "F32", (8,))]).replace(string("x"), string("x", 1 << 40)),
        "offset 69: a tensor name has a length of 1099511627776",
    ),
    "name not UTF-8": (one(name=b"\xf0\x28"), "offset 77: a tensor name is not UTF-8"),
    "name with NUL": (one(name="a\0"), "offset 69: tensor name .* contains a NUL byte"),
    "two tensors of one name": (
        gguf([ARCHITECTURE], [EMBEDDING, EMBEDDING]),
        "tensor 'token_embd.weight' appears twice",
    ),
    # offsets of the data
    "misaligned": (one(offset=4), "offset 109: tensor 't.weight' is at offset 4, which is not a multiple of 32"),
    "offset beyond the file": (
        one(offset=1 << 40),
        "tensor 't.weight' is at bytes 1099511627904 to 1099511628032, but",
    ),
    "offset that wraps": (one(offset=-32), "tensor 't.weight' is at bytes 1844674407370955"),
    "overlapping": (
        gguf([ARCHITECTURE], [EMBEDDING, Tensor("b", "F32", (8,), offset=96)]),
        "offset .*: tensor 'b' overlaps tensor 'token_embd.weight'",
    ),
    "the same place": (
        gguf([ARCHITECTURE], [EMBEDDING, Tensor("b", "F32", (8,), offset=0)]),
        "offset .*: tensor '.*' overlaps tensor '.*'",
    ),
    "one byte short": (tiny_gguf()[:-1], "tensor 'blk.0.ffn_down.weight' is at bytes .*: truncated?"),
    "two halves of 2^64": (
        gguf([ARCHITECTURE], [EMBEDDING, *(Tensor(n, "I8", (8,), dimensions=((1 << 63) - 64,)) for n in "ab")]),
        "tensor 'a' is at bytes .*, but the file has",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(case: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content() if callable(content) else content)
    with bounded(), pytest.raises(ModelLoadError, match=reason) as raised:
        open_gguf(path)
    assert str(raised.value).startswith(f"{path}: offset ")
    assert len(str(raised.value)) < len(str(path)) + 400


def test_the_untouched_file_opens(tmp_path: Path) -> None:
    """The file that the other cases modify is valid."""
    path = tmp_path / "model.gguf"
    for version in (2, 3):
        path.write_bytes(gguf(tiny_keys(), tiny_tensors(), version=version))
        assert len(open_gguf(path).tensors) == len(tiny_tensors())
    path.write_bytes(one())
    assert open_gguf(path).tensors["t.weight"].shape == (4, 8)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.999])
def test_truncated(fraction: float, tmp_path: Path) -> None:
    content = tiny_gguf()
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: int(len(content) * fraction)])
    with bounded(), pytest.raises(ModelLoadError, match=r"offset \d+: "):
        open_gguf(path)


def test_cut_at_every_byte_of_the_header(tmp_path: Path) -> None:
    """A truncated file is reported as such: 700 cuts, through every kind of field."""
    content = tiny_gguf()
    path = tmp_path / "model.gguf"
    for length in range(1, 2000, 3):
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match=rf"^{re.escape(str(path))}: offset \d+: "):
            open_gguf(path)


def test_holes_are_only_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([], [EMBEDDING, Tensor("b", "F32", (8,), bytes(4128), offset=4224)]))
    file = open_gguf(path)
    assert file.tensors["b"].offset == file.tensors["token_embd.weight"].offset + 4224
    assert "belong to no tensor" in caplog.text


@pytest.mark.parametrize("case", ["directory", "fifo", "device", "dangling link", "looping link", "missing"])
def test_not_a_file(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    match case:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "dangling link":
            path.symlink_to(tmp_path / "nowhere")
        case "looping link":
            path.symlink_to(path)
    with bounded(), pytest.raises(ModelLoadError, match=re.escape(str(path)) + ": .+"):
        open_gguf(path)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the operating system's refusal is patched in."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ModelLoadError, match="Permission denied"):
        open_gguf(path)


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_file_changed_after_opening(change: str, tmp_path: Path) -> None:
    """Reading a page beyond the end would kill the process, so the size is checked first."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf())
    file = open_gguf(path)
    size = path.stat().st_size
    os.truncate(path, size - 4096 if change == "shorter" else size + 4096)
    with pytest.raises(ModelLoadError, match="the file changed while it was being read"):
        file.weight("token_embd.weight")


class TestSplit:
    def parts(self, tmp_path: Path) -> list[Path]:
        tensors = tiny_tensors()
        return write_split(tmp_path, "m", tiny_keys(), [tensors[:4], tensors[4:8], tensors[8:]])

    def test_part_missing(self, tmp_path: Path) -> None:
        parts = self.parts(tmp_path)
        parts[1].unlink()
        with pytest.raises(ModelLoadError, match=r"1 of 3 parts are missing, first .*/m-00002-of-00003.gguf"):
            open_gguf(parts[0])

    def test_wrong_count(self, tmp_path: Path) -> None:
        for part in self.parts(tmp_path):
            part.rename(part.with_name(part.name.replace("of-00003", "of-00002")))
        with pytest.raises(ModelLoadError, match=r"split.count is 3 instead of 2"):
            open_gguf(tmp_path / "m-00001-of-00002.gguf")

    def test_parts_in_the_wrong_order(self, tmp_path: Path) -> None:
        parts = self.parts(tmp_path)
        parts[1].rename(tmp_path / "x")
        parts[2].rename(parts[1])
        (tmp_path / "x").rename(parts[2])
        with pytest.raises(ModelLoadError, match=r"00002-of-00003.gguf: split.no is 2 instead of 1"):
            open_gguf(parts[2])

    def test_parts_of_different_models(self, tmp_path: Path) -> None:
        parts = self.parts(tmp_path)
        other = tmp_path / "other"
        other.mkdir()
        theirs = write_split(other, "m", tiny_keys(), [[EMBEDDING], [Tensor("x", "F32", (8,))], [EMBEDDING]])
        theirs[1].replace(parts[1])
        with pytest.raises(ModelLoadError, match=r"split.tensors.count is 1?\d instead of \d"):
            open_gguf(parts[0])

    def test_tensor_in_two_parts(self, tmp_path: Path) -> None:
        parts = write_split(tmp_path, "m", tiny_keys(), [[EMBEDDING], [EMBEDDING]])
        with pytest.raises(ModelLoadError, match=r"tensor 'token_embd.weight' is also in an earlier part"):
            open_gguf(parts[0])

    @pytest.mark.parametrize("name", ["m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-99999.gguf"])
    def test_impossible_part(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(tiny_gguf())
        with bounded(), pytest.raises(ModelLoadError, match="is impossible"):
            open_gguf(tmp_path / name)

    def test_part_without_its_name(self, tmp_path: Path) -> None:
        part = self.parts(tmp_path)[0].rename(tmp_path / "model.gguf")
        with pytest.raises(ModelLoadError, match="a part of a model split into 3 files"):
            open_gguf(part)


def flip_and_open(seed: int, content: bytes, header_bytes: int, path: Path) -> bool:
    """True if a file with a few random bytes in its header opens. The only permitted error is ModelLoadError."""
    rng = random.Random(seed)
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(header_bytes)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    path.write_bytes(damaged)
    try:
        file = open_gguf(path)
        for name in file.tensors:
            assert file.tensors[name].nbytes <= len(content)
    except ModelLoadError as error:
        refusal = str(error)
    else:
        file.close()
        return True
    assert refusal.startswith(f"{path}: ")
    return False


def flips(seeds: range, path: Path) -> None:
    content = tiny_gguf()
    header_bytes = len(content) - sum(t.nbytes() for t in tiny_tensors())
    with bounded(seconds=60):
        opened = sum(flip_and_open(seed, content, header_bytes, path) for seed in seeds)
    assert 0 < opened < len(seeds)


def test_random_damage(tmp_path: Path) -> None:
    flips(range(500), tmp_path / "model.gguf")


@pytest.mark.slow
def test_much_random_damage(tmp_path: Path) -> None:
    flips(range(500, 10_500), tmp_path / "model.gguf")


def test_a_declared_terabyte_is_never_touched(tmp_path: Path) -> None:
    """A sparse file of 1 TB: its sizes are legal, so it opens without reading its data."""
    path = tmp_path / "model.gguf"
    shape = (1 << 19, 1 << 19)
    content = gguf([ARCHITECTURE], [Tensor("t.weight", "F32", shape, b"")])
    path.write_bytes(content)
    os.truncate(path, len(content) + 4 * prod(shape))
    with bounded():
        file = open_gguf(path)
        assert file.weight("t.weight").nbytes == 4 * prod(shape)
        file.close()


def test_weights_that_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([ARCHITECTURE], [Tensor("t", "I32", (8,), np.arange(8, dtype=np.int32).tobytes())]))
    file = open_gguf(path)
    with pytest.raises(ModelLoadError, match=r"offset \d+: tensor 't' has type I32, which is not a type for weights"):
        file.weight("t")
    with pytest.raises(ModelLoadError, match="there is no tensor 'u'"):
        file.weight("u")
