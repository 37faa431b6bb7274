"""A model with random weights in the engine: decode by batch, prompts, many requests, graphs and overlap on and off."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gpu_cases import Case, Figure, Machine, Shapes, WrongResultError
from gpu_products import random_of

from octavo.backends import Executor, ExecutorLimits
from octavo.backends.torch import weights as torch_weights
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.executor import TorchExecutor
from octavo.backends.torch.graphs import CudaReplay
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.pieces import MOST_TOKENS
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.generation_request import GenerationRequest
from octavo.graph.ops.attention import RopeParams
from octavo.models import build_graph
from octavo.models._attention import AttentionConfig
from octavo.models._mlp import MLPConfig
from octavo.models._rope import RopeConfig
from octavo.models.llama import Config
from octavo.outputs import OutputDelta
from octavo.prompt import Prompt
from octavo.quantization.packed import DenseWeight, Weight
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_executor import FakeTokenizer

_SPARE_TOKENS = 48  # more than a sequence generates while other prompts are computed
_BLOCK = 16
_PATTERN = 1 << 20  # random numbers, repeated


class AnyText(FakeTokenizer):
    """A tokenizer for answers that nobody reads."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocab: int) -> None:
        self.vocab_size = vocab

    def token_bytes(self, token_id: int) -> bytes:  # noqa: ARG002
        return b"a"


class RandomWeights(Mapping[str, Weight]):
    """The weights of a model by name; weights of the same shape share host memory."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], type_name: str) -> None:
        self._shapes, self._type = shapes, type_name
        self._made: dict[tuple[int, ...], Weight] = {}
        numbers = np.random.default_rng(0).normal(0, 0.02, _PATTERN).astype(np.float32)
        self._pattern = (numbers.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16

    def __getitem__(self, name: str) -> Weight:
        shape = self._shapes[name]
        is_plain = self._type == "bf16" or name in ("embed_tokens.weight", "lm_head.weight")
        if shape not in self._made:
            if len(shape) == 1:
                self._made[shape] = DenseWeight(np.ones(shape, np.float32))
            elif is_plain:
                self._made[shape] = DenseWeight(np.resize(self._pattern, shape))
            else:
                self._made[shape] = random_of(self._type, (shape[0], shape[1]))
        return self._made[shape]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


@contextmanager
def _packed_once() -> Iterator[None]:
    """Pack weights that share memory only once on the host, and copy each of them to the device."""
    packed: dict[tuple[str, tuple[int, ...]], Planes | None] = {}

    def planes_of(weight: Weight, make: Callable[[Weight], Planes | None] = torch_weights.planes_of) -> Planes | None:
        key = (weight.type_name, weight.shape)
        if key not in packed:
            packed[key] = make(weight)
        return packed[key]

    with patch.object(torch_weights, "planes_of", planes_of):
        yield


def weight_shapes(s: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's weights by name."""
    kv = s.kv_heads * s.head_dim
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (s.vocab, s.hidden)}
    for i in range(s.layers):
        p = f"layers.{i}."
        found |= {p + f"{n}_layernorm.weight": (s.hidden,) for n in ("input", "post_attention")}
        found |= {p + "self_attn.q_proj.weight": (s.heads * s.head_dim, s.hidden)}
        found |= {p + f"self_attn.{n}_proj.weight": (kv, s.hidden) for n in "kv"}
        found |= {p + "self_attn.o_proj.weight": (s.hidden, s.heads * s.head_dim)}
        found |= {p + f"mlp.{n}_proj.weight": (s.intermediate, s.hidden) for n in ("gate", "up")}
        found |= {p + "mlp.down_proj.weight": (s.hidden, s.intermediate)}
    return found | {"norm.weight": (s.hidden,), "lm_head.weight": (s.vocab, s.hidden)}


def config_of(s: Shapes) -> Config:
    frequencies = tuple((500000.0 ** (-np.arange(0, s.head_dim, 2) / s.head_dim)).tolist())
    return Config(
        vocab_size=s.vocab, num_layers=s.layers, hidden_size=s.hidden, num_heads=s.heads, num_kv_heads=s.kv_heads,
        head_dim=s.head_dim, max_position_embeddings=131072, value_dim=s.head_dim, norm_eps=1e-5,
        tie_word_embeddings=False, attention=AttentionConfig((None,) * s.layers),
        rope=RopeConfig(RopeParams(frequencies)), mlp=MLPConfig(s.intermediate),
    )  # fmt: skip


