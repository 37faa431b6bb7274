"""The commands that load no model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import click
import pytest
import torch
from safetensors.numpy import load_file

from octavo import LLM
from octavo.backends.memory import MemoryBudget
from octavo.cli import plan
from octavo.cli.main import _COMMANDS
from octavo.cli.main import octavo as command_line
from octavo.config import EngineConfig
from octavo.distributed.executor import GroupExecutor
from octavo.engine.loading.cache_plan import plan_cache
from octavo.engine.loading.draft_needs import DraftNeeds
from octavo.engine.loading.memory_needs import MemoryNeeds, memory_needs
from octavo.errors import InsufficientMemoryError
from octavo.graph.cache import CacheSizes, cache_layout
from octavo.loader.checkpoint import open_checkpoint
from tests.support import converted_gguf, tiny_models
from tests.support.processes import octavo, octavo_here
from tests.support.text_models import save_byte_level_tokenizer
from tests.support.tiny_eagle import random_eagle
from tests.support.tiny_gguf import tiny_gguf, wide_gguf
from tests.support.tiny_heads import tiny_head


def test_show(smollm2_path: Path) -> None:
    text = octavo_here("show", "smollm2").stdout
    for fact in (
        "llama (gguf)",
        "134,515,008",
        "8,192 tokens",
        "apache-2.0",
        "Q4_1",
        "Q8_0",
        "chat template  yes",
        "temperature 0.2, top_p 0.9",
    ):
        assert fact in text
    facts = json.loads(octavo_here("show", smollm2_path, "--json").stdout)
    assert facts["file_bytes"] == os.path.getsize(smollm2_path)
    assert facts["formats"]["Q4_1"] == {"weights": 106_168_320, "bytes": 106_168_320 // 32 * 20}
    assert facts["has_chat_template"] is True
    assert facts["context_length"] == 8192


def test_show_names_what_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    text = octavo_here("show", path).stdout
    assert "chat template  no" in text
    assert "not stated" in text


@pytest.mark.parametrize("command", ["show", "plan"])
def test_models_that_are_none(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "strange.gguf").write_bytes(tiny_gguf({"general.architecture": "lama"}))
    for name, words in (("empty.gguf", "empty.gguf"), ("strange.gguf", "'lama'"), ("missing.gguf", "missing.gguf")):
        result = octavo_here(command, tmp_path / name)
        assert result.returncode == 3
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_plan(smollm2_path: Path) -> None:
    result = octavo_here("plan", "smollm2", "--ctx", "2048", "--users", "4", "--json")
    assert result.returncode == 0
    needs = json.loads(result.stdout)
    assert needs["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert needs["kv_bytes"] == 4 * 2048 * needs["kv_bytes_per_token"]
    assert needs["total_bytes"] == needs["weight_bytes"] + needs["workspace_bytes"] + needs["kv_bytes"]
    assert needs["fits"] is True
    assert needs["largest_context"] == 8192
    assert needs["weight_bytes"] / 4 < needs["bytes_read_per_token"] - 2048 * needs["kv_bytes_per_token"]
    assert needs["flops_per_token"] == pytest.approx(2 * 134.5e6 + 30 * 2048 * 9 * (4 * 64 + 5), rel=0.02)
    text = octavo_here("plan", smollm2_path, "--ctx", "2048").stdout
    assert "2,048 tokens" in text
    assert "GFLOP at 2,048 tokens of context" in text


def test_plan_names_a_draft_model_with_its_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its price is read from its header, whatever its name says."""
    path, draft = tmp_path / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", tmp_path / "draft.gguf"
    path.write_bytes(wide_gguf(4))
    draft.write_bytes(tiny_gguf())
    found = json.loads(octavo_here("plan", path, "--json").stdout)["draft_model"]
    assert found == {"model": "qwen2.5-coder:0.5b"}  # the hub is not asked in tests
    assert "-md qwen2.5-coder:0.5b: no estimate" in octavo_here("plan", path).stdout
    monkeypatch.setattr(plan, "draft_for", lambda _: str(draft))
    with closing(open_checkpoint(path)) as checkpoint:
        needs = plan._suggestion(EngineConfig(), checkpoint, str(path), 64)
    assert isinstance(needs, DraftNeeds)
    assert needs.num_parameters < 10_000
    assert needs.weight_bytes < 100_000
    assert needs.cost < 0.01
    assert needs.gain == pytest.approx(3.28, abs=0.02)
    assert f"-md {draft}: " in plan._draft_facts(needs)
    assert plan._suggestion_facts(cast(MemoryNeeds, SimpleNamespace(draft=None)), needs)


