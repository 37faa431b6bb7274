"""`octavo finetune` on tiny models: PEFT has the same loss with its result, and a run goes on after any end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from octavo.backends.memory import MemoryBudget
from octavo.backends.torch import low_rank_training
from octavo.backends.torch.low_rank_training import LowRankOptions, LowRankTrainer
from octavo.finetune import finetune as finetuning
from octavo.finetune.examples import read_examples
from octavo.finetune.find_modules import find_modules
from octavo.finetune.training_run import RunFolder
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import build_graph
from octavo.tokenizer import load_tokenizer
from tests.compress.test_convert import run as convert
from tests.finetune.models import as_gguf, chat, run, write_lines, write_model
from tests.support.waiting import wait_until

RECORDS = [
    *(chat(f"say {word}", f"{word} {word}") for word in ("one", "two", "three", "four", "five")),
    {"prompt": "six", "completion": " seven"},
    {"text": "eight nine ten"},
]
OPTIONS = ("--rank", 4, "--batch-tokens", 64, "--epochs", 4, "--learning-rate", 3e-3, "--held-out", 0.2)


@pytest.fixture(autouse=True)
def float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_training, "bfloat16_is_faster", lambda: False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "chats.jsonl", RECORDS)


def losses_of(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("name", ["llama-tied-biased", "phi3", "gpt2", "qwen3", "gemma3", "qwen2moe"])
@pytest.mark.parametrize("form", ["safetensors", "gguf", "q8_0"])
def test_peft_has_the_same_losses_with_the_adapter(name: str, form: str, tmp_path: Path, data: Path) -> None:
    """Of every family and form, with the base as a folder of floats that transformers reads."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if name in ("gpt2",) and form != "safetensors":
        pytest.skip("files of GPT-2 have no way back to names of transformers")
    folder = write_model(tmp_path / "base", name)
    model = folder if form == "safetensors" else as_gguf(folder, tmp_path / "m.gguf", None if form == "gguf" else form)
    code, out, error = run(model, "--data", data, "-o", tmp_path / "a", *OPTIONS, "--json")
    assert code == 0, error
    report = losses_of(out)
    assert report["losses"][-1] < report["losses"][0]
    if form == "q8_0":
        folder = tmp_path / "dequantized"
        code, _, error = convert(model, folder, "--to", "safetensors", "--dtype", "f32")
        assert code == 0, error
    judge = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tmp_path / "a"
    ).eval()
    factors = {name for name, _ in judge.named_parameters() if ".lora_" in name}
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(factors) == len(stored)
    assert all(np.any(array) for array in stored.values())
    with closing(open_checkpoint(model)) as checkpoint:
        examples = read_examples(data, load_tokenizer(checkpoint), 512)
        graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
        modules = find_modules(checkpoint, graph, ["all-linear"])
        trainer = LowRankTrainer(graph, checkpoint.weights, modules, LowRankOptions(4, 2.0))
        plain = trainer.loss_of(examples.texts)
        prefix = "base_model.model."
        trainer.restore({f"{m.name}.{x}": stored[f"{prefix}{m.name}.lora_{x}.weight"] for m in modules for x in "AB"})
        found = trainer.loss_of(examples.texts)
    total, count = 0.0, 0
    for text in examples.texts:
        ids = torch.from_numpy(text.ids.astype(np.int64))[None]
        with torch.no_grad():
            rows = torch.log_softmax(judge(ids).logits[0, :-1], dim=-1)
        chosen = torch.from_numpy(text.is_learned[1:])
        total -= rows.gather(1, ids[0, 1:, None])[chosen].sum().item()
        count += text.num_learned
    assert found == pytest.approx(total / count, rel=2e-5)
    assert found < plain - 0.05


