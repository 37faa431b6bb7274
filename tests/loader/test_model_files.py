"""The choice of the model file in a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.model_file import find_model_file, mmproj_files
from tests.support.tiny_gguf import tiny_gguf

PARTS = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m.gguf", "README.md"], "m.gguf"),
        (["m.gguf", "config.json"], "m.gguf"),
        (PARTS, PARTS[0]),
        (["config.json", "model.safetensors"], "model.safetensors"),
        (["config.json", "model.safetensors", "m.gguf"], "model.safetensors"),
        (
            ["config.json", "a-1.safetensors", "a-2.safetensors", "model.safetensors.index.json"],
            "model.safetensors.index",
        ),
        (["config.json", "model.safetensors", "pytorch_model.bin"], "model.safetensors"),
    ],
)
def test_found(names: list[str], expected: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert find_model_file(tmp_path).name.startswith(expected)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "no model; a .gguf or .safetensors file is needed"),
        (["README.md"], "no model; a .gguf or .safetensors file is needed"),
        (["a.gguf", "b.gguf"], "2 models; name one of them: a.gguf, b.gguf"),
        (PARTS[1:], "1 of 2 parts are missing, first .*m-00001-of-00002.gguf"),
        (["model.safetensors"], "config.json: no such file"),
        (["config.json", "a.safetensors", "b.safetensors"], "2 models; name one"),
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin is a pickle; .*save_pretrained.* writes safetensors"),
        (["weights.pt"], "weights.pt is a pickle; pickle checkpoints are not supported"),
        (["consolidated.00.pth", "params.json"], "consolidated.00.pth is a pickle"),
    ],
)
def test_not_found(names: list[str], reason: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=reason):
        find_model_file(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], ["mmproj-F16.gguf"]),
        (["mmproj-m-q8_0.gguf", "mmproj-m-bf16.gguf"], ["mmproj-m-bf16.gguf"]),
        (["mmproj-a-f16.gguf", "mmproj-b-f16.gguf"], ["mmproj-a-f16.gguf", "mmproj-b-f16.gguf"]),
        (["mmproj.gguf", "other.gguf", "mmproj.txt"], ["mmproj.gguf"]),
        ([], []),
    ],
)
def test_the_part_that_sees(names: list[str], expected: list[str], tmp_path: Path) -> None:
    """Of files that differ in their type alone it is the best; a folder named by a type belongs to the one above."""
    for name in ["m.gguf", *names]:
        (tmp_path / name).write_bytes(b"x")
    for model in ("m.gguf", "UD-Q4_K_XL/m.gguf"):
        assert [path.name for path in mmproj_files(tmp_path / model)] == expected
    assert mmproj_files(tmp_path / "models/m.gguf") == []


def test_first_bytes_decide_where_the_name_does_not(tmp_path: Path) -> None:
    for name, content in [("a", tiny_gguf()), ("b", b"other"), ("c.gguf", b"other")]:
        (tmp_path / name).write_bytes(content)
    assert open_checkpoint(tmp_path / "a").format == "gguf"
    with pytest.raises(ModelLoadError, match=r"no model; a .gguf or .safetensors file is needed"):
        open_checkpoint(tmp_path / "b")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "c.gguf")
