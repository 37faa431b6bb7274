"""Models in parts on a device and on the CPU: whole engines with the answers of one place, sizes, and wrong options."""

from __future__ import annotations

import gc
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.backends import Executor, default_backend, get_backend
from octavo.backends.memory import MemoryBudget
from octavo.backends.placement import Placement, best_placement, parts_of, possible_layers
from octavo.backends.rates import Rates
from octavo.backends.split import SplitBackend
from octavo.backends.split_executor import SplitExecutor
from octavo.backends.split_sizes import SplitSizes, cache_room
from octavo.backends.torch.compile import TorchBackend
from octavo.config import EngineConfig
from octavo.engine.loading import devices
from octavo.engine.loading.devices import backend_name, backend_of, memory_of_rank, step_tokens
from octavo.engine.loading.memory_needs import memory_needs
from octavo.errors import InsufficientMemoryError, UsageError
from octavo.graph.ops.moe import MoE
from octavo.graph.segments import layer_borders
from octavo.loader.checkpoint import open_checkpoint
from tests.backends.test_shared_caches import four_layers
from tests.models.test_steps import BLOCKS, LIMITS, in_chunks, paged
from tests.models.test_steps import TOKENS as PROMPT
from tests.support.batches import Request
from tests.support.engine_answers import answers
from tests.support.processes import octavo_here
from tests.support.small_device import SmallDevice
from tests.support.text_models import save_decoder
from tests.support.tiny_gguf import wide_gguf
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

