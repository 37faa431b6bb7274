"""Gemma 4's assistant as a source of drafts: those of transformers, and the answers without it."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from octavo import LLM
from octavo.backends.cpu.executor import CpuExecutor
from octavo.batch import BlockBytes
from octavo.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.engine.loading.draft_model import assistant_model
from octavo.engine.loading.draft_needs import separate_head_needs
from octavo.engine.loading.model_graph import model_graph
from octavo.engine.schedule import Schedule
from octavo.engine.speculation.assistant_drafter import AssistantDrafter
from octavo.engine.speculation.draft_source import Draft
from octavo.engine.speculation.policy import DraftPolicy
from octavo.errors import ModelLoadError, UsageError
from octavo.loader.checkpoint import open_checkpoint
from octavo.sampling_params import SamplingParams
from tests.support.answers import Answers
from tests.support.batches import Request, step
from tests.support.drafting import AnyPolicy
from tests.support.fake_executor import create_request
from tests.support.integrity import check_integrity
from tests.support.text_models import TEXTS, save_byte_level_tokenizer
from tests.support.tiny_models import tiny_model

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=1)
SEEDED = replace(GREEDY, temperature=0.7, seed=3, n=2, max_tokens=12)
PROMPTS = [TEXTS[0], TEXTS[4], TEXTS[0] + TEXTS[1]]
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 160, "max_num_seqs": 4, "pack_cache": False}
ZEROS = ("o_proj.weight", "down_proj.weight", "per_layer_projection.weight")


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts and rows cost nothing: so many of them are made as there is room for."""
    monkeypatch.setattr(AssistantDrafter, "pays", lambda *_: True)
    monkeypatch.setattr(AssistantDrafter, "_cost", lambda *_: 0.0)
    monkeypatch.setattr(DraftPolicy, "lengths", AnyPolicy(1, least=5).lengths)


def target_model(*, is_memoryless: bool = False, window: int = 64) -> Any:
    """is_memoryless: its next token follows from the last one alone."""
    model = tiny_model("gemma4", sliding_window=window, max_position_embeddings=160)
    if is_memoryless:
        with torch.no_grad():
            for name, values in model.named_parameters():
                if name.endswith(ZEROS):
                    values.zero_()
    return model


