"""Streamed layers: no place is overwritten before its use ended, the tokens of the resident model, and the overlap."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.backends import Executor, PackCacheOptions
from octavo.backends.placement import spread
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.layer_ring import FileCopies, FileLayer, HostCopies, LayerRing
from octavo.backends.torch.storages import Layout
from octavo.backends.torch.streamed_weights import StreamPlan, load_streamed, places_of, streamed_parameters
from octavo.backends.torch.weights import DeviceWeights
from octavo.errors import EngineDeadError, InsufficientMemoryError, ModelLoadError
from octavo.graph.passes import optimize
from octavo.graph.segments import layer_borders
from tests.models.test_steps import LIMITS, in_chunks
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph
from tests.support.waiting import wait_until

CPU = torch.device("cpu")


class ShuffledStreams:
    """Two queues of work, of copies and of the computation, whose work is done in any order that the marks allow.

    Implements `CopyEngine`. Work is done only when the test takes a turn; each is done as a whole or, for a copy, in
    two halves, between which the place holds neither layer.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.done: set[int] = set()
        self._queues: dict[str, list[tuple[int, int | None, Any]]] = {"copies": [], "compute": []}
        self._number = 0

    def _put(self, queue: str, after: int | None, work: Any) -> int:
        self._number += 1
        self._queues[queue].append((self._number, after, work))
        return self._number

    def mark(self) -> int:
        return self._put("compute", None, lambda: None)

    def copy(self, place: Tensor, source: Tensor, after: int | None) -> int:
        self._put("copies", after, lambda: place.fill_(255))
        return self._put("copies", None, lambda: place.copy_(source))

    def await_copy(self, copy: int) -> None:
        self._put("compute", copy, lambda: None)

    def finish(self, copy: int) -> None:
        while copy not in self.done:
            self.turn()

    def compute(self, work: Any) -> None:
        self._put("compute", None, work)

    def turn(self) -> bool:
        """Does one piece of work; False: there is none."""
        ready = [q for q in self._queues.values() if q and (q[0][1] is None or q[0][1] in self.done)]
        if not ready:
            assert not any(self._queues.values()), "the queues wait for each other"
            return False
        number, _, work = self._rng.choice(ready).pop(0)
        work()
        self.done.add(number)
        return True

    def close(self) -> None:
        while self.turn():
            pass


@pytest.mark.parametrize("seed", range(60))
def test_no_place_is_overwritten_before_its_use_ended(seed: int) -> None:
    """Also with steps that end in the middle, and those that are submitted while others are far behind."""
    rng = random.Random(seed)
    num_layers, num_places = rng.randint(1, 9), rng.randint(1, 4)
    streams = ShuffledStreams(rng)
    places = [torch.full((4,), 254, dtype=torch.uint8) for _ in range(min(num_places, num_layers))]
    sources = [torch.full((4,), layer, dtype=torch.uint8) for layer in range(num_layers)]
    ring = LayerRing(sources, places, streams)
    seen: list[int] = []
    expected: list[int] = []
    for _ in range(rng.randint(1, 5)):
        last = rng.choice([num_layers, num_layers, rng.randint(0, num_layers)])
        for layer in range(last):
            ring.enter(layer)
            for _ in range(rng.randint(1, 3)):
                place = places[layer % len(places)]
                streams.compute(lambda place=place: seen.append(int(place.min())))
                streams.compute(lambda place=place: seen.append(int(place.max())))
                expected += [layer, layer]
            if layer == last - 1 < num_layers - 1:
                break  # the step failed here
            ring.leave(layer)
            for _ in range(rng.randint(0, 6)):
                streams.turn()
    ring.close()
    assert seen == expected


class Slow(HostCopies):
    """Each copy takes so many seconds."""

    seconds = 0.0

    def copy(self, place: Tensor, source: Tensor, after: None) -> Any:  # noqa: ARG002
        def run() -> None:
            time.sleep(self.seconds)  # timed: how long a copy takes
            place[: len(source)].copy_(source)

        return self._thread.submit(run)


