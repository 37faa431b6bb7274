"""EAGLE-3 heads as sources of drafts: their numpy meaning, the taps of the model, and the answers without them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM
from octavo.backends import ExecutorLimits, get_backend, reference
from octavo.distributed.ranks import Ranks, rank_graph
from octavo.engine.loading.model_graph import model_graph
from octavo.engine.speculation.draft_source import Draft
from octavo.engine.speculation.eagle_drafter import EagleDrafter
from octavo.engine.speculation.head_drafter import HeadDrafter
from octavo.engine.speculation.policy import DraftPolicy
from octavo.errors import GraphError, ModelLoadError, UsageError
from octavo.graph.taps import with_tap
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.eagle_head import open_eagle_head
from octavo.models._eagle3 import eagle3_graph
from octavo.sampling_params import SamplingParams
from tests.support.batches import Request, step
from tests.support.drafting import AnyPolicy
from tests.support.late_steps import on_late_device
from tests.support.text_models import TEXTS, save_byte_level_tokenizer
from tests.support.tiny_eagle import TinyEagle, agreeing_eagle, random_eagle
from tests.support.tiny_models import tiny_model

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=1)
SEEDED = replace(GREEDY, temperature=0.7, seed=3, n=2, max_tokens=12)
PROMPTS = [TEXTS[0], TEXTS[4], TEXTS[0] + TEXTS[1]]
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 160, "max_num_seqs": 4, "pack_cache": False}
TOKENS = np.random.default_rng(0).integers(0, 96, 20).tolist()


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and rows cost nothing: so many of them are made as there is room for."""
    monkeypatch.setattr(HeadDrafter, "pays", lambda *_: True)
    monkeypatch.setattr(HeadDrafter, "_cost", lambda *_: 0.0)
    monkeypatch.setattr(DraftPolicy, "lengths", AnyPolicy(1, least=5).lengths)


def six_layers(name: str = "llama", *, is_memoryless: bool = False, **options: Any) -> Any:
    """A tiny model. is_memoryless: its next token follows from the last one alone."""
    model = tiny_model(name, num_hidden_layers=6, max_position_embeddings=160, **options)
    if is_memoryless:
        with torch.no_grad():
            for parameter, values in model.named_parameters():
                if parameter.endswith(("o_proj.weight", "down_proj.weight")):
                    values.zero_()
    return model


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return save_byte_level_tokenizer(directory)


def answers(llm: LLM) -> list[Any]:
    return [output.outputs for each in (GREEDY, SEEDED, GREEDY) for output in llm.generate(PROMPTS, each)]