def test_plan_counts_a_draft_model(tmp_path: Path) -> None:
    path, draft = tmp_path / "large.gguf", tmp_path / "small.gguf"
    path.write_bytes(wide_gguf(4))
    draft.write_bytes(tiny_gguf())
    options = ("--ctx", "32", "--users", "3", "--json")
    alone = json.loads(octavo_here("plan", path, *options).stdout)
    both = json.loads(octavo_here("plan", path, "-md", draft, *options).stdout)
    own = both["draft"]
    assert alone["draft"] is None
    assert own["kv_bytes"] == 3 * 32 * own["kv_bytes_per_token"] > 0
    added = own["weight_bytes"] + own["workspace_bytes"] + own["kv_bytes"]
    assert both["total_bytes"] == alone["total_bytes"] + added
    assert both["kv_bytes"] == alone["kv_bytes"]
    assert both["largest_users"] < alone["largest_users"]
    text = octavo_here("plan", path, "-md", draft, "--ctx", "32").stdout
    assert f"-md {draft}" in text.splitlines()[-1]  # the options
    with LLM(str(path), draft_model=str(draft), max_model_len=32, kv_cache_memory=1 << 20, num_threads=1) as llm:
        loaded = llm._session.model()
        assert loaded.draft_executor is not None
        assert loaded.draft_executor.weight_bytes == own["weight_bytes"]
        assert loaded.draft_executor.cache_sizes.token_bytes == own["kv_bytes_per_token"]


def test_plan_counts_the_head_of_a_model(tmp_path: Path) -> None:
    path = save_byte_level_tokenizer(tiny_head("glm4moe", max_position_embeddings=160).save(tmp_path / "model"))
    options = ("--ctx", "32", "--users", "3", "--json")
    plan = json.loads(octavo_here("plan", path, *options).stdout)
    alone = json.loads(octavo_here("plan", path, "--speculation", "ngram", *options).stdout)
    own = plan["draft"]
    assert alone["draft"] is None
    assert own["weight_bytes"] < 4 * (own["num_parameters"] - 96 * 64)  # it has the model's embedding and output head
    assert plan["total_bytes"] == alone["total_bytes"] + own["weight_bytes"] + own["workspace_bytes"] + own["kv_bytes"]
    text = octavo_here("plan", path, "--ctx", "32").stdout
    assert "the model's own head: " in text
    assert "-md" not in text
    with LLM(str(path), max_model_len=32, kv_cache_memory=1 << 20, num_threads=1) as llm:
        loaded = llm._session.model()
        assert loaded.draft_executor is not None
        assert loaded.draft_executor.weight_bytes == own["weight_bytes"]
        assert loaded.draft_executor.cache_sizes.token_bytes == own["kv_bytes_per_token"]


def test_plan_counts_an_eagle_head(tmp_path: Path) -> None:
    model = tiny_models.tiny_model("llama", num_hidden_layers=6, max_position_embeddings=160)
    model.save_pretrained(tmp_path / "model")
    path, head = save_byte_level_tokenizer(tmp_path / "model"), random_eagle(model).save(tmp_path / "head")
    own = json.loads(octavo_here("plan", path, "-md", head, "--ctx", "32", "--json").stdout)["draft"]
    assert own["num_parameters"] > 96 * 64
    assert f"-md {head}: " in octavo_here("plan", path, "-md", head, "--ctx", "32").stdout
    with LLM(str(path), draft_model=str(head), max_model_len=32, kv_cache_memory=1 << 20, num_threads=1) as llm:
        loaded = llm._session.model()
        assert loaded.draft_executor is not None
        assert loaded.draft_executor.weight_bytes == own["weight_bytes"]
        assert loaded.draft_executor.cache_sizes.token_bytes == own["kv_bytes_per_token"]