class ClockedStreams:
    """Copies and a computation that take so many seconds each on a clock of their own. Implements `CopyEngine`."""

    def __init__(self, transfer_s: float) -> None:
        self.transfer_s, self.copied_at, self.computed_at = transfer_s, 0.0, 0.0

    def mark(self) -> float:
        return self.computed_at

    def copy(self, place: Tensor, source: Tensor, after: float | None) -> float:  # noqa: ARG002
        self.copied_at = max(self.copied_at, after or 0.0) + self.transfer_s
        return self.copied_at

    def await_copy(self, copy: float) -> None:
        self.computed_at = max(self.computed_at, copy)

    finish = await_copy

    def close(self) -> None: ...


@pytest.mark.parametrize("num_layers", [4, 6, 10, 13, 32, 33, 80])
@pytest.mark.parametrize(("transfer_s", "compute_s"), [(0.02, 0.005), (0.005, 0.02), (0.015, 0.015), (0.01, 0.009)])
def test_copies_run_beside_the_computation(transfer_s: float, compute_s: float, num_layers: int) -> None:
    """A step takes at most 1.10 times the longer of the two sums, once the first step has filled the places."""
    streams = ClockedStreams(transfer_s)
    nothing = torch.zeros(1, dtype=torch.uint8)
    ring = LayerRing([nothing] * num_layers, [nothing] * places_of(num_layers), streams)
    times = [0.0]
    for _ in range(12):
        for layer in range(num_layers):
            ring.enter(layer)
            streams.computed_at += compute_s
            ring.leave(layer)
        times.append(streams.computed_at)
    seconds = (times[-1] - times[1]) / (len(times) - 2)
    assert seconds / (num_layers * max(transfer_s, compute_s)) <= 1.10


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "qwen2moe", "bloom", "deepseek3"])
def test_the_logits_of_the_resident_model(
    name: str, on_disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To the last bit, whichever layers are streamed."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    graph, weights = tiny_graph(name)
    backend = TorchBackend(CPU, torch.float32)
    expected = logits_of(backend.compile(graph, weights, LIMITS))
    count = len(layer_borders(graph))
    indices = sorted({node.layer_index for node in graph.nodes if node.layer_index is not None})
    for number in {1, count}:
        layers = tuple(indices[i] for i in spread(number, count))
        sizes = backend.streamed(backend.sizes(graph, weights, LIMITS), layers)
        assert sizes.host_bytes > 0
        pack_cache = PackCacheOptions("model", 1 << 30, 0) if on_disk else None
        executor = backend.compile(sizes, weights, LIMITS, pack_cache=pack_cache)
        np.testing.assert_array_equal(logits_of(executor), expected)


def test_the_fp8_cache_of_streamed_layers() -> None:
    """Its factors come from weights that are not on the device when they are computed."""
    graph, weights = tiny_graph("llama")
    backend = TorchBackend(CPU, torch.float32)
    expected = logits_of(backend.compile(graph, weights, LIMITS, kv_dtype="fp8"))
    layers = tuple(sorted({n.layer_index for n in graph.nodes if n.layer_index is not None}))
    sizes = backend.streamed(backend.sizes(graph, weights, LIMITS, kv_dtype="fp8"), layers)
    np.testing.assert_array_equal(logits_of(backend.compile(sizes, weights, LIMITS, kv_dtype="fp8")), expected)


def logits_of(executor: Any) -> np.ndarray:
    executor.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
    try:
        return np.concatenate([in_chunks(executor, [17, 12, 1]), in_chunks(executor, [30])])
    finally:
        executor.close()


def test_late_copies_change_nothing() -> None:
    graph, weights = tiny_graph("llama")
    graph = optimize(graph, ())
    copies = Slow()
    copies.seconds = 0.003
    layers = tuple(sorted({n.layer_index for n in graph.nodes if n.layer_index is not None}))
    held = load_streamed(graph, weights, torch.float32, CPU, StreamPlan(layers), copies=copies)
    found = streamed_parameters(graph, layers)
    assert held.streamed is not None
    for node in held.streamed.in_turn(graph.nodes):
        for parameter in node.op.parameters:
            if any(parameter in each for each in found.values()):
                np.testing.assert_array_equal(held[parameter].numpy(), weights[parameter.name].dequantize())
    held.clear()


@pytest.mark.parametrize(("mode", "reason"), [("rb", "the file was truncated"), ("ab", os.strerror(errno.EBADF))])
def test_a_layer_that_cannot_be_read_names_its_file(mode: str, reason: str, tmp_path: Path) -> None:
    """The file became shorter, or the system has an error, here that the descriptor is only for writing."""
    path = tmp_path / "layers"
    path.write_bytes(bytes(range(200)) * 3)
    with path.open(mode) as file:
        copies = FileCopies(HostCopies(), 200, pinned=False)
        copy = copies.copy(torch.zeros(200, dtype=torch.uint8), FileLayer(file, path, 500, 200), None)
        with pytest.raises(EngineDeadError, match=rf"{path}: a streamed layer could not be read: {reason}\. Start"):
            copies.finish(copy)
        copies.close()


class FromDisk:
    """Starts of one model whose layers are all streamed from disk. made: the layers that the latest one laid out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "llama", seed: int = 0) -> None:
        self._graph, self._weights = tiny_graph(name, seed)
        self._backend = TorchBackend(CPU, torch.float32)
        self.layers = tuple(sorted({n.layer_index for n in self._graph.nodes if n.layer_index is not None}))
        self._monkeypatch = monkeypatch
        self.made = 0

    def logits(self, identity: str = "model", limit: int = 1 << 30) -> np.ndarray:
        load = DeviceWeights.__init__

        def counted(*args: Any, **kwargs: Any) -> None:
            self.made += 1
            load(*args, **kwargs)

        self.made = -1  # what stays on the device is made, too
        with self._monkeypatch.context() as patch:
            patch.setattr(DeviceWeights, "__init__", counted)
            return logits_of(self.executor(identity, limit))

    def executor(self, identity: str = "model", limit: int = 1 << 30) -> Executor:
        sizes = self._backend.streamed(self._backend.sizes(self._graph, self._weights, LIMITS), self.layers)
        options = PackCacheOptions(identity, limit, 0)
        return self._backend.compile(sizes, self._weights, LIMITS, pack_cache=options)

    def resident(self) -> np.ndarray:
        return logits_of(self._backend.compile(self._graph, self._weights, LIMITS))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "packed"


def the_file(packed: Path) -> Path:
    [path] = packed.iterdir()
    return path


def test_a_second_start_writes_nothing_and_lays_out_one_layer(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FromDisk(monkeypatch)
    first = model.logits()
    assert model.made == len(model.layers) + 1
    before = the_file(packed).stat()
    np.testing.assert_array_equal(first, model.resident())
    np.testing.assert_array_equal(model.logits(), first)
    after = the_file(packed).stat()
    assert (after.st_ino, after.st_blocks) == (before.st_ino, before.st_blocks)
    assert model.made == 1 < len(model.layers)


@pytest.mark.parametrize("at", [3, 20, 60, 5000, 200_000])
def test_a_damaged_file_is_written_anew(
    at: int, packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = FromDisk(monkeypatch)
    expected = model.logits()
    good = the_file(packed).read_bytes()
    damaged = bytearray(good)
    damaged[at] ^= 1
    the_file(packed).chmod(0o600)
    the_file(packed).write_bytes(damaged)
    np.testing.assert_array_equal(model.logits(), expected)
    assert "removing it and packing the weights again" in caplog.text
    assert the_file(packed).read_bytes() == good


def test_a_file_that_other_code_wrote_is_written_anew(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksums are right."""
    model = FromDisk(monkeypatch)
    expected = model.logits()
    the_file(packed).unlink()
    with monkeypatch.context() as patch:
        write = Layout.write
        patch.setattr(Layout, "write", lambda self, buffer: (write(self, buffer), buffer.bitwise_not_()))
        model.logits()
    np.testing.assert_array_equal(model.logits(), expected)
    assert "streamed layer 0 has a different layout" in caplog.text


def test_another_model_has_another_file(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its weights, even if time stamps lie, and by the identity of its files."""
    model, other = FromDisk(monkeypatch), FromDisk(monkeypatch, seed=1)
    model.logits()
    np.testing.assert_array_equal(other.logits(), other.resident())
    assert len([*packed.iterdir()]) == 2
    model.logits("changed")
    assert len([*packed.iterdir()]) == 3


def test_a_file_that_is_truncated_while_it_is_used_ends_the_step(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FromDisk(monkeypatch)
    executor = model.executor()
    executor.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
    in_chunks(executor, [9])
    path = the_file(packed)
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(EngineDeadError, match=rf"{path}: a streamed layer could not be read: the file was truncated"):
        in_chunks(executor, [9, 9])
    executor.close()
    np.testing.assert_array_equal(model.logits(), model.resident())


@pytest.mark.usefixtures("packed")
def test_layers_of_several_kinds_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lfm2", "deepseek3"):
        model = FromDisk(monkeypatch, name)
        expected = model.resident()
        np.testing.assert_array_equal(model.logits(), expected)
        np.testing.assert_array_equal(model.logits(), expected)
        assert model.made < len(model.layers)


@pytest.mark.parametrize("reason", ["limit", "disk"])
def test_a_disk_without_room_is_one_line(
    reason: str, packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if reason == "disk":
        monkeypatch.setattr(os, "posix_fallocate", full)
    model = FromDisk(monkeypatch)
    if reason == "limit":
        with pytest.raises(InsufficientMemoryError, match=r"take 0.0 GiB, more than pack_cache_size allows: raise it"):
            model.logits(limit=1000)
        assert model.made == -1  # nothing was loaded before
        assert not packed.exists()
        return
    with pytest.raises(InsufficientMemoryError, match=r"could not be saved to disk; .* raise pack_cache_size"):
        model.logits()
    [record] = caplog.records
    assert "No space left" in record.getMessage()
    assert not [*packed.iterdir()]


def test_a_model_that_cannot_be_read_is_no_fault_of_the_file(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Layout, buffer: Tensor) -> None:  # noqa: ARG001
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Layout, "write", damaged)
    with pytest.raises(ModelLoadError, match=r"the model's weights cannot be read: .*Input/output error"):
        FromDisk(monkeypatch).logits()
    assert not [*packed.iterdir()]


@pytest.mark.parametrize("ends", ["written", "dead"])
def test_a_second_start_waits_for_the_first(
    ends: str, packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first writes the same file, completely or not."""
    model = FromDisk(monkeypatch)
    expected, path = model.logits(), the_file(packed)
    good = path.rename(packed.parent / "good")
    draft = packed / f".{path.stem}-other.draft"
    with draft.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def end() -> None:
            wait_until(lambda: "another process is writing it; waiting" in caplog.text)
            if ends == "written":
                good.rename(path)
                draft.unlink()
            other.close()

        threading.Thread(target=end).start()
        np.testing.assert_array_equal(model.logits(), expected)
    assert "another process is writing it; waiting" in caplog.text
    assert model.made == (1 if ends == "written" else len(model.layers) + 1)
    assert [*packed.iterdir()] == [path]


def test_tensors_keep_their_numbers_strides_and_sharing() -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    given = [base, base[2:4], base.t()[1:3], torch.tensor([1, 2, 3], dtype=torch.int8), torch.empty(0), base[:, 3]]
    layout = Layout(given)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write(buffer)
    seen = [layout.view(tensor, buffer) for tensor in given]
    for tensor, view in zip(given, seen, strict=True):
        assert torch.equal(tensor, view)
        assert tensor.stride() == view.stride()
    seen[0][2, 0] = -7.0
    assert seen[1][0, 0] == -7.0
    assert base[2, 0] == 20.0


@pytest.mark.parametrize("num_layers", [1, 5, 32])
def test_streamed_layers_are_spread(num_layers: int) -> None:
    for count in range(num_layers + 1):
        layers = spread(count, num_layers)
        assert len(layers) == count
        assert all(0 <= layer < num_layers for layer in layers)