@dataclass(slots=True)
class Model:
    """A loaded model.

    figures: figures about loading it.
    """

    executor: TorchExecutor
    limits: EngineLimits
    shapes: Shapes
    figures: list[Figure] = field(default_factory=list)

    def engine(self) -> Engine:
        return Engine(self.executor, AnyText(self.shapes.vocab), self.limits)

    def floor_s(self, machine: Machine, batch: int) -> float | None:
        """Return the seconds a decode step needs to read its weights and the cache, at the bandwidth of this run."""
        table = self.shapes.vocab * self.shapes.hidden * machine.dtype.itemsize  # of which a row a token is read
        cached = batch * (self.shapes.context + self.shapes.steps / 2) * self.executor.cache_sizes.token_bytes
        read = machine.ceilings.get("read")
        return (self.executor.weight_bytes - table + cached) / read if read else None


def loaded(machine: Machine, type_name: str, place: Callable[..., Executor] | None = None) -> Model:
    """Return the model in this format. Only one is held at a time.

    place: compiles it from graph, weights and limits, for a place other than the whole device; that model is not held.
    """
    found = machine.held.get("model")
    if found is not None and found[0] == type_name and place is None:
        assert isinstance(found[1], Model)
        return found[1]
    if found is not None:
        del machine.held["model"]
        found[1].executor.close()
        del found
    s = machine.shapes
    longest = max(*s.prefills, s.context + s.steps + _SPARE_TOKENS) + _BLOCK
    sequences = max(s.batches)
    graph = build_graph("llama", config_of(s), weight_shapes(s))
    limits = ExecutorLimits(s.step_tokens, sequences, sequences + 4, longest)
    backend = TorchBackend(
        machine.device, machine.dtype, capture=CudaReplay if machine.is_gpu else None, prompt_tokens=MOST_TOKENS
    )
    begin = time.perf_counter()
    with _packed_once():
        executor: Any = (place or backend.compile)(graph, RandomWeights(weight_shapes(s), type_name), limits)
    machine.wait()
    at = time.perf_counter()
    blocks = sequences * -(-(s.context + s.steps + _SPARE_TOKENS) // _BLOCK) + -(-longest // _BLOCK)
    before = torch.cuda.memory_allocated() if machine.is_gpu else 0
    executor.allocate_cache(blocks, _BLOCK)
    machine.wait()
    taken = torch.cuda.memory_allocated() - before if machine.is_gpu else 0
    engine_limits = EngineLimits(
        longest, sequences, s.step_tokens, sequences + 4, _BLOCK, blocks, s.vocab, enable_prefix_caching=False
    )
    figures = [
        Figure("weights", executor.weight_bytes * 1e-9, "GB"),
        Figure("random weights made, packed and copied", at - begin, "s"),
        Figure("cache allocated and graphs captured", time.perf_counter() - at, "s"),
        Figure("memory of cache and graphs", taken * 1e-9, "GB"),
    ]
    model = Model(executor, engine_limits, s, figures)
    if place is None:
        machine.held["model"] = (type_name, model)
    return model


def _prompt(count: int, seed: int, vocab: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(10, vocab, count).tolist()
    return found


def _add(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    engine.add_request(engine.create_request(name, GenerationRequest(prompt=Prompt(prompt), params=params)))


def rounds(engine: Engine) -> Iterator[Counter[str]]:
    """Yield the new tokens of each request, one round of the engine's loop after another."""
    while engine.has_work:
        engine.start()
        outputs = engine.publish()
        engine.prepare()
        engine.finish()
        found: Counter[str] = Counter()
        for output in outputs:
            if not isinstance(output, OutputDelta):
                raise WrongResultError(f"a request failed: {output}")
            found[output.request_id] += len(output.outputs[0].token_ids)
        yield found


def decode_s(model: Model, batch: int) -> float:
    """Return the seconds of a step in which each of `batch` sequences gets a token, including the host's part."""
    engine, s = model.engine(), model.shapes
    for i in range(batch):
        _add(engine, f"r{i}", _prompt(s.context, i, s.vocab), s.steps + _SPARE_TOKENS)
    totals: Counter[str] = Counter()
    begin, end, counted = 0.0, 0.0, 0
    for new in rounds(engine):
        totals += new
        if begin:
            counted, end = counted + new.total(), time.perf_counter()
            if counted >= s.steps * batch:
                break
        elif len(totals) == batch and min(totals.values()) >= 2:
            begin = time.perf_counter()
    for i in range(batch):
        engine.abort(f"r{i}")
    while engine.has_work:
        engine.step()
    if not counted:
        raise WrongResultError(f"no step of {batch} sequences was timed")
    return (end - begin) / (counted / batch)


@contextmanager
def _changed(model: Model, name: str) -> Iterator[None]:
    """Run without graphs, without splitting prompts into pieces, or without queuing steps behind a running one."""
    changes: dict[str, tuple[str, Any]] = {
        "eager": ("_graphs", None), "launched": ("_pieces", None), "no overlap": ("max_in_flight", 1)
    }  # fmt: skip
    with patch.object(model.executor, *changes[name]):
        yield


def _speed(machine: Machine, model: Model, batch: int, seconds: float) -> Figure:
    floor = model.floor_s(machine, batch)
    share = None if floor is None else floor / seconds
    return Figure(f"batch {batch}", batch / seconds, "tokens/s", share)


def decode(machine: Machine, type_name: str) -> list[Figure]:
    """Measure decode steps by batch."""
    model = loaded(machine, type_name)
    found, model.figures = model.figures, []
    for batch in machine.shapes.batches:
        found.append(_speed(machine, model, batch, decode_s(model, batch)))
    return found


def modes(machine: Machine, type_name: str) -> list[Figure]:
    """Measure the gain of graphs with one sequence, and of overlap with 32."""
    model, found = loaded(machine, type_name), []
    many = 32 if machine.is_gpu else 2
    for name, batch in (("eager", 1), ("no overlap", many), ("eager", many)):
        usual = decode_s(model, batch)
        with _changed(model, name):
            without = decode_s(model, batch)
        found += [
            Figure(f"{name}, batch {batch}", batch / without, "tokens/s"),
            Figure(f"default over {name}, batch {batch}", without / usual, "x"),
        ]
    return found


def prompt_s(model: Model, count: int) -> float:
    """Return the seconds from an empty cache to the first token of a prompt, the median of three."""
    times = []
    for seed in range(3):
        engine = model.engine()
        _add(engine, "r", _prompt(count, seed, model.shapes.vocab), 1)
        begin = time.perf_counter()
        for _ in rounds(engine):
            pass
        times.append(time.perf_counter() - begin)
    return sorted(times)[1]


def prompts(machine: Machine, type_name: str) -> list[Figure]:
    """Measure one prompt from an empty cache to its first token."""
    model, s, found = loaded(machine, type_name), machine.shapes, []
    parameters = sum(shape[0] * shape[1] for shape in weight_shapes(s).values() if len(shape) == 2) - s.vocab * s.hidden
    for count in s.prefills:
        seconds = prompt_s(model, count)
        operations = 2.0 * parameters * count + 2.0 * s.heads * s.head_dim * count * count * s.layers
        share = machine.share(operations, "bf16 product", seconds)
        found.append(Figure(f"prompt of {count}", count / seconds, "tokens/s", share))
    return found


def beside(machine: Machine, type_name: str) -> list[Figure]:
    """Measure the first prompt length, launched and in captured pieces, alone and with concurrent streams."""
    model = loaded(machine, type_name)
    count, streams = machine.shapes.prefills[0], 31 if machine.is_gpu else 1
    pieces = prompt_s(model, count)
    usual, longest = _gaps(machine, model, streams, count)
    with _changed(model, "launched"):
        launched = prompt_s(model, count)
        _, waited = _gaps(machine, model, streams, count)
    return [
        Figure(f"prompt of {count}, launched over in pieces", launched / pieces, "x"),
        Figure(f"longest gap of {streams} streams beside it, over a usual step", longest / usual, "x"),
        Figure(f"longest gap of {streams} streams, launched, over a usual step", waited / usual, "x"),
    ]


def _gaps(machine: Machine, model: Model, streams: int, count: int) -> tuple[float, float]:
    """Return the seconds of a usual step of streams, and of their longest gap between tokens while a prompt is
    computed.
    """
    engine, s = model.engine(), model.shapes
    names = [f"r{i}" for i in range(streams)]
    for i, name in enumerate(names):
        _add(engine, name, _prompt(s.context, i, s.vocab), s.steps + _SPARE_TOKENS)
    loop, seen = rounds(engine), Counter[str]()
    while len(seen) < streams:
        seen += next(loop)
    times = [time.perf_counter()]
    for _ in range(8 if machine.is_gpu else 1):
        next(loop)
        times.append(time.perf_counter())
    usual = sorted(b - a for a, b in pairwise(times))[len(times) // 2 - 1]
    _add(engine, "prompt", _prompt(count, 77, s.vocab), 1)
    times, is_done = times[-1:], False
    while not is_done:
        new = next(loop)
        is_done = "prompt" in new
        if any(name in new for name in names):
            times.append(time.perf_counter())
    loop.close()
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return usual, max((b - a for a, b in pairwise(times)), default=usual)


def requests(machine: Machine, type_name: str) -> list[Figure]:
    """Measure many concurrent requests of random lengths."""
    model, s = loaded(machine, type_name), machine.shapes
    engine, rng = model.engine(), np.random.default_rng(7)
    prompt_tokens = 0
    for i in range(s.requests):
        length, answer = int(rng.integers(s.context // 8, s.context)), int(rng.integers(2, s.steps))
        prompt_tokens += length
        _add(engine, f"r{i}", _prompt(length, i, s.vocab), answer)
    begin, answered = time.perf_counter(), 0
    for new in rounds(engine):
        answered += new.total()
    seconds = time.perf_counter() - begin
    return [
        Figure(f"{s.requests} requests, prompts", prompt_tokens / seconds, "tokens/s"),
        Figure(f"{s.requests} requests, answers", answered / seconds, "tokens/s"),
    ]


def repeats(machine: Machine, type_name: str) -> list[Figure]:
    """Compare greedy answers to the same prompt, repeated and without graphs."""
    model, s = loaded(machine, type_name), machine.shapes
    prompt, answers = _prompt(s.context // 2, 3, s.vocab), []

    def answer() -> tuple[int, ...]:
        engine = model.engine()
        _add(engine, "r", prompt, s.steps)
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step():
                assert isinstance(output, OutputDelta)
                tokens += output.outputs[0].token_ids
        return tuple(tokens)

    answers = [answer() for _ in range(20 if machine.is_gpu else 2)]
    with _changed(model, "eager"):
        eager = answer()
    return [
        Figure("different answers of equal runs", len(set(answers)) - 1, "answers"),
        Figure("tokens that differ without graphs", sum(a != b for a, b in zip(answers[0], eager, strict=True)),
               "tokens"),
    ]  # fmt: skip


def profile(machine: Machine, type_name: str) -> list[Figure]:
    """Return the kernels of a decode step by time, which shows where the next gain is."""
    model, s = loaded(machine, type_name), machine.shapes
    found = []
    for batch in (1, 32) if machine.is_gpu else (1,):
        engine = model.engine()
        for i in range(batch):
            _add(engine, f"r{i}", _prompt(s.context, i, s.vocab), s.steps + _SPARE_TOKENS)
        loop, seen = rounds(engine), 0
        while seen < batch:
            seen += len(next(loop))
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA] if machine.is_gpu else [activity.CPU]
        steps = 8 if machine.is_gpu else 1
        machine.wait()
        with torch.profiler.profile(activities=kinds) as profiler:
            begin = time.perf_counter()
            for _ in range(steps):
                next(loop)
            machine.wait()
            wall = time.perf_counter() - begin
        loop.close()
        found += _profiled(profiler, batch, steps, wall, is_gpu=machine.is_gpu)
        for i in range(batch):
            engine.abort(f"r{i}")
        while engine.has_work:
            engine.step()
    return found


def _profiled(profiler: Any, batch: int, steps: int, wall: float, *, is_gpu: bool) -> list[Figure]:
    rows = profiler.key_averages()
    name = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    total = sum(getattr(row, name) for row in rows) * 1e-6
    kernels = sum(row.count for row in rows) / steps
    found = [
        Figure(f"batch {batch}, kernels a step", kernels, "kernels"),
        Figure(f"batch {batch}, time in kernels", total / wall, "of 1"),
    ]
    for row in sorted(rows, key=lambda row: -getattr(row, name))[:12]:
        value = getattr(row, name) / steps
        found.append(
            Figure(f"batch {batch}, {row.key[:60]}, {row.count / steps:.0f} times", value, "microseconds a step")
        )
    return found


def cases_of(type_name: str, *runs: tuple[str, Callable[..., list[Figure]], float]) -> list[Case]:
    return [Case(f"{type_name}: {name}", "models", partial(run, type_name=type_name), s) for name, run, s in runs]


CASES = [
    *cases_of("bf16", ("decode", decode, 75), ("prompts", prompts, 20), ("beside streams", beside, 20),
              ("graphs and overlap", modes, 40), ("kernels of a step", profile, 25), ("many requests", requests, 40),
              ("equal runs", repeats, 25)),
    *cases_of("I4_128_Z", ("decode", decode, 90), ("prompts", prompts, 20), ("kernels of a step", profile, 25)),
    *cases_of("F8_E4M3_128X128", ("decode", decode, 90), ("prompts", prompts, 20)),
    *cases_of("I8_ROW", ("decode", decode, 90), ("prompts", prompts, 20)),
]  # fmt: skip