def test_plan_of_ranks(smollm2_path: Path) -> None:
    options = ("--ctx", "512", "--tensor-parallel-size", "3", "--pipeline-parallel-size", "2")
    whole = json.loads(octavo_here("plan", smollm2_path, "--ctx", "512", "--json").stdout)
    plan = json.loads(octavo_here("plan", smollm2_path, *options, "--json").stdout)
    ranks = plan["ranks"]
    assert [(rank["stage"], rank["part"]) for rank in ranks] == [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]
    # The embedding is also the output head: both stages hold it.
    assert whole["ranks"] == []
    embedding = 49152 * 576
    assert whole["weight_bytes"] < sum(rank["weight_bytes"] for rank in ranks) < whole["weight_bytes"] + 1.2 * embedding
    assert sum(rank["kv_bytes_per_token"] for rank in ranks) == whole["kv_bytes_per_token"]
    assert [rank["handed_on_bytes_per_token"] for rank in ranks] == [0] * 3 + [576 * 4] * 3
    # Two sums for each of 15 layers, and the embedding of the first stage or the logits of the last.
    assert {rank["exchanges"] for rank in ranks} == {31}
    text = octavo_here("plan", smollm2_path, "--ctx", "512", "--tp", "3", "--pp", "2").stdout
    assert "rank 5" in text
    assert "in 31 exchanges per step; passes on 2.2 KiB per token" in text
    # The logits of the last stage, as many as the rank has rows of the output head.
    assert sum(rank["logits_bytes_per_row"] for rank in ranks) == 4 * 49152
    assert [rank["logits_bytes_per_row"] > 0 for rank in ranks] == [True] * 3 + [False] * 3
    assert "64.0 KiB per row of logits that cannot be sampled from the best candidates" in text


@pytest.mark.parametrize("place", ["cpu", "torch:cpu"])
def test_the_plan_of_ranks_is_what_they_take(smollm2_path: Path, place: str) -> None:
    """On the CPU and on a device of torch, as they are once they are loaded."""
    options = ("--ctx", "512", "--tensor-parallel-size", "2", "--backend", place)
    ranks = json.loads(octavo_here("plan", smollm2_path, *options, "--json").stdout)["ranks"]
    places = {"backend": place, "tensor_parallel_size": 2, "max_model_len": 512}
    with LLM(str(smollm2_path), kv_cache_memory="32MiB", **places) as llm:
        executor = llm._session.model().executor
        assert isinstance(executor, GroupExecutor)
        assert executor.weight_bytes == sum(rank["weight_bytes"] for rank in ranks)
        assert executor.own_weight_bytes == ranks[0]["weight_bytes"]
        assert executor.workspace_bytes == pytest.approx(ranks[0]["workspace_bytes"], rel=0.1)
        assert executor.cache_sizes.token_bytes == max(rank["kv_bytes_per_token"] for rank in ranks)


def test_plan_of_whole_experts(tmp_path: Path) -> None:
    model = tiny_models.save_safetensors(tiny_models.tiny_model("mixtral"), tmp_path)
    options = ("--tensor-parallel-size", "3", "--enable-expert-parallel")
    plan = json.loads(octavo_here("plan", model, *options, "--json").stdout)
    assert [rank["experts"] for rank in plan["ranks"]] == [[0, 2], [2, 1], [3, 1]]
    assert "experts 0 to 1" in octavo_here("plan", model, *options).stdout
    refused = octavo_here("plan", model, "--enable-expert-parallel")
    assert refused.returncode != 0
    assert "--tensor-parallel-size is 1" in refused.stderr


def test_plan_of_replicas(smollm2_path: Path) -> None:
    """Each has its share of users and memory."""
    one, two = (
        json.loads(octavo_here("plan", smollm2_path, "--ctx", "512", "--json", *options).stdout)
        for options in (("--users", "3"), ("--users", "6", "--data-parallel-size", "2"))
    )
    assert (one["replicas"], two["replicas"], two["users"]) == (1, 2, 3)
    assert two["total_bytes"] == one["total_bytes"]
    assert two["available_bytes"] == pytest.approx(one["available_bytes"] / 2, rel=0.2)
    text = octavo_here("plan", smollm2_path, "--ctx", "512", "--data-parallel-size", "3").stdout
    assert re.search(r"replicas +3, .* in total", text)


