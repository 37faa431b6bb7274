"""Short names: what they stand for, and what a misspelled one may mean."""

from __future__ import annotations

import re

import pytest

from octavo.loader.aliases import ALIASES
from octavo.loader.catalogue import FAMILIES, catalogue, find, nearest


@pytest.mark.parametrize(
    ("name", "repository", "variant"),
    [
        ("qwen3", "Qwen/Qwen3-4B-GGUF", None),
        ("qwen3:latest", "Qwen/Qwen3-4B-GGUF", None),
        ("Qwen3:4B", "Qwen/Qwen3-4B-GGUF", None),
        ("qwen3-4b", "Qwen/Qwen3-4B-GGUF", None),
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