def assistant_of(model: Any, **changes: Any) -> Any:
    """A random assistant of two layers. changes: other values of its configuration."""
    torch.manual_seed(5)
    sizes = model.config.to_dict()
    names = ("vocab_size", "num_key_value_heads", "sliding_window", "rope_parameters")
    text = Gemma4TextConfig(
        **{name: sizes[name] for name in names},
        head_dim=16,
        global_head_dim=32,
        num_attention_heads=sizes["num_key_value_heads"] * 2,
        hidden_size=sizes["hidden_size"],
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=160,
    )
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=sizes["hidden_size"], **changes)
    assistant = Gemma4AssistantForCausalLM(config).float().eval()
    assistant.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.normal_(0.0, 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            if parameter.dim() == 1:
                parameter += 1.0
    return assistant


def agreeing(model: Any) -> Any:
    """An assistant that is always right about a memoryless model: it computes the same from the token alone."""
    assistant = assistant_of(model)
    width = model.config.hidden_size
    with torch.no_grad():
        for name, values in assistant.named_parameters():
            if name.endswith(ZEROS):
                values.zero_()
        assistant.pre_projection.weight.copy_(torch.eye(width, 2 * width))
        assistant.model.norm.weight.copy_(model.model.norm.weight)
        assistant.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
    return assistant


def save(model: Any, directory: Path) -> str:
    model.save_pretrained(directory)
    return str(save_byte_level_tokenizer(directory))


def expected_draft(model: Any, assistant: Any, tokens: list[int], count: int) -> list[int]:
    """By transformers, with the keys and values of the tokens before the last."""
    with torch.no_grad():
        outputs = model(
            torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=True
        )
        hidden, last, found = outputs.hidden_states[-1][:, -1:], torch.tensor([tokens[-1:]]), []
        for _ in range(count):
            embedding = model.get_input_embeddings()(last)
            made = assistant(
                inputs_embeds=torch.cat([embedding, hidden], dim=-1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=outputs.shared_kv_states,
            )
            last, hidden = made.logits.argmax(dim=-1), made.last_hidden_state
            found.append(int(last))
    return found


def test_drafts_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_model()
    assistant = assistant_of(model)
    seen: list[tuple[list[int], Draft]] = []
    plain = AssistantDrafter.draft

    def recorded(self: AssistantDrafter, wanted: Any, num_rows: int) -> Any:
        found = plain(self, wanted, num_rows)
        seen.extend((list(sequence.token_ids), draft) for sequence, draft in found.items())
        return found

    monkeypatch.setattr(AssistantDrafter, "draft", recorded)
    config = {"model": save(assistant, tmp_path / "assistant"), "num_speculative_tokens": 4, "prompt_lookup_min": 16}
    with LLM(save(model, tmp_path / "model"), speculative_config=config, dtype="float32", **OPTIONS) as llm:
        llm.generate(PROMPTS[:2], replace(GREEDY, max_tokens=8))
    assert len(seen) >= 8
    assert {len(draft.token_ids) for _, draft in seen} >= {4}
    alike = [
        draft.token_ids == expected_draft(model, assistant, tokens, len(draft.token_ids)) for tokens, draft in seen
    ]
    assert sum(alike) >= len(seen) - 1  # float16 keys may turn a near tie


@pytest.mark.parametrize("window", [5, 64])
@pytest.mark.parametrize("agrees", [True, False], ids=["right", "random"])
def test_the_answers_are_those_without_it(agrees: bool, window: int, tmp_path: Path) -> None:
    model = target_model(is_memoryless=agrees, window=window)
    folder = save(agreeing(model) if agrees else assistant_of(model), tmp_path / "assistant")
    target, options = save(model, tmp_path / "model"), {**OPTIONS, "max_num_batched_tokens": 32}
    config = {"method": "gemma4_mtp", "model": folder, "prompt_lookup_min": 16}

    def answers(llm: LLM) -> list[Any]:
        return [output.outputs for each in (GREEDY, SEEDED, GREEDY) for output in llm.generate(PROMPTS, each)]

    with LLM(target, speculation="off", **options) as llm:
        expected = answers(llm)
    with LLM(target, speculative_config=config, **options) as llm:
        assert [output.outputs for output in llm.generate(PROMPTS, GREEDY)] == expected[:3]
        right, drafted = llm.metrics.num_accepted_draft_tokens_total, llm.metrics.num_draft_tokens_total
        assert drafted["assistant"] > 20
        if agrees:
            assert right["assistant"] == drafted["assistant"]
        assert answers(llm) == expected
        assert llm.metrics.num_prefix_hits_total


@pytest.mark.parametrize(
    "options", [{"backend": "torch:cpu", "num_threads": 0}, {"backend": "reference"}, {"kv_dtype": "int8"}], ids=str
)
def test_other_backends_and_caches(options: dict[str, Any], tmp_path: Path) -> None:
    model = target_model(is_memoryless=True)
    folder, target = save(agreeing(model), tmp_path / "assistant"), save(model, tmp_path / "model")
    options, found = {**OPTIONS, **options}, []
    for speculation in ({"method": "off"}, {"model": folder, "prompt_lookup_min": 16}):
        with LLM(target, speculative_config=speculation, **options) as llm:
            outputs = [output for each in (GREEDY, SEEDED) for output in llm.generate(PROMPTS, each)]
            found.append([choice.token_ids for output in outputs for choice in output.outputs])
            right = llm.metrics.num_accepted_draft_tokens_total.get("assistant", 0)
    assert found[0] == found[1]
    assert right > 30


def test_preemptions_and_aborts(tmp_path: Path) -> None:
    model = target_model(is_memoryless=True, window=5)
    folder, target = save(agreeing(model), tmp_path / "assistant"), save(model, tmp_path / "model")
    prompts = [[5 + (7 * i + j) % 40 for j in range(20 + i)] for i in range(4)]
    found = []
    for config in ({"method": "off"}, {"model": folder, "prompt_lookup_min": 16}):
        loaded = load_engine(EngineConfig(model=target, speculative_config=config, **OPTIONS))
        engine, outputs = loaded.engine, Answers()
        for i, prompt in enumerate(prompts):
            engine.add_request(create_request(engine, str(i), prompt, replace(GREEDY, n=1 + i % 2, seed=i)))
        for at in itertools.count():
            if not engine.has_work:
                break
            outputs.take(engine.step())
            if at in (2, 4):
                engine.admission.preempt(engine.admission.queue.running[-1], Schedule(0, 0, 0))
            if at == 3:
                engine.abort("0")
            check_integrity(engine.scheduler)
        assert engine.metrics.num_preemptions_total == 2
        found.append([[choice.token_ids for choice in outputs[str(i)].outputs] for i in range(1, 4)])  # type: ignore[union-attr]
        right = engine.metrics.num_accepted_draft_tokens_total.get("assistant", 0)
        assert (right > 20) == ("model" in config)
        if loaded.draft_executor is not None:
            loaded.draft_executor.close()
        loaded.executor.close()
    assert found[0] == found[1]


def test_the_cache_is_that_of_the_model(tmp_path: Path) -> None:
    model = target_model()
    folder, target = save(assistant_of(model), tmp_path / "assistant"), save(model, tmp_path / "model")
    with LLM(target, draft_model=folder, **OPTIONS) as llm:
        llm.generate(PROMPTS[0], GREEDY)
        loaded = llm._session.model()
        executor, assistant = cast("CpuExecutor", loaded.executor), cast("CpuExecutor", loaded.draft_executor)
        assert assistant.cache_sizes.block_token_bytes == assistant.cache_sizes.token_bytes == 0
        with pytest.raises(ValueError, match="the cache is allocated already"):
            assistant.borrow_cache(executor)
        with pytest.raises(ValueError, match="the cache is allocated already"):
            executor.borrow_cache(executor)
        moving = step([(Request([1, 2], [0]), 2)], num_groups=len(executor.cache_sizes.layout.groups))
        moving.inputs = (np.zeros((2, 64), np.float32),)
        moving.block_saves = BlockBytes(np.zeros(1, np.int32), np.zeros((1, 8), np.uint8))
        with pytest.raises(ValueError, match="cannot move blocks of a cache that belongs to another program"):
            assistant.submit(moving)
        with pytest.raises(UsageError, match="must be on the same device"):
            assistant.borrow_cache(cast("Any", object()))
        moving.block_saves = None
        executor.close()
        with pytest.raises(RuntimeError, match="the executor is closed"):
            assistant.submit(moving)


def test_a_plan_counts_no_cache(tmp_path: Path) -> None:
    model = target_model()
    folder, target = save(assistant_of(model), tmp_path / "assistant"), save(model, tmp_path / "model")
    with closing(open_checkpoint(Path(target))) as checkpoint:
        needs = separate_head_needs(EngineConfig(model=target), checkpoint, Path(folder), "a", 64)
        assert separate_head_needs(EngineConfig(model=target), checkpoint, Path(target), "b", 64) is None
    assert needs is not None
    assert needs.kv_bytes_per_token == needs.block_token_bytes == 0
    assert needs.weight_bytes > 0


def test_assistants_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = target_model()
    target, folder = save(model, tmp_path / "model"), save(assistant_of(model), tmp_path / "assistant")
    other = save(tiny_model("llama", max_position_embeddings=160), tmp_path / "other")
    with pytest.raises(ModelLoadError, match="this assistant drafts for Gemma 4; the model is llama"):
        LLM(other, draft_model=folder, **OPTIONS)
    config = EngineConfig(model=target, draft_model=folder, tensor_parallel_size=2)
    with closing(open_checkpoint(Path(target))) as checkpoint:
        graph = model_graph(checkpoint, 64)
        with pytest.raises(UsageError, match="run the model on one rank"):
            assistant_model(config, checkpoint, graph, Path(folder), 64)
    path = Path(folder) / "config.json"
    whole = json.loads(path.read_text())
    wrong = {
        "backbone_hidden_size": (whole | {"backbone_hidden_size": 32}, "backbone_hidden_size.*must be 64"),
        "vocab": (whole | {"text_config": whole["text_config"] | {"vocab_size": 95}}, "vocab_size.*must be 96"),
        "heads": (
            whole | {"text_config": whole["text_config"] | {"num_attention_heads": 8}},
            "this assistant does not fit",
        ),
    }
    for changed, problem in wrong.values():
        path.write_text(json.dumps(changed))
        with pytest.raises(ModelLoadError, match=problem):
            LLM(target, draft_model=folder, **OPTIONS)