def test_plan_of_an_int8_cache(smollm2_path: Path) -> None:
    """1.9 times the tokens: of 64 numbers a key takes 68 bytes and a value 66."""
    found = {}
    for kv_dtype in ("float16", "int8"):
        options = ("--ctx", "2048", "--kv-dtype", kv_dtype)
        found[kv_dtype] = json.loads(octavo_here("plan", smollm2_path, *options, "--json").stdout)
        assert found[kv_dtype]["kv_dtype"] == kv_dtype
    assert found["int8"]["kv_bytes_per_token"] == 30 * 3 * (68 + 66)
    assert found["float16"]["kv_bytes"] > 1.9 * found["int8"]["kv_bytes"]
    saved = found["float16"]["bytes_read_per_token"] - found["int8"]["bytes_read_per_token"]
    assert saved == pytest.approx(2047 * 30 * 3 * (256 - 134), rel=0.01)
    text = octavo_here("plan", smollm2_path, *options).stdout
    assert "int8" in text
    assert text.rstrip().endswith("--kv-dtype int8")
    refused = octavo_here("plan", smollm2_path, "--kv-dtype", "bfloat16")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "bfloat16" in refused.stderr


def test_the_experts_of_a_mixture(tmp_path: Path) -> None:
    """Tiny Mixtral: a token takes 2 of 4 experts, counted here from the tensors of the file."""
    model = tiny_models.tiny_model("mixtral")
    path = tiny_models.save_safetensors(model, tmp_path)
    shapes = {name: array.size for name, array in load_file(path / "model.safetensors").items()}
    experts = sum(count for name, count in shapes.items() if ".experts." in name)
    assert experts > 0
    facts = json.loads(octavo_here("show", path, "--json").stdout)
    assert facts["num_parameters"] == sum(shapes.values())
    assert facts["num_active_parameters"] == sum(shapes.values()) - experts // 2
    assert facts["experts"]["bytes_read"] == facts["experts"]["num_bytes"] // 2 >= experts
    active = f"{facts['num_active_parameters']:,} used per token (2 of 4 experts)"
    shown, planned = octavo_here("show", path).stdout, octavo_here("plan", path).stdout
    assert active in shown
    assert active in planned
    assert "a token reads" in shown
    assert re.search(r"tokens of context; experts: [\d.]+ KiB of [\d.]+ KiB", planned)
    needs = json.loads(octavo_here("plan", path, "--json").stdout)
    assert {needs[name] == facts[name] for name in ("num_parameters", "num_active_parameters", "experts")} == {True}


def test_a_cache_that_stays_float16_is_said(tmp_path: Path) -> None:
    """Latents are never int8; of layers with large biases in their keys, each is counted."""
    latent = tiny_models.save_safetensors(tiny_models.tiny_model("deepseek3"), tmp_path / "latent")
    model = tiny_models.tiny_model("qwen2")
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias[:] = 1e3
    biased = tiny_models.save_safetensors(model, tmp_path / "biased")
    for path, words in ((latent, "float16"), (biased, "int8 (float16 in 1 of 3 layers)")):
        for command in ("show", "plan"):
            facts = json.loads(octavo_here(command, path, "--kv-dtype", "int8", "--json").stdout)
            assert facts["kv_format"] == words
            assert any("kv_dtype int8 has no effect" in note for note in facts["warnings"]) == (path == latent)
            text = octavo_here(command, path, "--kv-dtype", "int8").stdout
            assert f"{words}, " in text[text.index("KV cache") :].splitlines()[0]
    plain = json.loads(octavo_here("show", latent, "--json").stdout)
    assert (plain["kv_format"], plain["warnings"]) == ("float16", [])


def test_what_does_not_fit_is_exit_code_3(smollm2_path: Path) -> None:
    result = octavo_here("plan", smollm2_path, "--ctx", "100000000", "--users", "4096")
    assert result.returncode == 3
    assert "does not fit" in result.stdout
    assert "would fit" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--ctx", "0"), ("--users", "0"), ("--ctx", "many"), ("--ctx", "99999999999")])
