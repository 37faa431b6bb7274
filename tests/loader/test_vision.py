"""The part of a model that sees, as it is opened: what does not fit is refused before the first image comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.vision import open_vision
from tests.support import converted_gguf, tiny_vision
from tests.support.tiny_vision.mmproj import save_mmproj

model = cache(tiny_vision.tiny_model)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file whose rows are as wide as those of the encoders."""
    config = tiny_vision.FAMILIES["smolvlm"].config().text_config
    return converted_gguf.save_gguf(
        AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("text") / "text.gguf"
    )


def with_size(path: Path, side: int) -> None:
    """Another size of images in the metadata: a 32-bit number behind its key and its type."""
    content, key = path.read_bytes(), b"clip.vision.image_size"
    at = content.index(key) + len(key) + 4
    path.write_bytes(content[:at] + side.to_bytes(4, "little") + content[at + 4 :])


def without_class(path: Path) -> None:
    content = path.read_bytes()
    assert content.count(b"v.class_embd") == 1
    path.write_bytes(content.replace(b"v.class_embd", b"v.other_embd"))


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("internvl", without_class, "class.weight' is missing"),
        ("internvl", lambda path: with_size(path, 24), "a tile has"),
        ("smolvlm", lambda path: with_size(path, 24), "a tile has"),
        ("gemma3", lambda path: with_size(path, 24), "a tile has"),
        ("gemma3", lambda path: with_size(path, 1 << 12), "1024 x 1024 patches; the limit is"),
    ],
)
def test_a_part_that_does_not_fit_itself_is_refused_at_the_load(
    name: str, damage: Callable[[Path], None], problem: str, text: Path, tmp_path: Path
) -> None:
    beside = tmp_path / "mmproj.gguf"
    save_mmproj(model(name), beside, name)
    with closing(open_checkpoint(text)) as checkpoint:
        found = open_vision(checkpoint, str(beside))
        assert found is not None
        found.close()
        damage(beside)
        with pytest.raises(ModelLoadError, match=f"mmproj.gguf: the image encoder.*{problem}"):
            open_vision(checkpoint, str(beside))


@pytest.mark.parametrize(
    ("name", "file", "changes", "problem"),
    [
        ("smolvlm", "config.json", {"vision_config": {"image_size": 32}}, "a tile has"),
        ("smolvlm", "preprocessor_config.json", {"max_image_size": {"longest_edge": 32}}, "a tile has"),
        ("qwen3_vl", "preprocessor_config.json", {"patch_size": 8}, "a tile has"),
        ("smolvlm", "preprocessor_config.json", {"max_image_size": {"longest_edge": 3}}, "is inconsistent"),
    ],
)
def test_settings_that_do_not_fit_the_weights_are_refused_at_the_load(
    name: str, file: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tiny_vision.save(model(name), tmp_path, name) / file
    settings = json.loads(path.read_text())
    for key, value in changes.items():
        settings[key] = {**settings[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(settings))
    place = f"(model.safetensors|preprocessor_config.json|{tmp_path.name})"
    with (
        closing(open_checkpoint(path.parent)) as checkpoint,
        pytest.raises(ModelLoadError, match=f"{place}: .*{problem}"),
    ):
        open_vision(checkpoint, max_tokens=1024)