def test_a_run_that_was_cut_off_ends_the_same(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is kept after every step; saving fails after some, as if the process had ended there."""
    model = as_gguf(write_model(tmp_path / "base"), tmp_path / "m.gguf", "q8_0")
    monkeypatch.setattr("octavo.cli.finetune._KEEP_EVERY_S", 0.0)
    code, whole, error = run(model, "--data", data, "-o", tmp_path / "whole", *OPTIONS, "--json")
    assert code == 0, error
    save = RunFolder.save
    steps: list[int] = []

    def ending(self: RunFolder, progress: Any, state: Any) -> None:
        save(self, progress, state)
        steps.append(progress.steps)
        if progress.steps in (2, 5) and steps.count(progress.steps) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save", ending)
    command = (model, "--data", data, "-o", tmp_path / "cut", *OPTIONS, "--json")
    for _ in range(2):
        code, _, error = run(*command)
        assert code != 0
        assert not (tmp_path / "cut").exists()
    code, out, error = run(*command)
    assert code == 0, error
    assert "resuming after 5 of" in error
    assert steps == list(range(1, len(steps) + 1))
    assert losses_of(out)["losses"] == pytest.approx(losses_of(whole)["losses"], rel=1e-6)
    assert losses_of(out)["held_out"] == losses_of(whole)["held_out"]
    names = {path.name for path in (tmp_path / "cut").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    for name in names:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "cut.partial").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_goes_on(number: signal.Signals, tmp_path: Path, data: Path) -> None:
    """The first ends after a step and keeps it; after the second, the last state that was kept counts."""
    model = write_model(tmp_path / "base")
    command = [sys.executable, "-m", "octavo", "finetune", str(model), "--data", str(data), "-o", str(tmp_path / "a")]
    command += [*map(str, OPTIONS), "--epochs", "2000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "held-out loss" in line:
                break
        wait_until(lambda: (tmp_path / "a.partial" / "run.json").exists())
        process.send_signal(number)
        error = process.stderr.read()
        code = process.wait()
    assert code == (-9 if number == signal.SIGKILL else 130), error
    if number != signal.SIGKILL:
        assert "run the same command again to resume" in error
        progress, state = RunFolder(tmp_path / "a.partial").load()
        assert progress.steps > 0
        assert state
    code, _, error = run(model, "--data", data, "-o", tmp_path / "a", *OPTIONS)
    assert code != 0
    assert "has an unfinished run with epochs 2000, not 4" in error
    code, _, error = run(model, "--data", data, "-o", tmp_path / "a", *OPTIONS, "--restart")
    assert code == 0, error


def test_weights_that_are_dequantized_when_needed_train_the_same_adapter(tmp_path: Path, data: Path) -> None:
    model = as_gguf(write_model(tmp_path / "base"), tmp_path / "m.gguf", "q8_0")
    for frozen in ("kept", "stored"):
        code, _, error = run(model, "--data", data, "-o", tmp_path / frozen, *OPTIONS, "--frozen", frozen)
        assert code == 0, error
    kept, stored = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("kept", "stored"))
    assert kept == stored


def test_products_in_bfloat16_learn_too(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_training, "bfloat16_is_faster", lambda: True)
    model = write_model(tmp_path / "base")
    code, out, error = run(model, "--data", data, "-o", tmp_path / "a", *OPTIONS, "--json")
    assert code == 0, error
    assert "products in bfloat16" in error
    found = losses_of(out)
    assert found["losses"][-1] < found["losses"][0] - 0.1
    assert load_file(tmp_path / "a" / "adapter_model.safetensors").popitem()[1].dtype == np.float32


def test_what_is_said(tmp_path: Path, data: Path) -> None:
    model = write_model(tmp_path / "base")
    options = (*OPTIONS, "--target-modules", "q_proj,v_proj", "--alpha", 4, "--held-out-every", 3)
    code, out, error = run(model, "--data", data, "-o", tmp_path / "a", *options)
    assert code == 0, error
    assert "7 lines: 6 examples with" in error
    assert "products in float32; memory:" in error
    assert "of frozen weights" in error
    assert "held-out loss" in error
    assert "after 3 of" in error
    assert "modules of rank 4" in out
    assert "held-out" in out
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 4, ["q_proj", "v_proj"])
    assert config["base_model_name_or_path"] == str(model)
    names = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == {"q_proj", "v_proj"}


def test_mistakes_end_in_one_line(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "base")
    command = (model, "--data", data, "-o", tmp_path / "a", *OPTIONS)
    assert "no module is called 'w_q'; this model has down_proj" in run(*command, "--target-modules", "w_q")[2]
    assert "use a lower learning rate" in run(*command, "--restart", "--learning-rate", 1e30)[2]
    gpt2 = as_gguf(write_model(tmp_path / "gpt2", "gpt2"), tmp_path / "gpt2.gguf")
    assert "use the model's unquantized" in run(gpt2, "--data", data, "-o", tmp_path / "b", *OPTIONS)[2]
    (tmp_path / "other").mkdir()
    assert "is not an adapter" in run(*command[:3], "-o", tmp_path / "other")[2]
    assert run(*command, "--restart")[0] == 0
    assert "already exists; --force replaces it" in run(*command)[2]
    assert run(*command, "--force")[0] == 0
    monkeypatch.setattr(finetuning, "host_memory", lambda: MemoryBudget(1 << 20))
    code, _, error = run(*command, "--force")
    assert code != 0
    assert "use a smaller --batch-tokens or --sequence-length" in error
