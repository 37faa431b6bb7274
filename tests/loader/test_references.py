"""Names of models on the hub, in every form that people paste."""

from __future__ import annotations

import pytest

from octavo.errors import ModelLoadError
from octavo.loader.references import Reference, parse, with_revision

REPOSITORY = "org/a.b-c_1"


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        (REPOSITORY, Reference(REPOSITORY)),
        (f"{REPOSITORY}:Q4_K_M", Reference(REPOSITORY, "Q4_K_M")),
        (f"hf.co/{REPOSITORY}", Reference(REPOSITORY)),
        (f"HF.co/{REPOSITORY}:Q4_K_M", Reference(REPOSITORY, "Q4_K_M")),
        (f"https://hf.co/{REPOSITORY}/", Reference(REPOSITORY)),
        (f"hf.co/{REPOSITORY}/tree/main", Reference(REPOSITORY)),
        (f"hf.co/{REPOSITORY}/tree/v2", Reference(REPOSITORY, revision="v2")),
        (f"hf.co/{REPOSITORY}/blob/main/m-Q4.gguf", Reference(REPOSITORY, file="m-Q4.gguf")),
        (f"hf.co/{REPOSITORY}/resolve/abc/x/m.gguf?download=true", Reference(REPOSITORY, None, "x/m.gguf", "abc")),
        ("qwen3:0.6b-q8_0", Reference("Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
    ],
)
def test_references(name: str, reference: Reference) -> None:
    assert parse(name) == reference


def test_the_hub_that_is_configured() -> None:
    from huggingface_hub.constants import ENDPOINT

    assert parse(f"{ENDPOINT}/{REPOSITORY}/blob/main/m.gguf?x=y") == Reference(REPOSITORY, file="m.gguf")


@pytest.mark.parametrize("name", ["", "word", "a/b/c", "./a/b", "~/b", "a/b.gguf", "/a/b", "a b/c", "a/b:c:d", "a/b\n"])
def test_names_that_are_none(name: str) -> None:
    assert parse(name) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("https://example.org/org/name", "models come from"),
        ("hf.co/org", "not the address of a hub model"),
        ("hf.co/org/name/commits/main", "not the address of a hub model"),
        ("hf.co/org/name/blob/main/../../x", "only addresses of GGUF files"),
        ("hf.co/org/name/resolve/main/model.bin", "only addresses of GGUF files"),
        ("hf.co/org/name/tree/..", "not a branch, tag or commit"),
    ],
)
def test_strange_addresses(name: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        parse(name)


def test_labels() -> None:
    assert Reference("o/n").label == "o/n"
    assert Reference("o/n", "Q8_0").label == "o/n:Q8_0"
    assert with_revision(Reference("o/n", None, "m.gguf"), "v1").label == "o/n:m.gguf at revision v1"
    with pytest.raises(ModelLoadError, match="not a branch, tag or commit"):
        with_revision(Reference("o/n"), "a..b")
