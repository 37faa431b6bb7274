"""Requests with adapters in an engine: shared steps, prefixes, names that change their content, slots and memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import LLM, AsyncLLM, LoRARequest, SamplingParams, UsageError
from octavo.adapters.registry import AdapterRegistry
from octavo.errors import ModelLoadError
from tests.support.text_models import save_decoder

OPTIONS = {"num_threads": 1, "max_model_len": 96, "max_num_seqs": 6, "block_size": 16, "kv_cache_memory": 1 << 20}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
PROMPTS = [list(range(20, 60)), [33, 21, 45], list(range(50, 84)), [77]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder with a tokenizer."""
    return save_decoder(tmp_path_factory.mktemp("model"))


def save_adapter(model: Path, folder: Path, seed: int, rank: int = 4, **more: object) -> Path:
    """A PEFT folder with random factors beside all projections of attention."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if "self_attn" in name and weight.ndim == 2:
            stem = "base_model.model." + name.removesuffix(".weight")
            out_features, in_features = weight.shape
            tensors[f"{stem}.lora_A.weight"] = rng.standard_normal((rank, in_features)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = rng.standard_normal((out_features, rank)).astype(np.float32)
            if more.get("use_dora"):
                tensors[f"{stem}.lora_magnitude_vector"] = rng.uniform(0.5, 1.5, out_features).astype(np.float32)
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, **more}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(model, folder / f"a{i}", i, rank=3 + i) for i in range(3)]


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), enable_lora=True, max_loras=2, **OPTIONS) as llm:  # type: ignore[arg-type]
        yield llm


Answer = tuple[list[int], list[float]]


def answers(llm: LLM, prompts: list[list[int]], requests: list[LoRARequest | None]) -> list[Answer]:
    """The tokens and log-probabilities of each prompt with its adapter, all at once."""
    found = []
    for output in llm.generate(prompts, GREEDY, lora_request=requests):
        tokens, logprobs = list(output.outputs[0].token_ids), output.outputs[0].logprobs or []
        found.append((tokens, [entry[token].logprob for entry, token in zip(logprobs, tokens, strict=True)]))
    return found


def test_adapters_share_steps_and_slots(llm: LLM, adapters: list[Path], model: Path) -> None:
    """Three adapters and the base in two slots: each request has the bits of the request alone."""
    wanted = [LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(adapters)]
    requests = [wanted[0], None, wanted[1], wanted[2]]
    together = answers(llm, PROMPTS, requests)
    for prompt, request, expected in zip(PROMPTS, requests, together, strict=True):
        assert answers(llm, [prompt], [request]) == [expected]
    different = answers(llm, [PROMPTS[0]] * 4, [None, *wanted])
    assert len({tuple(tokens) for tokens, _ in different}) == 4
    with LLM(str(model), **OPTIONS) as plain:  # type: ignore[arg-type]
        assert [tokens for tokens, _ in answers(plain, [PROMPTS[0]], [None])] == [different[0][0]]


def test_the_cache_knows_the_content(llm: LLM, adapters: list[Path], model: Path, tmp_path: Path) -> None:
    """A prefix of one adapter is none of another's, and a name whose files have changed answers otherwise at once."""
    request = LoRARequest("sql", 1, save_adapter(model, tmp_path / "sql", 7))
    first, again = (llm.generate([PROMPTS[0]], GREEDY, lora_request=request)[0] for _ in range(2))
    assert again.num_cached_tokens == 32
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    [base] = llm.generate([PROMPTS[0]], GREEDY)
    assert base.num_cached_tokens == 0
    save_adapter(model, tmp_path / "sql", 8)
    [changed] = llm.generate([PROMPTS[0]], GREEDY, lora_request=request)
    assert changed.num_cached_tokens == 0
    assert changed.outputs[0].token_ids != first.outputs[0].token_ids
    # The same content under another name shares the prefix.
    other = LoRARequest("other", 2, save_adapter(model, tmp_path / "other", 8))
    assert llm.generate([PROMPTS[0]], GREEDY, lora_request=other)[0].num_cached_tokens == 32
    nothing = LoRARequest("nothing", 3, adapters[0], scale=0.0)
    [without] = llm.generate([PROMPTS[0]], GREEDY, lora_request=nothing)
    assert (without.num_cached_tokens, without.outputs[0].token_ids) == (32, base.outputs[0].token_ids)