def test_impossible_parameters_are_exit_code_2(smollm2_path: Path, arguments: tuple[str, str]) -> None:
    result = octavo_here("plan", smollm2_path, *arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


def test_a_plan_counts_layers_with_a_window_up_to_it(tmp_path: Path) -> None:
    """Tiny Gemma 3: one global layer and six that see 8 tokens, which compute up to 512 in a step."""
    checkpoint = open_checkpoint(converted_gguf.save_gguf(tiny_models.tiny_model("gemma3"), tmp_path / "gemma3.gguf"))
    config = EngineConfig(max_num_batched_tokens=512)
    needs = {n: memory_needs(checkpoint, n, 2, MemoryBudget(8 << 30), config) for n in (256, 4096, 8192)}
    windows = set(checkpoint.config.attention.windows)
    checkpoint.close()
    (window,) = windows - {None}
    token, layer = needs[256].kv_bytes_per_token, needs[256].kv_bytes_per_token // 7
    assert needs[256].kv_bytes == 2 * 256 * token
    blocks = 4096 // 16 + 6 * (-(-(window + 512 - 2) // 16) + 1)
    assert needs[4096].kv_bytes == 2 * blocks * 16 * layer
    assert needs[8192].kv_bytes - needs[4096].kv_bytes == 2 * 4096 * layer


def test_the_plan_is_what_the_engine_takes(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    needs = memory_needs(checkpoint, 1024, 1, MemoryBudget(8 << 30))
    checkpoint.close()
    with LLM(str(smollm2_path), kv_cache_memory="64MiB") as llm:
        executor = llm._session.model().executor
        assert needs.kv_bytes_per_token == executor.cache_sizes.token_bytes
        assert needs.weight_bytes == executor.weight_bytes
        assert needs.workspace_bytes == pytest.approx(executor.workspace_bytes, rel=0.1)


def test_the_engine_leaves_the_same_memory_free(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    needs = memory_needs(checkpoint, 1024, 1, MemoryBudget(8 << 30))
    checkpoint.close()
    left = needs.available_bytes - needs.weight_bytes - needs.workspace_bytes
    usable = left - needs.headroom_bytes
    sizes = CacheSizes(cache_layout(()), needs.kv_bytes_per_token, needs.kv_bytes_per_token)
    plan_cache(EngineConfig(kv_cache_memory=usable), 1024, sizes, left)
    with pytest.raises(InsufficientMemoryError):
        plan_cache(EngineConfig(kv_cache_memory=usable + 1), 1024, sizes, left)


def test_the_options_of_a_plan_are_taken(smollm2_path: Path) -> None:
    text = octavo_here("plan", smollm2_path, "--ctx", "512", "--users", "2").stdout
    options = text[text.index("--max-model-len") :].split()
    result = octavo_here("run", smollm2_path, "Hi", "--max-tokens", "1", *options)
    assert result.returncode == 0, result.stderr


def test_the_largest_context_shrinks_with_the_users(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    contexts = [memory_needs(checkpoint, None, users, MemoryBudget(1 << 30)).largest_context for users in (1, 8, 64)]
    nothing = memory_needs(checkpoint, None, 1, MemoryBudget(64 << 20))
    checkpoint.close()
    assert contexts == sorted(contexts, reverse=True)
    assert contexts[0] > contexts[-1] > 0
    assert nothing.largest_context == 0
    assert not nothing.fits


def test_the_most_users_of_a_model_with_states_fit(tmp_path: Path) -> None:
    """Each has states of one size whatever its context, beside its blocks."""
    checkpoint = open_checkpoint(tiny_models.save_safetensors(tiny_models.tiny_model("qwen35"), tmp_path))
    config, budget = EngineConfig(max_num_seqs=512, pack_cache=False), MemoryBudget(264 << 20)
    users = memory_needs(checkpoint, 64, 1, budget, config).largest_users
    most, more = (memory_needs(checkpoint, 64, count, budget, config) for count in (users, users + 1))
    one, undrafted = (memory_needs(checkpoint, 64, 1, budget, replace(config, speculation=x)) for x in ("ngram", "off"))
    assert 2 * (one.kv_bytes - undrafted.kv_bytes) == 3 * one.state_bytes  # a seat has two
    checkpoint.close()
    assert most.state_bytes > 0
    assert 1 < users < config.max_num_seqs
    assert (most.fits, more.fits, most.largest_users) == (True, False, users)


def test_doctor() -> None:
    text = octavo_here("doctor").stdout
    for name in ("processor", "kernels", "threads", "memory", "read bandwidth", "models", "dependencies", "problems"):
        assert name in text
    findings = json.loads(octavo_here("doctor", "--json").stdout)
    assert findings["threads"] >= 1
    assert findings["read_bytes_per_s"] > 1e8
    assert findings["problems"] == []
    assert findings["thread_reasons"]
    assert f"torch {findings['torch']}" in " ".join(text.split())
    assert findings["torch"].startswith(metadata.version("torch"))
    assert torch.cuda.is_available() != ("no GPU is used" in findings["torch"])
    assert [line.split(":")[0] for line in findings["kernel_libraries"]] == ["humming", "varlen", "sdpa", "fla"]


def test_doctor_says_why_an_instruction_set_was_chosen() -> None:
    findings = json.loads(octavo("doctor", "--json", env={"OCTAVO_ISA": "scalar"}).stdout)
    assert findings["isa"] == "scalar"
    assert "OCTAVO_ISA=scalar" in findings["isa_reason"] or "widest" in findings["isa_reason"]
    wrong = json.loads(octavo("doctor", "--json", env={"OCTAVO_ISA": "mmx"}).stdout)
    assert "mmx" in wrong["problems"][0]


def test_show_names_the_type_of_products(smollm2_path: Path) -> None:
    from octavo.backends.cpu import _native

    types = {"scalar": "int8", _native.detected_isa(): "bfloat16" if _native.detected_isa() == "amx" else "int8"}
    for isa, products in types.items():
        facts = json.loads(octavo("show", str(smollm2_path), "--json", env={"OCTAVO_ISA": isa}).stdout)
        assert {matrix["products"] for matrix in facts["in_memory"]} == {products}


def test_a_missing_native_library_is_a_problem_with_its_remedy() -> None:
    code = """
import sys
from contextlib import closing
from contextlib import closing
from importlib import metadata
sys.modules["octavo.backends.cpu._native"] = None
from octavo.cli.main import main
main(sys.argv[1:])
"""
    result = subprocess.run([sys.executable, "-c", code, "doctor", "--json"], capture_output=True, text=True)
    assert result.returncode == 0
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem.startswith("the native library cannot be loaded")
    assert problem.endswith("reinstall octavo")
    assert "circular" not in problem


def test_version_and_help() -> None:
    assert octavo("--version").stdout.startswith("octavo 0.")
    help_text = octavo_here("--help").stdout
    for command in ("run", "chat", "show", "plan", "doctor", "bench"):
        assert command in help_text
    run_help = octavo_here("run", "--help").stdout
    for flag in ("--temperature", "--top-p", "--max-tokens", "--seed", "--max-model-len", "--num-threads"):
        assert flag in run_help


def test_the_list_of_commands_imports_none_of_them() -> None:
    context = click.Context(command_line)
    for name, (_, summary) in _COMMANDS.items():
        command = command_line.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(200) == summary
    code = "import sys\nfrom octavo.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Check this machine" in result.stdout
    imported = set(result.stdout.splitlines()[-1].split())
    assert not imported & {"numpy", "rich", "octavo.config", "octavo.cli.options", "octavo.cli.run"}


def test_every_summary_of_a_command_fits_into_80_columns() -> None:
    room = 80 - 2 - 6 - max(map(len, _COMMANDS))
    assert not [name for name, (_, summary) in _COMMANDS.items() if len(summary) > room]


def test_unknown_commands_are_exit_code_2() -> None:
    result = octavo_here("serv")
    assert result.returncode == 2
    assert result.stderr.startswith("octavo: No such command 'serv'")
    assert result.stderr.count("\n") == 1


def test_plan_counts_adapters(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(wide_gguf(4))
    options = ("--ctx", "32", "--json")
    alone = json.loads(octavo_here("plan", path, *options).stdout)
    limits = ("--enable-lora", "--max-loras", "2", "--max-lora-rank")
    low, high = (json.loads(octavo_here("plan", path, *options, *limits, rank).stdout) for rank in ("4", "8"))
    assert alone["adapter_bytes"] == 0
    assert high["adapter_bytes"] == 2 * low["adapter_bytes"] > 0
    assert high["total_bytes"] - low["total_bytes"] == low["adapter_bytes"]
    assert "adapters" in octavo_here("plan", path, *limits, "4").stdout


def test_show_describes_an_adapter(tmp_path: Path) -> None:
    """With its rank and modules, and with the reason why no model takes it."""
    from tests.adapters.test_engine import save_adapter
    from tests.support.text_models import save_decoder

    model = save_decoder(tmp_path / "model")
    folder = save_adapter(model, tmp_path / "sql", 0, rank=5, base_model_name_or_path="org/base", lora_bias=True)
    text = octavo_here("show", folder).stdout
    for fact in ("LoRA (peft)", "org/base", "5 (8 modules); alpha 6", "2 q_proj", "lora_bias is True"):
        assert fact in text
    facts = json.loads(octavo_here("show", folder, "--json").stdout)
    assert facts["ranks"] == {"5": 8}
    assert facts["file_bytes"] > facts["num_parameters"] * 4
