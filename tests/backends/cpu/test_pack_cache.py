"""Packed weights on disk: mapped bit for bit as they were packed, and refused whenever they might be anything else."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends import PackCacheOptions
from octavo.backends.cpu import _native
from octavo.backends.cpu.weights import load_matrices
from octavo.graph.values import Parameter
from octavo.quantization.packed import DenseWeight, Weight
from tests.support.quantize import HALF_OFFSETS, random_weight

N, K = 40, 256  # two panels and a half
LIMIT = 1 << 30
Packed = dict[str, _native.PackedWeight]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "packed"


def make_weight(type_name: str, seed: int) -> Weight:
    """Random legal blocks, or numbers."""
    values = np.random.default_rng(seed).normal(0, 1, (N, K)).astype(np.float32)
    match type_name:
        case "F32":
            return DenseWeight(values)
        case "F16":
            return DenseWeight(values.astype(np.float16))
        case "BF16":
            return DenseWeight((values.view(np.uint32) >> 16).astype(np.uint16))
    return random_weight(type_name, (N, K), seed)


def make_weights(*type_names: str, seed: int = 0) -> dict[str, Weight]:
    return {name: make_weight(name, seed) for name in type_names or ("Q4_K", "Q8_0", "F16")}


def load(weights: dict[str, Weight], identity: str | None = "model", limit: int = LIMIT) -> Packed:
    """identity None: without a cache."""
    options = None if identity is None else PackCacheOptions(identity, limit)
    packed = load_matrices(weights, [Parameter(name, (N, K)) for name in weights], 2, None, options)
    return {parameter.name: weight for parameter, weight in packed.items()}


def content(packed: Packed) -> dict[str, tuple[str, bytes]]:
    return {name: (weight.type_name, weight.panels.tobytes()) for name, weight in packed.items()}


def are_mapped(packed: Packed) -> bool:
    return all(weight.is_view for weight in packed.values())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def inode(folder: Path) -> int:
    (path,) = folder.glob("*.packed")
    return path.stat().st_ino


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    """The one file with other bytes, as somebody might have left it."""
    (path,) = folder.glob("*.packed")
    data = change(path.read_bytes())
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def run_child(code: str, *, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    """A Python process with the functions of this module."""
    program = f"from tests.backends.cpu.test_pack_cache import *\n{code}"
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.Popen([*prefix, sys.executable, "-c", program], env=env, text=True, stdout=-1, stderr=-1)


@pytest.mark.parametrize("type_name", sorted({*_native.packable_types(), *HALF_OFFSETS} - {"Q8_1"}))
def test_every_type_comes_back_bit_for_bit(type_name: str, folder: Path) -> None:
    weights = make_weights(type_name)
    expected = content(load(weights, identity=None))
    first, second = load(weights), load(weights)
    assert content(first) == content(second) == expected
    assert are_mapped(first)
    assert are_mapped(second)
    assert len(files(folder)) == 1


def test_the_bytes_of_a_layout_version_never_change() -> None:
    """If this fails, packing has changed: raise PACK_LAYOUT_VERSION in csrc/pack.h, then the digest here."""
    digest = hashlib.blake2b(digest_size=8)
    for type_name in _native.packable_types():
        digest.update(load(make_weights(type_name), identity=None)[type_name].panels)
    assert (_native.PACK_LAYOUT_VERSION, digest.hexdigest()) == (5, "f4eb45ff5180927c")


@pytest.mark.parametrize("type_name", ["Q4_0", "Q8_0", "F16", "IQ4_NL"])
def test_products_are_the_same_to_the_last_bit(type_name: str, folder: Path) -> None:
    weights = make_weights(type_name)
    load(weights)
    rng = np.random.default_rng(0)
    for isa in _native.known_isas()[: _native.known_isas().index(_native.detected_isa()) + 1]:
        for rows in (1, 7, 64):
            inputs = rng.normal(0, 1, (rows, K)).astype(np.float32)
            kernel = _native.KernelRun("linear", isa, 2)
            outputs = []
            for packed in (load(weights, identity=None), load(weights)):
                output = np.full((rows, N), np.nan, np.float32)
                kernel([inputs], [packed[type_name], None], [], [], output)
                outputs.append(output)
            assert np.isfinite(outputs[0]).all()
            assert outputs[0].tobytes() == outputs[1].tobytes()
    assert len(files(folder)) == 1


def test_a_second_start_packs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights()
    load(weights)
    before = inode(folder)
    monkeypatch.setattr(_native, "pack_weight", None)
    assert are_mapped(load(weights))
    assert inode(folder) == before


def test_the_file_is_the_users_alone(folder: Path) -> None:
    load(make_weights())
    (path,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("what", ["identity", "content", "type", "name"])
def test_another_model_is_packed_anew(what: str, folder: Path) -> None:
    weights = make_weights("Q4_0", "Q8_0")
    load(weights)
    other = {
        "identity": weights,
        "content": make_weights("Q4_0", "Q8_0", seed=1),
        "type": make_weights("Q4_0", "Q4_1"),
        "name": {"x": weights["Q4_0"], "Q8_0": weights["Q8_0"]},
    }[what]
    loaded = load(other, identity="changed" if what == "identity" else "model")
    assert content(loaded) == content(load(other, identity=None))
    assert len(files(folder)) == 2


def test_damage_anywhere_is_noticed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is done to the file, the weights are right, and after it the file is whole again."""
    weights = make_weights("Q4_K", "F16")
    expected = content(load(weights, identity=None))
    load(weights)
    size = next(folder.iterdir()).stat().st_size
    rng = np.random.default_rng(0)
    changes: list[Callable[[bytes], bytes]] = [
        lambda data: data[:0],
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data[: size // 2],
        lambda data: data + b"\0",
        lambda data: bytes(len(data)),
        lambda data: data[:4096] + bytes(len(data) - 4096),
    ]
    header = 16 + 32 + 2 * 16
    places = [*range(0, header, 3), *(4096 + rng.integers(0, 3 * 16 * 144, 40)).tolist()]
    changes += [lambda data, at=at: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    for change in changes:
        rewrite(folder, change)
        caplog.clear()
        assert content(load(weights)) == expected
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "packing the weights again" in warnings[0]
    assert len(files(folder)) == 1
    assert are_mapped(load(weights))


@pytest.mark.parametrize("kind", [1, 99, 2**64 - 1])
def test_a_forged_header_cannot_make_a_matrix_another(
    kind: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Q4_K taken for F32 would be read far beyond its end."""
    weights = make_weights("Q4_K")
    expected = content(load(weights))

    def forge(data: bytes) -> bytes:
        return data[:48] + kind.to_bytes(8, "little") + data[56:]

    rewrite(folder, forge)
    assert content(load(weights)) == expected
    assert "Q4_K has an impossible type" in caplog.text


def test_native_code_takes_just_the_bytes_that_it_will_read() -> None:
    panels = load(make_weights("Q4_K"), identity=None)["Q4_K"].panels
    for wrong in (panels[:-1], panels[:0], np.append(panels, np.uint8(0))):
        with pytest.raises(ValueError, match="bytes when packed, not"):
            _native.view_packed("Q4_K", wrong, N, K)
    shifted = np.empty(panels.size + 128, np.uint8)
    start = -shifted.ctypes.data % 64 + 1
    with pytest.raises(ValueError, match="aligned to 64"):
        _native.view_packed("Q4_K", shifted[start : start + panels.size], N, K)
    for n, k in ((0, K), (N, 100), (2**31, K), (-1, K)):
        with pytest.raises(ValueError, match=r"cannot be packed|are not a multiple"):
            _native.packed_nbytes("Q4_K", n, k)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_no_file_is_not_opened(make: Callable[[Path], None], folder: Path) -> None:
    weights = make_weights()
    expected = content(load(weights))
    (path,) = folder.iterdir()
    path.unlink()
    make(path)
    assert content(load(weights)) == expected


@pytest.mark.parametrize("mode", [0o622, 0o660])
def test_a_file_that_others_may_write_is_refused(mode: int, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = make_weights()
    load(weights)
    next(folder.iterdir()).chmod(mode)
    before = inode(folder)
    assert are_mapped(load(weights))
    assert "other users may write to it; removing it" in caplog.text
    assert inode(folder) != before or next(folder.iterdir()).stat().st_mode & 0o777 == 0o400


def test_a_folder_that_others_may_write_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert not are_mapped(load(make_weights()))
    assert files(folder) == []
    assert f"other users may write to it (chmod 700 {folder}" in caplog.text


def test_a_folder_of_somebody_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = make_weights()
    load(weights)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert not are_mapped(load(weights))
    assert f"it belongs to user {owner}" in caplog.text


def test_no_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "below"))
    weights = make_weights()
    assert content(load(weights)) == content(load(weights, identity=None))
    assert "cannot save the packed weights: Not a directory" in caplog.text


MOUNT = ("unshare", "--map-root-user", "--mount", "sh", "-c")


@pytest.mark.parametrize(
    ("mount", "reason"),
    [
        ("mount -t tmpfs -o size=32k,mode=700 none $OCTAVO_CACHE", "No space left on device"),
        ("mount -t tmpfs none $OCTAVO_CACHE && mount -o remount,ro $OCTAVO_CACHE", "Read-only file system"),
    ],
)
def test_a_disk_that_takes_nothing(mount: str, reason: str, tmp_path: Path) -> None:
    if subprocess.run([*MOUNT, f"OCTAVO_CACHE={tmp_path}; {mount}"], check=False, capture_output=True).returncode:
        pytest.skip("this system lets no user mount a file system of their own")
    code = (
        "packed = load(make_weights()); assert not are_mapped(packed)\n"
        "assert content(packed) == content(load(make_weights(), identity=None))\n"
        "print([*Path(os.environ['OCTAVO_CACHE']).rglob('*packed*/*')])"
    )
    child = run_child(code, prefix=(*MOUNT, f'{mount} && exec "$0" "$@"'), OCTAVO_CACHE=str(tmp_path))
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert out.strip() == "[]"
    assert reason in err


def test_a_killed_writer_leaves_nothing_that_lasts(folder: Path) -> None:
    child = run_child("os.fsync = lambda file: os.kill(os.getpid(), 9)\nload(make_weights())")
    assert child.wait(60) == -9
    (draft,) = files(folder)
    assert draft.endswith(".draft")
    assert are_mapped(load(make_weights()))
    (name,) = files(folder)
    assert name.endswith(".packed")


def test_an_interrupted_writer_cleans_up(folder: Path) -> None:
    child = run_child(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.fsync = lambda file: os.kill(os.getpid(), signal.SIGINT) or time.sleep(1)\n"  # timed: the signal comes
        "load(make_weights())"
    )
    _, err = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert files(folder) == []


def test_starts_at_the_same_time(folder: Path) -> None:
    at = time.time() + 1.5
    code = (
        f"weights = make_weights('Q4_K', 'Q6_K'); time.sleep(max({at} - time.time(), 0))\n"  # timed: all begin at once
        "print(hashlib.sha256(repr(content(load(weights))).encode()).hexdigest())"
    )
    children = [run_child(code) for _ in range(4)]
    expected = hashlib.sha256(repr(content(load(make_weights("Q4_K", "Q6_K"), identity=None))).encode()).hexdigest()
    for child in children:
        out, err = child.communicate(timeout=60)
        assert (out.strip(), child.returncode) == (expected, 0), err
    assert len(files(folder)) == 1
    assert are_mapped(load(make_weights("Q4_K", "Q6_K")))


def test_one_writer_at_a_time(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    weights = make_weights()
    load(weights)
    (path,) = folder.iterdir()
    path.unlink()
    (key,) = {line.split("/")[-1].split(".")[0] for line in caplog.messages if "kept for the next start" in line}
    draft = folder / f".{key}-other.draft"
    with draft.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not are_mapped(load(weights))
        assert "another process is writing it" in caplog.text
        assert files(folder) == [draft.name]
    assert are_mapped(load(weights))
    assert len(files(folder)) == 1


def test_models_not_used_for_longest_make_room(folder: Path) -> None:
    weights = make_weights()
    load(weights, "a")
    (first,) = files(folder)
    size = (folder / first).stat().st_size
    load(weights, "b", 3 * size)
    (second,) = set(files(folder)) - {first}
    for name, age in ((first, 200), (second, 100)):
        os.utime(folder / name, (time.time() - age, time.time() - age))
    assert are_mapped(load(weights, "a", 3 * size))  # used again
    load(weights, "c", 2 * size)
    assert first in files(folder)
    assert second not in files(folder)
    assert len(files(folder)) == 2


def test_a_model_beyond_the_limit_is_not_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not are_mapped(load(make_weights(), limit=1000))
    assert "more than the limit for all such files" in caplog.text
    assert files(folder) == []


def test_a_removed_file_serves_those_who_have_it(folder: Path) -> None:
    weights = make_weights()
    packed = load(weights)
    expected = content(load(weights, identity=None))
    next(folder.iterdir()).unlink()
    assert content(packed) == expected


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 1000])
def test_the_checksum_sees_every_bit(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    seen = set(_native.checksums([data]))
    for at in range(size):
        for bit in range(8):
            data[at] ^= 1 << bit
            seen.update(_native.checksums([data]))
            data[at] ^= 1 << bit
    assert len(seen) == 8 * size + 1
    assert seen.isdisjoint(_native.checksums([np.append(data, np.uint8(0))]))