OPTIONS = {"max_model_len": 160, "max_num_seqs": 4, "num_threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_decoder(tmp_path_factory.mktemp("decoder")))


def test_the_answers_of_one_place(model: str) -> None:
    with LLM(model, kv_cache_memory=40 << 10, backend="cpu", **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(model, kv_cache_memory=40 << 10, backend="torch:cpu", gpu_layers=1, **OPTIONS) as llm:
        executor = llm._session.model().executor
        assert isinstance(executor, SplitExecutor)
        assert [part.on_device for part in executor.sizes.parts] == [False, True]
        assert answers(llm) == expected


def test_the_plan_shows_both_places_and_a_speed(model: str) -> None:
    config = EngineConfig(backend="torch:cpu", gpu_layers=1, max_num_seqs=4)
    with closing(open_checkpoint(Path(model))) as checkpoint:
        needs = memory_needs(checkpoint, 64, 2, MemoryBudget(1 << 30), config)
    gpu = needs.gpu
    assert gpu is not None
    assert (gpu.num_layers, gpu.gpu_layers, gpu.cpu_experts) == (2, 1, 0)
    assert gpu.gpu_weight_bytes + gpu.cpu_weight_bytes == needs.weight_bytes
    assert gpu.gpu_kv_bytes_per_token + gpu.cpu_kv_bytes_per_token == needs.kv_bytes_per_token
    assert needs.fits
    assert gpu.tokens_per_s > 1
    options = ("--ctx", "64", "--backend", "torch:cpu", "--gpu-layers")
    planned = octavo_here("plan", model, *options, "1")
    assert planned.returncode == 0, planned.stderr
    written = " ".join(planned.stdout.split())
    assert "1 of 2 layers, weights" in written
    assert "the CPU runs the other layers" in written
    refused = octavo_here("plan", model, *options, "3")
    assert refused.returncode == 2
    assert (
        refused.stderr.strip() == "octavo: --gpu-layers is 3, but the model has only 2 layers; give at most 2, or auto"
    )


def test_the_plan_of_a_whole_model_keeps_to_the_limit_of_the_gpu(model: str) -> None:
    config = EngineConfig(backend="torch:cpu", gpu_memory="64MiB", max_num_seqs=4)
    with closing(open_checkpoint(Path(model))) as checkpoint:
        needs = memory_needs(checkpoint, 64, 2, MemoryBudget(1 << 40), config)
    assert needs.gpu is not None
    assert needs.gpu.limit_bytes == 64 << 20
    assert needs.available_bytes - needs.headroom_bytes <= 64 << 20


def test_the_plan_of_a_longer_context_leaves_layers_to_the_cpu(model: str) -> None:
    """As the start with the options that it names does; the GPU's part of a model cannot run from disk."""
    config = EngineConfig(backend="torch:cpu", gpu_memory="64MiB", max_num_seqs=4)
    with closing(open_checkpoint(Path(model))) as checkpoint:
        needs = memory_needs(checkpoint, 1 << 20, 1, MemoryBudget(1 << 40), config)
    assert needs.gpu is not None
    assert needs.gpu.gpu_layers < needs.gpu.num_layers
    assert needs.from_disk is None


def test_the_plan_of_a_split_model_that_runs_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers on the CPU are larger than main memory. The start does what the plan says."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    path = tmp_path / "wide.gguf"
    path.write_bytes(wide_gguf(4))
    cpu_bytes = MemoryBudget.with_usable(14 << 20)  # of which the workspace takes 5 MiB
    monkeypatch.setattr("octavo.backends.cpu.memory", lambda: MemoryBudget(cpu_bytes))
    device = SmallDevice(torch.device("cpu"), torch.float32)
    cpu = get_backend("cpu")
    monkeypatch.setattr("octavo.engine.loading.devices.get_backend", lambda name: cpu if name == "cpu" else device)
    options = {"backend": "torch", "gpu_layers": 1, "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_threads": 1}
    with closing(open_checkpoint(path)) as checkpoint:
        config = EngineConfig(model=str(path), **options)
        needs = memory_needs(checkpoint, 64, 1, device.memory(), config)
    disk = needs.from_disk
    assert disk is not None, needs.problem
    assert (disk.num_layers, needs.problem) == (3, None)
    assert needs.gpu is not None
    assert disk.resident_bytes < needs.gpu.cpu_weight_bytes
    assert needs.gpu.tokens_per_s < disk.tokens_per_s
    start = {"max_model_len": 64, "kv_cache_memory": needs.kv_bytes}
    with LLM(str(path), **options, **start) as llm:
        paging = llm._session.model().executor.paging
        assert paging is not None
        assert (paging.resident_bytes, paging.bytes_per_token) == (disk.resident_bytes, disk.bytes_per_token)
        assert len(llm.generate("ab", SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4


@pytest.mark.slow
def test_a_real_model_in_two_places(smollm2_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for options in ({"backend": "cpu"}, {"backend": "torch:cpu", "gpu_layers": 3}):
        with LLM(str(smollm2_path), max_model_len=256, **options) as llm:
            found.append(
                [o.outputs[0].token_ids for o in llm.generate(["The sun is a star, and", "One, two,"], params)]
            )
    assert found[0] == found[1]


def backend_with(usable: int, **options: object) -> SplitBackend:
    device = SmallDevice(torch.device("cpu"), torch.float32, usable=usable)
    return SplitBackend(device, get_backend("cpu"), EngineConfig(max_model_len=64, **{"gpu_offload": "cpu", **options}))


def logits_of(executor: Executor) -> np.ndarray:
    executor.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
    try:
        return in_chunks(executor, [17, 12, 1])
    finally:
        executor.close()


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "qwen2moe", "bloom", "deepseek3"])
def test_every_cut_gives_the_logits_of_the_device(name: str) -> None:
    graph, weights = tiny_graph(name)
    expected = logits_of(get_backend("torch:cpu").compile(graph, weights, LIMITS))
    count = len(layer_borders(graph))
    for device_layers in range(count + 1):
        found = logits_of(backend_with(1 << 40, gpu_layers=device_layers).compile(graph, weights, LIMITS))
        # The CPU's products are of int8 activations.
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["llama", "lfm2", "deepseek3"])
def test_hidden_states_beside_logits_in_every_cut(name: str) -> None:
    graph, weights = tiny_graph(name)
    for device_layers in range(len(layer_borders(graph)) + 1):
        executor = backend_with(1 << 40, gpu_layers=device_layers).compile(graph, weights, LIMITS)
        executor.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
        everything, nothing = np.arange(30, dtype=np.int32), np.zeros(0, np.int32)
        found = []
        for wanted, hidden in ((everything, nothing), (nothing, everything), (everything[:9], everything[5:])):
            batch = paged([(Request(PROMPT, BLOCKS), 30)])
            found.append(executor.submit(replace(batch, logits_indices=wanted, hidden_indices=hidden)).wait())
        executor.close()
        np.testing.assert_allclose(found[2].logits, found[0].logits[:9], rtol=0, atol=1e-4)
        np.testing.assert_allclose(found[2].hidden_states, found[1].hidden_states[5:], rtol=0, atol=1e-4)


def test_auto_takes_what_fits_and_leaves_experts_to_the_cpu_first() -> None:
    graph, weights = tiny_graph("qwen2moe")
    count = len(layer_borders(graph))
    whole = backend_with(1 << 40)
    everything = whole.sizes(graph, weights, LIMITS)
    assert not isinstance(everything, SplitSizes)
    needs = {}
    for placement in [Placement(count, count, k) for k in range(1, count + 1)] + [
        Placement(count, n) for n in range(count)
    ]:
        parts = [
            (p, (whole.device if p.on_device else whole.cpu).sizes(p.graph, weights, LIMITS))
            for p in parts_of(graph, placement)
        ]
        needs[placement] = sum(
            s.weight_bytes + s.workspace_bytes + s.cache.sequence_bytes(64, 16, 512) for p, s in parts if p.on_device
        )
    for placement, usable in needs.items():
        sizes = backend_with(usable).sizes(graph, weights, LIMITS)
        assert isinstance(sizes, SplitSizes)
        assert needs[sizes.placement] <= usable
        better = [
            p
            for p, n in needs.items()
            if n <= usable
            and (p.device_layers, -p.cpu_experts) > (sizes.placement.device_layers, -sizes.placement.cpu_experts)
        ]
        assert not better, placement
    nothing = backend_with(0).sizes(graph, weights, LIMITS)
    assert isinstance(nothing, SplitSizes)
    assert nothing.placement == Placement(count, 0)


def test_experts_on_the_cpu_give_the_logits_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, weights = tiny_graph("qwen2moe")
    count = len(layer_borders(graph))
    expected = logits_of(get_backend("torch:cpu").compile(graph, weights, LIMITS))
    parts = parts_of(graph, Placement(count, count, 1))
    assert [part.on_device for part in parts] == [True, False, True]
    assert [type(node.op) for node in parts[1].graph.nodes if node.op.parameters] == [MoE]
    monkeypatch.setattr("octavo.backends.split.best_placement", lambda *_: Placement(count, count, 1))
    executor = backend_with(1 << 40).compile(graph, weights, LIMITS)
    assert isinstance(executor, SplitExecutor)
    assert len(executor.executors) == 3
    np.testing.assert_allclose(logits_of(executor), expected, rtol=0, atol=2e-2 * np.abs(expected).max())


def test_the_parts_on_the_cpu_compute_on_the_same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of each layer are a part of their own."""
    graph, weights = tiny_graph("qwen2moe")
    count = len(layer_borders(graph))
    expected = logits_of(backend_with(1 << 40, gpu_layers=count).compile(graph, weights, LIMITS, num_threads=3))
    monkeypatch.setattr("octavo.backends.split.best_placement", lambda *_: Placement(count, count, count))
    before = native_threads()
    executor = backend_with(1 << 40).compile(graph, weights, LIMITS, num_threads=3)
    assert isinstance(executor, SplitExecutor)
    assert len([part for part in executor.sizes.parts if not part.on_device]) == count > 1
    assert native_threads() - before == 2  # the one that waits for a step is the third
    np.testing.assert_allclose(logits_of(executor), expected, rtol=0, atol=2e-2 * np.abs(expected).max())


def native_threads() -> int:
    """Threads of the native programs that still exist."""
    gc.collect()
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(path.read_text())
    return sum(name.startswith("octavo-") for name in names)


@dataclass(frozen=True, slots=True)
class RatedDevice(SmallDevice):
    """With rates that are stated, not measured."""

    link: float = 1e9

    def rates(self) -> Rates:
        return Rates(1e15, 1e18)

    def copy_rate(self) -> float:
        return self.link


@pytest.mark.parametrize(("link", "streams"), [(1e12, True), (1e3, False)])
def test_layers_are_streamed_where_that_takes_less_time(
    link: float, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.backends.cpu.rates", lambda: Rates(1e8, 1e10))
    graph, weights = tiny_graph("llama")
    count = len(layer_borders(graph))
    whole = backend_with(1 << 40).sizes(graph, weights, LIMITS)
    room = whole.weight_bytes + whole.workspace_bytes + whole.cache.sequence_bytes(64, 16, 512) - 1
    device = RatedDevice(torch.device("cpu"), torch.float32, usable=room, link=link)
    backend = SplitBackend(device, get_backend("cpu"), EngineConfig(max_model_len=64))
    sizes = backend.sizes(graph, weights, LIMITS)
    assert isinstance(sizes, SplitSizes)
    assert bool(sizes.placement.streamed_layers) == streams
    assert ("if layers are streamed" in sizes.reason) != streams
    assert "4 prompts of 1,024 and answers of 256 tokens at the same time take at least" in sizes.reason
    held = sizes.on(device=True)
    assert held.weight_bytes + held.workspace_bytes + held.cache.sequence_bytes(64, 16, 512) <= room
    if streams:
        assert sizes.placement.device_layers == count
        hosted = sizes.on(device=False)
        assert hosted.weight_bytes == sum(sizes.weights[p] for p in hosted.weights) > 0
        expected = logits_of(get_backend("torch:cpu").compile(graph, weights, LIMITS))
        np.testing.assert_array_equal(logits_of(backend.compile(sizes, weights, LIMITS)), expected)


@pytest.mark.parametrize(("users", "streams"), [(1, False), (None, True), (32, True)])
def test_many_users_share_a_copy(users: int | None, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes for each of them, a copied layer serves all; without a number, as many as may run (4)."""
    monkeypatch.setattr("octavo.backends.cpu.rates", lambda: Rates(1e12, 1e9))
    graph, weights = tiny_graph("llama")
    whole = backend_with(1 << 40).sizes(graph, weights, LIMITS)
    room = whole.weight_bytes + whole.workspace_bytes + whole.cache.sequence_bytes(64, 16, 512) - 1
    device = RatedDevice(torch.device("cpu"), torch.float32, usable=room, link=1e8)
    config = EngineConfig(max_model_len=64, gpu_offload_users=users)
    sizes = SplitBackend(device, get_backend("cpu"), config).sizes(graph, weights, LIMITS)
    assert isinstance(sizes, SplitSizes)
    count = "a prompt" if users == 1 else f"{users or LIMITS.max_num_seqs} prompts"
    assert sizes.reason.startswith(count)
    assert bool(sizes.placement.streamed_layers) == streams, sizes.reason


def test_the_answers_of_streamed_layers(model: str) -> None:
    options = {**OPTIONS, "kv_cache_memory": 40 << 10, "backend": "torch:cpu"}
    with LLM(model, **options) as llm:
        expected = answers(llm)
    with LLM(model, gpu_layers=0, gpu_offload="stream", **options) as llm:
        assert answers(llm) == expected
        assert llm._session.model().executor._weights.streamed is not None
    planned = octavo_here(
        "plan", model, "--ctx", "64", "--backend", "torch:cpu", "--gpu-layers=0", "--gpu-offload=stream"
    )
    assert planned.returncode == 0, planned.stderr
    assert "2 are copied there in each step" in " ".join(planned.stdout.split())


def test_layers_that_share_a_cache_stay_together() -> None:
    graph = four_layers()
    assert possible_layers(graph) == [0, 4]
    assert best_placement(graph, lambda p: p.device_layers <= 3) == Placement(4, 0)
    with pytest.raises(UsageError, match="gpu_layers is 2, but layers of this model share a cache there; give 0 or 4"):
        backend_with(1 << 40, gpu_layers=2).sizes(graph, {}, LIMITS)


def test_each_part_of_the_cache_finds_room() -> None:
    graph, weights = tiny_graph("llama")
    sizes = backend_with(1 << 40, gpu_layers=1).sizes(graph, weights, LIMITS)
    assert isinstance(sizes, SplitSizes)
    on_device, whole = sizes.on(device=True).cache.block_token_bytes, sizes.cache.block_token_bytes
    assert cache_room(sizes, on_device * 10, 1 << 30) == whole * 10
    assert cache_room(sizes, 1 << 30, (whole - on_device) * 7) == whole * 7
    assert cache_room(sizes, -5, 1 << 30) == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gpu_layers": -1}, "gpu_layers is -1; it must be 0 or more layers, or auto"),
        ({"gpu_layers": "all"}, "gpu_layers is 'all'; it must be 0 or more layers"),
        ({"gpu_layers": True}, "gpu_layers is True; it must be"),
        ({"gpu_memory": 0}, "gpu_memory is 0; write a fraction of the GPU's memory above 0 and up to 1, or a size"),
        ({"gpu_memory": "0"}, "gpu_memory is '0'; write a fraction"),
        ({"gpu_memory": -0.5}, "gpu_memory is -0.5; write"),
        ({"gpu_memory": "nan"}, "gpu_memory is 'nan'; write"),
        (
            {"gpu_memory": "lots"},
            "gpu_memory is 'lots'; write a fraction of the GPU's memory above 0 and up to 1, or a size",
        ),
        ({"gpu_offload": "disk"}, "gpu_offload is 'disk'; it must be auto, cpu or stream"),
        (
            {"device": "cpu", "gpu_offload": "stream"},
            "gpu_offload needs a GPU, but with device cpu everything runs on the CPU",
        ),
        ({"device": "tpu"}, "device is 'tpu'; it must be cpu, cuda, or one of several GPUs, such as cuda:1"),
        ({"device": "cuda", "backend": "cpu"}, "device cuda and backend cpu both select where to compute"),
        ({"device": "cpu", "gpu_layers": 2}, "gpu_layers needs a GPU, but with device cpu everything runs on the CPU"),
        (
            {"device": "cuda", "tensor_parallel_size": 2, "gpu_layers": 3},
            "work only with a single process; ranks run all",
        ),
        (
            {"backend": "cpu", "gpu_memory": 0.5},
            "gpu_memory needs a GPU, but with backend cpu everything runs on the CPU",
        ),
        (
            {"tensor_parallel_size": 2, "gpu_layers": 1},
            "gpu_layers needs a GPU, but with several processes everything runs on the CPU",
        ),
        ({"data_parallel_size": 2, "device": "cuda"}, "several replicas run on the cpu, not on cuda"),
    ],
)
def test_wrong_options(options: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        EngineConfig(**options)


@pytest.mark.parametrize("command", ["run", "serve", "bench latency", "plan"])
@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--gpu-layers", "-1", "--gpu-layers is '-1'; it must be 0 or more layers, or auto"),
        ("--gpu-layers", "abc", "--gpu-layers is 'abc'; it must be 0 or more layers, or auto"),
        ("--gpu-layers", "2", "torch finds no usable GPU"),
        ("--gpu-layers", "3", "--gpu-layers is 3, but the model has only 2 layers; give at most 2, or auto"),
        ("--gpu-memory", "-1", "--gpu-memory is '-1'; write a fraction of the GPU's memory above 0"),
        ("--gpu-memory", "abc", "--gpu-memory is 'abc'; write a fraction of the GPU's memory above 0"),
        ("--device", "abc", "--device is 'abc'; it must be cpu, cuda, or one of several GPUs, such as cuda:1"),
        ("--device", "cuda", "the device cuda does not exist"),
    ],
)
def test_wrong_options_of_commands_are_one_line(command: str, option: str, value: str, reason: str, model: str) -> None:
    if torch.cuda.is_available() and "there" in reason:
        pytest.skip("there is a GPU")
    place = ["--backend", "torch:cpu"] if value == "3" else []
    more = {"run": ["a prompt"], "serve": ["--port", "0"]}.get(command, [])
    ended = octavo_here(*command.split(), model, *more, option, value, *place)
    assert ended.returncode == 2, ended.stderr
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("octavo: ")]
    assert reason in line
    assert line == ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert not ended.stdout