@pytest.mark.usefixtures("keeps_prompts")
def test_kept_prompts_know_their_adapter(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    """After a restart, too, a prompt of one adapter is found by the same content alone, whatever its name."""
    options = {"enable_lora": True, "max_loras": 2, "prompt_cache_dir": str(tmp_path / "kept"), **OPTIONS}
    first, second = LoRARequest("first", 1, adapters[0]), LoRARequest("second", 2, adapters[1])
    renamed = LoRARequest("renamed", 3, adapters[0])

    def restarted(*requests: LoRARequest | None) -> list[tuple[list[int], int]]:
        """The answer to the same prompt for each, and how many of its tokens came from disk."""
        with LLM(str(model), **options) as llm:  # type: ignore[arg-type]
            outputs = [llm.generate([PROMPTS[0]], GREEDY, lora_request=request)[0] for request in requests]
            return [(list(o.outputs[0].token_ids), o.metrics.num_loaded_tokens if o.metrics else -1) for o in outputs]

    [(tokens, loaded)] = restarted(first)
    assert loaded == 0
    [base, other, same] = restarted(None, second, renamed)
    assert (base[1], other[1], same) == (0, 0, (tokens, 32))
    assert len({tuple(each[0]) for each in (base, other, same)}) == 3
    third = LoRARequest("first", 1, adapters[2])  # another content under a name that was there
    [changed, *again] = restarted(third, second, None, first)
    assert changed[1] == 0
    assert again == [(other[0], 32), (base[0], 32), (tokens, 32)]


def test_an_activated_adapter_leaves_the_cache_of_the_base(llm: LLM, model: Path, tmp_path: Path) -> None:
    """Blocks before the invocation are the base's, and the adapter acts from the invocation on."""
    prompt, invocation = list(range(20, 60)), [70, 71, 72]
    activated = save_adapter(model, tmp_path / "activated", 3, alora_invocation_tokens=invocation)
    request = LoRARequest("activated", 1, activated)
    [base] = llm.generate([prompt], GREEDY)
    [without] = llm.generate([prompt], GREEDY, lora_request=request)
    assert without.outputs[0].token_ids == base.outputs[0].token_ids
    assert without.num_cached_tokens == 32
    [acting] = llm.generate([prompt + invocation], GREEDY, lora_request=request)
    [silent] = llm.generate([prompt + invocation], GREEDY)
    assert acting.num_cached_tokens == 32
    assert acting.outputs[0].token_ids != silent.outputs[0].token_ids
    # A longer prompt with the same invocation, and one whose later blocks are the base's.
    [again] = llm.generate([prompt + invocation + prompt], GREEDY, lora_request=request)
    [other] = llm.generate([prompt + invocation + prompt], GREEDY)
    [cached] = llm.generate([prompt + invocation + prompt], GREEDY, lora_request=request)
    assert cached.outputs[0].token_ids == again.outputs[0].token_ids
    assert (again.num_cached_tokens, other.num_cached_tokens, cached.num_cached_tokens) == (32, 32, 80)


def test_an_adapter_that_is_forgotten_while_it_runs(llm: LLM, adapters: list[Path]) -> None:
    llm.add_lora(LoRARequest("a", 1, adapters[0]))
    expected = llm.generate([PROMPTS[1]], GREEDY, adapter="a")[0].outputs[0].token_ids
    assert llm.list_loras() == {"a"}
    with llm.stream(PROMPTS[1], GREEDY, adapter="a") as stream:
        tokens = list(next(stream).outputs[0].token_ids)
        llm.remove_lora("a")
        for path in adapters[1:]:
            llm.generate([PROMPTS[2]], GREEDY, lora_request=LoRARequest("other", 1, path))
        tokens += [token for part in stream for token in part.outputs[0].token_ids]
    assert tokens == list(expected)
    with pytest.raises(UsageError, match="there is no adapter 'a'; this engine has other"):
        llm.generate([PROMPTS[1]], GREEDY, adapter="a")


def test_a_slot_is_used_again_while_a_step_of_an_ended_request_is_under_way(model: Path, adapters: list[Path]) -> None:
    """In a pipeline the other stage may still compute it: neither answer nor cached prefix is of both adapters."""
    first, second = (LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(adapters[:2]))
    options = {"enable_lora": True, "max_loras": 1, "pipeline_parallel_size": 2, **OPTIONS}
    with LLM(str(model), **options) as llm:  # type: ignore[arg-type]
        expected = [answers(llm, [PROMPTS[0][::-1]], [request]) for request in (first, second)]
        for _ in range(4):
            with llm.stream(PROMPTS[0], GREEDY, lora_request=first) as stream:
                next(stream)
            after = [answers(llm, [PROMPTS[0][::-1]], [request]) for request in (second, first)]
            assert after == expected[::-1]


def test_refusals(model: Path, adapters: list[Path], tmp_path: Path) -> None:
    with LLM(str(model), **OPTIONS) as llm, pytest.raises(UsageError, match="load the model with enable_lora"):  # type: ignore[arg-type]
        llm.generate([PROMPTS[0]], GREEDY, adapter="a")
    with LLM(str(model), enable_lora=True, max_lora_rank=4, **OPTIONS) as llm:  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"rank 5 is above max_lora_rank 4; raise it"):
            llm.add_lora(LoRARequest("a", 1, adapters[2]))
        with pytest.raises(ModelLoadError, match="no such file"):
            llm.generate([PROMPTS[0]], GREEDY, lora_request=LoRARequest("a", 1, tmp_path / "nowhere"))
        with pytest.raises(UsageError, match="lora_request must be a LoRARequest"):
            llm.generate([PROMPTS[0]], GREEDY, lora_request="a")
        with pytest.raises(UsageError, match="a word without slashes"):
            llm.add_lora(LoRARequest("../a", 1, adapters[0]))