@pytest.mark.parametrize(
    ("is_of_speculators", "norms_residual"), [(False, False), (False, True), (True, True)], ids=str
)
def test_the_numpy_meaning(is_of_speculators: bool, norms_residual: bool, tmp_path: Path) -> None:
    """A prompt in two steps from the model's hidden states, then two guesses from the head's own."""
    model = six_layers()
    head = random_eagle(model, norms_residual=norms_residual)
    folder = head.save(tmp_path / "head", is_of_speculators=is_of_speculators)
    with closing(open_checkpoint(save(model, tmp_path / "model"))) as target:
        opened = open_eagle_head(folder, target)
        assert opened.config.taps == (2, 3, 3)
        assert opened.target_ids is not None
        np.testing.assert_array_equal(opened.target_ids, head.target_ids)
        graph = eagle3_graph(opened.config, opened.checkpoint.weights.shapes, opened.output_head)
        weights = opened.checkpoint.weights
        executor = reference.compile(graph, weights, ExecutorLimits(64, 4, 64, 64), dtype="float64")
        executor.allocate_cache(8, 4)
        request, cache = Request([*TOKENS], [5, 0, 1, 3, 2, 6]), [np.zeros((0, 2, 16)), np.zeros((0, 2, 16))]
        rng, width = np.random.default_rng(1), model.config.hidden_size
        own = np.zeros((13, width))
        for begin, end, is_own in ((0, 13, False), (13, 18, False), (18, 19, True), (19, 20, True)):
            of_model = np.zeros((end - begin, 3 * width)) if is_own else rng.normal(size=(end - begin, 3 * width))
            given = own[-1:] if is_own else np.zeros((end - begin, width))
            batch = step([(request, end - begin)])
            batch.inputs = of_model, given
            batch.hidden_indices = batch.logits_indices
            output = executor.submit(batch).wait()
            logits, own = head.steps(TOKENS[begin:end], of_model, given, begin, cache)
            assert output.logits is not None
            assert output.taps is not None
            np.testing.assert_allclose(output.logits, logits, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(output.taps, own, rtol=1e-3, atol=1e-3)
        opened.checkpoint.close()


@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon", "qwen3moe"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "torch:cpu"])
def test_taps_are_the_hidden_states_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    last = model.config.num_hidden_layers
    with torch.no_grad():
        found = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    layers = [0, 1, last - 1]
    expected = np.concatenate([found[layer][0].numpy() for layer in layers], axis=1)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        plain = model_graph(checkpoint, 64)
        graph, limits = with_tap(plain, layers), ExecutorLimits(64, 4, 64, 64)
        outputs = []
        for each in (plain, graph):
            compiled = get_backend(backend).compile(each, checkpoint.weights, limits)
            compiled.allocate_cache(32 * len(plain.cache_layout.groups), 16)
            batch = step([(Request(TOKENS, [5, 0]), 20)], block_size=16, num_groups=len(plain.cache_layout.groups))
            batch.hidden_indices, batch.logits_indices = np.arange(3, 20, dtype=np.int32), batch.logits_indices[-1:]
            outputs.append(compiled.submit(batch).wait())
            compiled.close()
    assert outputs[0].taps is None
    assert outputs[1].taps is not None
    np.testing.assert_allclose(outputs[1].taps, expected[3:], rtol=0.02, atol=0.02 * float(np.abs(expected).max()))
    np.testing.assert_array_equal(outputs[1].logits, outputs[0].logits)
    np.testing.assert_array_equal(outputs[1].hidden_states, outputs[0].hidden_states)


def test_layers_that_are_not_there(tmp_path: Path) -> None:
    six_layers().save_pretrained(tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        graph = model_graph(checkpoint, 64)
        assert with_tap(graph, (1, 2, 6)).tap is not None  # the last one's output
        for layer in (-1, 7):
            with pytest.raises(GraphError, match=f"there is no layer {layer} to tap: the model has 6"):
                with_tap(graph, (1, 2, layer))


@pytest.mark.parametrize("agrees", [True, False], ids=["right", "random"])
@pytest.mark.parametrize("method", ["eagle3", "draft_model option"])
def test_the_answers_are_those_without_it(agrees: bool, method: str, tmp_path: Path) -> None:
    model = six_layers(is_memoryless=agrees)
    folder = str((agreeing_eagle if agrees else random_eagle)(model).save(tmp_path / "head"))
    target = str(save(model, tmp_path / "model"))
    options = {**OPTIONS, "max_num_batched_tokens": 32}
    with LLM(target, speculation="off", **options) as llm:
        expected = answers(llm)
    chosen: dict[str, Any] = {"speculative_config": {"method": "eagle3", "model": folder}}
    if method != "eagle3":
        chosen = {"draft_model": folder}
    with LLM(target, **chosen, **options) as llm:
        assert [output.outputs for output in llm.generate(PROMPTS, GREEDY)] == expected[:3]
        if agrees:
            right, drafted = llm.metrics.num_accepted_draft_tokens_total, llm.metrics.num_draft_tokens_total
            assert right["eagle3"] == drafted["eagle3"] > 20
        assert answers(llm) == expected
        assert llm.metrics.num_draft_tokens_total["eagle3"] > 60
        assert llm.metrics.num_prefix_hits_total


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_drafts_are_those_of_the_numpy_meaning(has_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hidden states of transformers' model, and then from its own, in the tokens of the model."""
    model = six_layers()
    head = random_eagle(model, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 5]})
    if has_bias:  # of the hidden states of the model, not of the head's own
        head.tensors["fc.bias"] = 3 * np.random.default_rng(2).normal(size=model.config.hidden_size).astype(np.float32)
    seen: list[tuple[list[int], Draft]] = []
    plain = EagleDrafter.draft

    def recorded(self: EagleDrafter, wanted: Any, num_rows: int) -> Any:
        found = plain(self, wanted, num_rows)
        seen.extend((list(sequence.token_ids), draft) for sequence, draft in found.items())
        return found

    monkeypatch.setattr(EagleDrafter, "draft", recorded)
    config = {"method": "eagle3", "model": str(head.save(tmp_path / "head")), "num_speculative_tokens": 4}
    with LLM(str(save(model, tmp_path / "model")), speculative_config=config, dtype="float32", **OPTIONS) as llm:
        llm.generate(PROMPTS[2], replace(GREEDY, max_tokens=8))
    assert len(seen) >= 4
    num_alike = 0
    for tokens, draft in seen:
        num_alike += draft.token_ids == numpy_draft(model, head, tokens, len(draft.token_ids))
    assert num_alike >= len(seen) - 1  # float16 keys may turn a near tie


def numpy_draft(model: Any, head: TinyEagle, tokens: list[int], count: int) -> list[int]:
    with torch.no_grad():
        states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    of_model = np.concatenate([states[layer][0].double().numpy() for layer in (1, 4)], axis=1)
    last: list[Any] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.no_grad():
        model(torch.tensor([tokens[:-1]]))
    hook.remove()
    of_model = np.concatenate([of_model, last[0][0].double().numpy()], axis=1)
    width = model.config.hidden_size
    cache = [np.zeros((0, 2, 16)), np.zeros((0, 2, 16))]
    logits, own = head.steps(tokens[1:], of_model, np.zeros((len(tokens) - 1, width)), 0, cache)
    found: list[int] = []
    while True:
        found.append(int(head.target_ids[logits[-1].argmax()]))
        if len(found) == count:
            return found
        start = len(tokens) + len(found) - 2
        logits, own = head.steps(found[-1:], np.zeros((1, 3 * width)), own[-1:], start, cache)


@pytest.mark.parametrize(
    "options", [{"backend": "torch:cpu", "num_threads": 0}, {"backend": "reference"}, {"kv_dtype": "int8"}], ids=str
)
def test_other_backends_and_caches(options: dict[str, Any], tmp_path: Path) -> None:
    model = six_layers(is_memoryless=True)
    folder = str(agreeing_eagle(model).save(tmp_path / "head"))
    target, options, found = str(save(model, tmp_path / "m")), {**OPTIONS, **options}, []
    for speculation in ({"method": "off"}, {"model": folder}):
        with LLM(target, speculative_config=speculation, **options) as llm:
            outputs = [output for each in (GREEDY, SEEDED) for output in llm.generate(PROMPTS, each)]
            found.append([choice.token_ids for output in outputs for choice in output.outputs])
            right = llm.metrics.num_accepted_draft_tokens_total.get("eagle3", 0)
    assert found[0] == found[1]
    assert right > 30


@pytest.mark.parametrize("kind", ["right", "random", "bias"])
def test_two_steps_in_flight_on_torch(kind: str, tmp_path: Path) -> None:
    """The head's tokens become the model's on the device, and its bias is taken off its own hidden states there."""
    model = six_layers(is_memoryless=kind == "right")
    head = (agreeing_eagle if kind == "right" else random_eagle)(model)
    if kind == "bias":
        head.tensors["fc.bias"] = 3 * np.random.default_rng(2).normal(size=model.config.hidden_size).astype(np.float32)
    folder, target = str(head.save(tmp_path / "head")), str(save(model, tmp_path / "m"))
    options = {**OPTIONS, "backend": "torch:cpu", "num_threads": 0}
    with LLM(target, speculation="off", **options) as llm:
        expected = [[choice.token_ids for choice in choices] for choices in answers(llm)]
    config, counts = {"method": "eagle3", "model": folder, "prompt_lookup_min": 16}, []
    for is_late in (False, True):
        with LLM(target, speculative_config=config, **options) as llm:
            executors = on_late_device(llm._session.model().engine) if is_late else ()
            llm.generate(PROMPTS, GREEDY)
            greedy = dict(llm.metrics.num_draft_tokens_total), dict(llm.metrics.num_accepted_draft_tokens_total)
            assert [[choice.token_ids for choice in choices] for choices in answers(llm)] == expected
            metrics = llm.metrics
            right, drafted = (
                each["eagle3"] for each in (metrics.num_accepted_draft_tokens_total, metrics.num_draft_tokens_total)
            )
            counts.append(right / drafted)
    late, draft = executors
    assert late.num_late > 8
    assert draft.num_late > late.num_late
    assert counts[1] == pytest.approx(counts[0], abs=0.12)  # the same guesses, cut at other lengths
    assert kind != "right" or greedy[0] == greedy[1]


@pytest.mark.parametrize(
    "ranks",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 3},
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2, "backend": "torch:cpu"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_answers_of_ranks(ranks: dict[str, Any], tmp_path: Path) -> None:
    """The hidden states of inner layers come from other stages, and whole from the ranks of each."""
    model = six_layers(is_memoryless=True)
    folder, target = str(agreeing_eagle(model).save(tmp_path / "head")), str(save(model, tmp_path / "model"))
    options = {**OPTIONS, "max_num_batched_tokens": 32, **ranks}
    with LLM(target, speculation="off", **options) as llm:
        expected = answers(llm)
    with LLM(target, draft_model=folder, **options) as llm:
        found = answers(llm)
        assert llm.metrics.num_accepted_draft_tokens_total["eagle3"] > 30
    if "backend" in ranks:  # near ties, and other bits
        assert [[c.token_ids for c in each] for each in found] == [[c.token_ids for c in each] for each in expected]
    else:
        assert found == expected


def test_taps_of_ranks_are_those_of_the_whole_model(tmp_path: Path) -> None:
    model = six_layers()
    with closing(open_checkpoint(save(model, tmp_path))) as checkpoint:
        graph = with_tap(model_graph(checkpoint, 64), (2, 3, 3))
        alone = reference.compile(graph, checkpoint.weights, ExecutorLimits(64, 4, 64, 64))
        alone.allocate_cache(8, 4)
        request = Request([*TOKENS], [5, 0, 1, 3, 2, 6])
        batch = step([(request, len(TOKENS))])
        batch.hidden_indices = np.arange(len(TOKENS), dtype=np.int32)
        expected = alone.submit(batch).wait()
        for ranks in (Ranks(2, 1), Ranks(1, 3), Ranks(2, 2)):
            stages: list[list[Any]] = [[] for _ in range(ranks.pipeline_parallel)]
            for rank in range(ranks.count):
                part = rank_graph(graph, ranks, rank, lambda _: 1)
                executor = reference.compile(part, checkpoint.weights, ExecutorLimits(64, 4, 64, 64))
                executor.allocate_cache(8, 4)
                stages[ranks.stage(rank)].append(executor)
            for output in reference.ReferenceGroup(*stages).run(batch):
                assert output.taps is not None
                assert expected.taps is not None
                np.testing.assert_allclose(output.taps, expected.taps, rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = six_layers()
    target, head = str(save(model, tmp_path / "model")), random_eagle(model)
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "wide": (
            {"fc.weight": np.zeros((64, 96), np.float32)},
            "reads 96 numbers of a token; for this model it must",
        ),
        "map": ({"lm_head.weight": np.zeros((61, 64), np.float32)}, r"d2t is I64 \[60\]; it must be integers, 61"),
        "narrow": (
            {"midlayer.self_attn.q_proj.weight": np.zeros((64, 64), np.float32)},
            "this EAGLE-3 head does not fit .*: layers.6: linear",
        ),
    }
    for name, (tensors, message) in changes.items():
        folder = replace(head, tensors=head.tensors | tensors).save(tmp_path / name)
        with pytest.raises(ModelLoadError, match=message):
            LLM(target, draft_model=str(folder), **OPTIONS)
    folder = replace(head, target_ids=head.target_ids + 50).save(tmp_path / "ids")
    with pytest.raises(
        ModelLoadError, match=r"d2t names token .*; the model has 96: the head belongs to another model"
    ):
        LLM(target, draft_model=str(folder), **OPTIONS)
    keys: dict[str, dict[str, Any]] = {
        "norm_before_fc": {"norm_before_fc": True},
        "num_hidden_layers": {"num_hidden_layers": 2},
    }
    for key, change in keys.items():
        folder = head.save(tmp_path / key)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelLoadError, match=key):
            LLM(target, draft_model=str(folder), **OPTIONS)


def test_tensors_of_a_head_that_are_not_used_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = six_layers()
    target, head = str(save(model, tmp_path / "model")), random_eagle(model)
    more = {"midlayer.self_attn.q_norm.weight": np.ones(16, np.float32)}
    for tensors, expected in (({}, []), (more, ["layers.6.self_attn.q_norm.weight"])):
        caplog.clear()
        folder = replace(head, tensors=head.tensors | tensors).save(tmp_path / f"head{len(tensors)}")
        LLM(target, draft_model=str(folder), **OPTIONS).close()
        found = [record.message for record in caplog.records if "not used" in record.message]
        assert found == [f"{folder}: {len(expected)} tensors are not used: {name}" for name in expected]


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    model = six_layers()
    target = str(save(model, tmp_path / "model"))
    with pytest.raises(UsageError, match=r"method eagle3: .* is not an EAGLE-3 head; choose draft_model"):
        LLM(target, speculative_config={"method": "eagle3", "model": target}, **OPTIONS)
    with pytest.raises(UsageError, match="method eagle3 needs model"):
        LLM(target, speculative_config={"method": "eagle3"}, **OPTIONS)