def test_options_for_a_gpu_that_is_not_there() -> None:
    for options in ({"gpu_layers": 3}, {"gpu_memory": "1GiB"}):
        name, value = next(iter(options.items()))
        with pytest.raises(UsageError, match=f"{name} {value}: torch finds no usable GPU"):
            backend_of(EngineConfig(**options))
    with pytest.raises(UsageError, match="the device cuda does not exist"):
        backend_of(EngineConfig(device="cuda"))


def test_a_rank_keeps_to_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SmallDevice(torch.device("cpu"), torch.float32, usable=3 << 30)
    monkeypatch.setattr(devices, "get_backend", lambda name: device if name.startswith("torch") else get_backend(name))

    def room(held_bytes: int = 0, **options: Any) -> int:
        config = EngineConfig(device="cuda", tensor_parallel_size=2, **options)
        return memory_of_rank(config, held_bytes=held_bytes).usable_bytes >> 20

    assert room() == room(1 << 30) == 3 << 10  # the free memory, without what the weights have taken
    assert room(gpu_memory="2GiB") == 2 << 10
    assert room(1 << 30, gpu_memory="2GiB") == 1 << 10
    assert room(3 << 30, gpu_memory="2GiB") == 0
    assert room(gpu_memory=0.5) == device.total_memory() // 2 >> 20
    with pytest.raises(UsageError, match=r"gpu_memory is 4GiB, but only 3\.33 GiB of the GPU's memory are free"):
        room(gpu_memory="4GiB")