def test_modules_of_the_options(model: Path, adapters: list[Path]) -> None:
    """`NAME=PATH:SCALE` at the start, without enable_lora."""
    modules = f"one={adapters[0]} half={adapters[0]}:0.01"
    with LLM(str(model), lora_modules=modules, **OPTIONS) as llm:  # type: ignore[arg-type]
        assert llm.list_loras() == {"one", "half"}
        found = {
            name: llm.generate([PROMPTS[0]], GREEDY, adapter=name)[0].outputs[0].token_ids for name in ("one", "half")
        }
        assert found["one"] != found["half"]
    with pytest.raises(UsageError, match="lora_modules has 'one'; write NAME=PATH"):
        LLM(str(model), lora_modules="one", **OPTIONS)  # type: ignore[arg-type]
    with LLM(str(model), lora_modules=modules, default_lora="one", **OPTIONS) as llm:  # type: ignore[arg-type]
        assert llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].token_ids == found["one"]
        assert llm.generate([PROMPTS[0]], GREEDY, adapter="half")[0].outputs[0].token_ids == found["half"]
    with pytest.raises(UsageError, match="default_lora is 'two'; it must be one of lora_modules: one, half"):
        LLM(str(model), lora_modules=modules, default_lora="two", **OPTIONS)  # type: ignore[arg-type]


