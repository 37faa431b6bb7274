"""The answer to a request does not depend on its neighbours, on chunks, on its arrival or on the content of the cache.

Two hundred requests run over a small model with weights of many types, on every instruction set. They arrive at random
moments with shared prefixes, next to other requests that are aborted, with so few blocks that sequences are preempted.
Tokens and the bits of their log-probabilities are compared with those of each request alone in a fresh engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits
from octavo.backends.cpu.compiler import CompileOptions
from octavo.backends.cpu.compiler import compile as compile_graph
from octavo.config import KVDtype
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.models import build_graph, load_architecture
from octavo.models._reading import ConfigReader
from octavo.outputs import OutputDelta
from octavo.quantization.packed import DenseWeight, Weight
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.backends.cpu.conftest import available_isas
from tests.support.fake_executor import FakeTokenizer, create_request
from tests.support.integrity import check_integrity
from tests.support.quantize import quantized

VOCAB_SIZE, WIDTH, HIDDEN, LAYERS = 190, 256, 256, 1
NUM_REQUESTS = 200
MAX_MODEL_LEN = 160
BLOCK_SIZE = 16
TYPES = ("Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_1", "Q2_K", "Q3_K", "Q5_K", "Q4_0", "IQ4_XS", "MXFP4", "Q5_1")
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class Tokenizer(FakeTokenizer):
    vocab_size = VOCAB_SIZE
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    params: SamplingParams


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB_SIZE, WIDTH),
        "lm_head.weight": (VOCAB_SIZE, WIDTH),
        "norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        found |= {f"{name}.{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{name}.self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qo"}
        found |= {f"{name}.self_attn.{part}_proj.weight": (WIDTH // 2, WIDTH) for part in "kv"}
        found |= {f"{name}.mlp.{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
        found[f"{name}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
    return found


def make_weights() -> dict[str, Weight]:
    rng = np.random.default_rng(5)

    def normal(shape: tuple[int, ...]) -> NDArray[np.float32]:
        return rng.normal(0, 1.5 * shape[-1] ** -0.5, shape).astype(np.float32)

    weights: dict[str, Weight] = {}
    for i, (name, shape) in enumerate(shapes().items()):
        if len(shape) == 1:
            weights[name] = DenseWeight(rng.normal(1, 0.1, shape).astype(np.float32))
        else:
            weights[name] = quantized(TYPES[i % len(TYPES)], normal(shape))
    return weights


@dataclass(frozen=True)
class Machine:
    """The instruction set and cache type of an engine."""

    isa: str
    kv_dtype: KVDtype = "float16"


def make_engine(machine: Machine, *, num_blocks: int, max_num_batched_tokens: int, max_num_seqs: int) -> Engine:
    config = load_architecture("llama").Config.from_hf(ConfigReader(CONFIG))
    graph = build_graph("llama", config, shapes())
    limits = ExecutorLimits(max_num_batched_tokens, max_num_seqs, max_num_seqs, MAX_MODEL_LEN)
    executor = compile_graph(
        graph,
        make_weights(),
        limits,
        num_threads=2,
        kv_dtype=machine.kv_dtype,
        options=CompileOptions(isa=machine.isa),
    )
    executor.allocate_cache(num_blocks, BLOCK_SIZE)
    bounds = (MAX_MODEL_LEN, max_num_seqs, max_num_batched_tokens, max_num_seqs, BLOCK_SIZE, num_blocks, VOCAB_SIZE)
    return Engine(executor, Tokenizer(), EngineLimits(*bounds))


def make_cases() -> list[Case]:
    """Prompts of 1 to 90 tokens, half of them with one of three beginnings; greedy and sampled."""
    rng = random.Random(11)
    beginnings = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (16, 33, 70)]
    cases = []
    for i in range(NUM_REQUESTS):
        prompt = list(rng.choice(beginnings)) if i % 2 else []
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            seed=i,
            max_tokens=rng.randrange(1, 20),
            ignore_eos=True,
            logprobs=2,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        cases.append(Case(prompt, params))
    return cases


Answer = list[tuple[int, dict[int, float]]]


def answer_of(output: OutputDelta) -> Answer:
    """Tokens, each with the log-probabilities that were reported there."""
    [choice] = output.outputs
    assert choice.logprobs is not None
    return [
        (token_id, {other: entry.logprob for other, entry in entries.items()})
        for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True)
    ]


def alone(machine: Machine, cases: list[Case]) -> list[Answer]:
    """One request after the other, whole prompts, no prefix shared through the cache."""
    engine = make_engine(machine, num_blocks=16, max_num_batched_tokens=128, max_num_seqs=1)
    answers = []
    for i, case in enumerate(cases):
        engine.add_request(create_request(engine, str(i), case.prompt, case.params, cache_salt=str(i)))
        [output] = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
        assert isinstance(output, OutputDelta)
        answers.append(answer_of(output))
    return answers


def together(machine: Machine, cases: list[Case], seed: int) -> tuple[list[Answer], Engine]:
    """Requests in random order at random moments, in chunks, with too few blocks and next to aborted requests."""
    rng = random.Random(seed)
    engine = make_engine(machine, num_blocks=16, max_num_batched_tokens=rng.choice([9, 24, 50]), max_num_seqs=8)
    waiting = rng.sample(range(len(cases)), len(cases))
    strangers: list[str] = []
    found: dict[str, Answer] = {}
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                i = waiting.pop()
                engine.add_request(create_request(engine, str(i), cases[i].prompt, cases[i].params))
        if rng.random() < 0.1:
            strangers.append(f"stranger {len(strangers)}")
            engine.add_request(create_request(engine, strangers[-1], rng.choice(cases).prompt, cases[0].params))
        if strangers and rng.random() < 0.1:
            engine.abort(strangers.pop())
        for output in engine.step():
            assert isinstance(output, OutputDelta)
            if not output.request_id.startswith("stranger"):
                found[output.request_id] = answer_of(output)
        check_integrity(engine.scheduler)
    return [found[str(i)] for i in range(len(cases))], engine


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make_cases()


@pytest.fixture(scope="module")
def expected(cases: list[Case]) -> dict[str, list[Answer]]:
    """By the widest instruction set but that of AMX, and the same for all; AMX has products of its own."""
    others, amx = [isa for isa in available_isas() if isa != "amx"], "amx" in available_isas()
    same = alone(Machine(others[-1]), cases)
    return dict.fromkeys(others, same) | ({"amx": alone(Machine("amx"), cases)} if amx else {})


def test_an_answer_does_not_depend_on_its_company(
    isa: str, cases: list[Case], expected: dict[str, list[Answer]]
) -> None:
    answers, engine = together(Machine(isa), cases, seed=len(isa))
    assert engine.metrics.num_preemptions_total > 0
    assert [i for i in range(len(cases)) if answers[i] != expected[isa][i]] == []


def test_an_int8_cache_keeps_answers_apart_too(cases: list[Case]) -> None:
    machine = Machine(available_isas()[-1], "int8")
    few = cases[:80]
    expected = alone(machine, few)
    answers, engine = together(machine, few, seed=5)
    assert engine.metrics.num_preemptions_total > 0
    assert [i for i in range(len(few)) if answers[i] != expected[i]] == []