def test_more_than_there_is() -> None:
    graph, weights = tiny_graph("llama")
    count = len(layer_borders(graph))
    with pytest.raises(UsageError, match=f"gpu_layers is {count + 1}, but the model has only {count} layers"):
        backend_with(1 << 40, gpu_layers=count + 1).sizes(graph, weights, LIMITS)
    with pytest.raises(InsufficientMemoryError, match=rf"gpu_layers {count}: .* need 0\.\d+ GiB .* give auto \(0 of"):
        backend_with(1, gpu_layers=count).sizes(graph, weights, LIMITS)
    with pytest.raises(UsageError, match=r"gpu_memory is 4GiB, but only 3\.33 GiB of the GPU's memory are free"):
        backend_with(3 << 30, gpu_memory="4GiB").sizes(graph, weights, LIMITS)
    # What is loaded counts, not what is free beside it.
    loaded = backend_with(700 << 20, gpu_memory="1000MiB")
    assert loaded.left_on_device(400 << 20, 100 << 20) == 500 << 20
    assert backend_with(1 << 30).left_on_device(400 << 20, 100 << 20) == (1 << 30) - (100 << 20)
    assert backend_with(1 << 30, gpu_memory="512MiB").device_limit().usable_bytes == 512 << 20


def test_the_default_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("octavo.backends._GPU_DRIVERS", (str(tmp_path),))
    default_backend.cache_clear()
    assert backend_name(EngineConfig()) == "cpu"  # torch finds none
    default_backend.cache_clear()
    monkeypatch.setattr(TorchBackend, "finds_gpu", True)
    assert backend_name(EngineConfig()) == "torch"
    assert backend_name(EngineConfig(device="cpu")) == "cpu"
    assert backend_name(EngineConfig(tensor_parallel_size=2)) == "cpu"
    assert isinstance(backend_of(EngineConfig()), SplitBackend)
    monkeypatch.setattr(TorchBackend, "uses_main_memory", False)
    assert step_tokens(EngineConfig()) == 2048
    assert step_tokens(EngineConfig(device="cpu")) == 512
    assert step_tokens(EngineConfig(max_num_seqs=3000)) == 3000
    assert step_tokens(EngineConfig(max_num_batched_tokens=64)) == 64
    default_backend.cache_clear()


def test_torch_is_not_imported_without_the_driver_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.backends._GPU_DRIVERS", ())
    monkeypatch.setitem(sys.modules, "torch", None)
    default_backend.cache_clear()
    assert default_backend() == "cpu"
    default_backend.cache_clear()
