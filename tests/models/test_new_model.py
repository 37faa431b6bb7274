"""docs/add_model.md is true: the family that it writes down is found by its files alone, and works."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from octavo import LLM, SamplingParams, models
from octavo.cli.quantize import convert
from octavo.compress import forms
from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from tests.models.test_parity import TOKENS, assert_close, logits_of
from tests.support.directory_tokenizers import save_tokenizer
from tests.support.tiny_models import expected_logits, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "add_model.md"
INTERVAL = 2
NAMES = {"input_layernorm": "norm_before_attention", "post_attention_layernorm": "norm_before_mlp"}


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The files of the page, in folders beside those of the package. Nothing else is told of them."""
    beside, found = tmp_path_factory.mktemp("page"), {}
    for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        found[name] = beside / name
        found[name].parent.mkdir(parents=True)
        found[name].write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        for package, folder in ((models, "models"), (forms, "compress/forms")):
            patch.setattr(package, "__path__", [*package.__path__, str(beside / folder)])
        forget()
        yield found
    forget()
    for module in (models, forms):
        sys.modules.pop(f"{module.__name__}.larch", None)
        vars(module).pop("larch", None)


def forget() -> None:
    """Has the names of families read again."""
    for cached in (models._declarations, models.known_architectures, models._variants):
        cached.cache_clear()


@pytest.fixture(scope="module")
def larch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A checkpoint of the family, and the logits of transformers, whose SmolLM 3 computes the same."""
    directory = tmp_path_factory.mktemp("larch")
    size = save_tokenizer("gpt-2", directory)
    layers = [int((layer + 1) % INTERVAL != 0) for layer in range(5)]
    model = tiny_model("smollm3", vocab_size=size, no_rope_layers=layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        *stem, part, kind = name.split(".")
        if part == "gate_proj":
            up = model.state_dict()[name.replace("gate_proj", "up_proj")]
            tensors[".".join([*stem, "gate_and_up", kind])] = torch.cat([tensor, up])
        elif part != "up_proj" and name != "lm_head.weight":
            tensors[".".join([*stem, NAMES.get(part, part), kind])] = tensor.clone()
    save_file(tensors, directory / "model.safetensors")
    config = model.config.to_dict()
    config = {
        key: config[key] for key in config if key.startswith(("num_", "hidden_", "intermediate", "vocab", "rms_"))
    }
    config |= {"model_type": "larch2", "still_interval": INTERVAL, "max_position_embeddings": 256}
    config |= {"rope_theta": model.config.rope_parameters["rope_theta"], "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, expected_logits(model, TOKENS)


def test_it_gives_the_logits_of_transformers(larch: tuple[Path, np.ndarray]) -> None:
    directory, expected = larch
    with closing(open_checkpoint(directory)) as checkpoint:
        assert checkpoint.architecture == "larch"
        assert_close(logits_of(checkpoint), expected)
        assert_close(logits_of(checkpoint, "cpu"), expected, 2e-3)


def test_it_answers_and_is_written_as_gguf(larch: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    directory, expected = larch
    path = tmp_path / "larch.gguf"
    written = CliRunner().invoke(convert, [str(directory), str(path)])
    assert written.exit_code == 0, written.output
    with closing(open_checkpoint(path)) as checkpoint:
        assert_close(logits_of(checkpoint), expected)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for model in (directory, path):
        with LLM(str(model), max_model_len=64, max_num_seqs=2, num_threads=1) as llm:
            answers.append(llm.generate("the quick brown fox", params)[0].outputs[0].token_ids)
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


def test_it_refuses_what_would_change_it(larch: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    config = json.loads((larch[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "grows_needles": True}))
    (tmp_path / "model.safetensors").symlink_to(larch[0] / "model.safetensors")
    with pytest.raises(ModelLoadError, match="grows_needles is True: needles are not supported"):
        open_checkpoint(tmp_path)


def test_the_page_names_its_files(files: dict[str, Path]) -> None:
    assert set(files) == {"models/larch.py", "compress/forms/larch.py"}
    assert all(f"`src/octavo/{name}`" in PAGE.read_text() for name in files)
    models.load_architecture("larch2")
    forms.gguf_form("larch")
    found: dict[str, ModuleType] = {name: sys.modules[f"octavo.{name[:-3].replace('/', '.')}"] for name in files}
    assert {name: Path(str(module.__file__)) for name, module in found.items()} == files