def test_from_a_loop(model: Path, adapters: list[Path]) -> None:
    llm = AsyncLLM(str(model), enable_lora=True, **OPTIONS)  # type: ignore[arg-type]

    async def answer(request: LoRARequest | None) -> list[int]:
        outputs = [output async for output in llm.generate(PROMPTS[0], GREEDY, lora_request=request)]
        return list(outputs[-1].outputs[0].token_ids)

    async def both() -> list[list[int]]:
        return list(await asyncio.gather(answer(LoRARequest("a", 1, adapters[0])), answer(None)))

    adapted, plain = asyncio.run(both())
    llm.close()
    assert adapted != plain


def test_adapters_leave_the_memory(llm: LLM, adapters: list[Path]) -> None:
    """The least recently used is read again when a request names it."""
    registry = llm._session.adapters
    small = AdapterRegistry(registry._base, registry._executor, registry.limits, max_held=2, max_bytes=1 << 30)
    held = [small.add(f"a{i}", path) for i, path in enumerate(adapters)]
    assert small.get("a2") is held[2]
    assert small.get("a1") is held[1]
    again = small.get("a0")
    assert again is not held[0]
    assert again.adapter.digest == held[0].adapter.digest
    assert list(small.sources) == ["a0", "a1", "a2"]


def test_reading_holds_no_step_up(llm: LLM, adapters: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread reads an adapter, requests of others come to their end."""
    reached, go_on = threading.Event(), threading.Event()
    read = AdapterRegistry._read

    def slow(self: AdapterRegistry, *arguments: object) -> object:
        reached.set()
        assert go_on.wait(30)
        return read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(AdapterRegistry, "_read", slow)
    reader = threading.Thread(target=llm.add_lora, args=(LoRARequest("a", 1, adapters[0]),))
    reader.start()
    assert reached.wait(30)
    assert len(llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].token_ids) == 10
    go_on.set()
    reader.join()
    assert llm.list_loras() == {"a"}


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "torch:cpu"},
        {"backend": "torch:cpu", "gpu_layers": 1},
        {"backend": "reference"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_other_executors(options: dict[str, object], llm: LLM, model: Path, adapters: list[Path]) -> None:
    requests = [LoRARequest("a", 1, adapters[0]), None, LoRARequest("b", 2, adapters[1])]
    expected = [tokens for tokens, _ in answers(llm, PROMPTS[:3], requests)]  # type: ignore[arg-type]
    with LLM(str(model), enable_lora=True, **OPTIONS, **options) as other:  # type: ignore[arg-type]
        assert [tokens for tokens, _ in answers(other, PROMPTS[:3], requests)] == expected  # type: ignore[arg-type]


def test_drafts_change_no_answer_of_an_adapter(llm: LLM, model: Path, adapters: list[Path]) -> None:
    """They are those of the base and of the text; the adapter decides which of them are right."""
    requests = [LoRARequest("a", 1, adapters[0]), LoRARequest("b", 2, adapters[1]), None]
    sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)

    def tokens(engine: LLM) -> list[list[int]]:
        found = engine.generate(PROMPTS[1:4], sampling, lora_request=requests)
        return [list(output.outputs[0].token_ids) for output in found]

    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(str(model), enable_lora=True, speculative_config=drafts, **OPTIONS) as drafting:  # type: ignore[arg-type]
        assert tokens(drafting) == tokens(llm)
        assert drafting.metrics.num_accepted_draft_tokens_total["ngram"] > 0


def test_magnitudes_are_read_once_the_model_is_loaded(llm: LLM, model: Path, tmp_path: Path) -> None:
    """They need the numbers of the model, whose files are closed by then. The answers are those of a start with it."""
    folder = save_adapter(model, tmp_path / "dora", 9, use_dora=True)
    request = LoRARequest("dora", 1, folder)
    later = answers(llm, PROMPTS, [request] * len(PROMPTS))
    options = {"enable_lora": True, "max_loras": 2, "lora_modules": f"dora={folder}", **OPTIONS}
    with LLM(str(model), **options) as started:  # type: ignore[arg-type]
        assert answers(started, PROMPTS, [request] * len(PROMPTS)) == later
