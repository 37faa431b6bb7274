"""The importance of columns: measured, read from both of llama.cpp's files, and of experts that no token chose."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.backends.quantizers import quantize
from octavo.compress.encode import Importance
from octavo.compress.importance import (
    ColumnSquares,
    ImportanceMatrix,
    fitted,
    is_text,
    read_importance,
    split_text,
    write_importance,
)
from octavo.compress.measured_importance import measure
from octavo.errors import ModelLoadError, UsageError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import open_gguf
from tests.compress.models import write_model
from tests.compress.test_quantize import run


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight


@pytest.mark.parametrize("experts", [0, 4])
def test_the_first_layer_by_hand(tmp_path: Path, experts: int) -> None:
    """The input of the first q, k and v is the normed embedding; every stored matrix of the layers is measured."""
    path = write_model(tmp_path / "m.gguf", experts=experts)
    texts = [np.array([0, 2, 3, 4, 5, 6], np.int32), np.array([0, 7, 2], np.int32)]
    checkpoint, file = open_checkpoint(path), open_gguf(path)
    found = measure(checkpoint, texts)
    x = rms_norm(
        file.weight("token_embd.weight").dequantize()[np.concatenate(texts)],
        file.weight("blk.0.attn_norm.weight").dequantize(),
    )
    for part in "qkv":
        squares = found[f"blk.0.attn_{part}.weight"]
        np.testing.assert_allclose(squares.sums[0], (x * x).sum(axis=0), rtol=1e-4)
        assert squares.counts.tolist() == [9]
    matrices = {name for name, info in file.tensors.items() if len(info.shape) > 1}
    assert found.keys() == matrices - {"token_embd.weight"}
    if experts:
        squares = found["blk.1.ffn_down_exps.weight"]
        assert squares.sums.shape == (4, 256)
        assert squares.counts.sum() == 2 * 9  # two experts a token


def test_an_expert_that_no_token_chose_has_the_mean_of_the_others() -> None:
    squares = ColumnSquares(np.array([[2.0, 4.0], [0.0, 0.0], [9.0, 0.0]]), np.array([2.0, 0.0, 3.0]))
    np.testing.assert_array_equal(squares.means(), np.array([[1, 2], [2, 1], [3, 0]], np.float32))
    nobody = ColumnSquares(np.zeros((2, 2)), np.zeros(2))
    np.testing.assert_array_equal(nobody.means(), np.ones((2, 2), np.float32))


def some_matrix() -> ImportanceMatrix:
    squares = {
        "blk.0.attn_q.weight": ColumnSquares(np.array([[1.0, 4.0, 9.0]]), np.array([2.0])),
        "blk.0.ffn_up_exps.weight": ColumnSquares(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1.0, 4.0])),
    }
    return ImportanceMatrix(squares, "i.gguf", "text.txt", 7, 512)


def test_the_gguf_form_is_llama_cpps(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    write_importance(path, some_matrix())
    again = read_importance(path)
    assert (again.dataset, again.num_chunks, again.chunk_tokens, again.file) == ("text.txt", 7, 512, "i.gguf")
    for name, columns in some_matrix().columns().items():
        np.testing.assert_array_equal(again.columns()[name], columns)
    judge = gguf.GGUFReader(path)
    assert judge.fields["general.type"].contents() == "imatrix"
    assert judge.fields["imatrix.datasets"].contents() == ["text.txt"]
    tensors = {tensor.name: tensor for tensor in judge.tensors}
    assert tensors["blk.0.ffn_up_exps.weight.in_sum2"].shape.tolist() == [2, 2]
    assert tensors["blk.0.ffn_up_exps.weight.counts"].shape.tolist() == [1, 2]
    assert not is_text(path)


def legacy(path: Path) -> Path:
    """The older file: mean squares times calls."""
    entries = [("blk.0.attn_q.weight", 5, [5.0, 10.0]), ("blk.0.ffn_up_exps.weight", 2, [2.0, 4.0, 6.0, 8.0])]
    data = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack(f"<ii{len(values)}f", calls, len(values), *values)
    path.write_bytes(data + struct.pack("<ii", 5, 4) + b"text")
    return path


def test_the_older_form_is_read(tmp_path: Path) -> None:
    matrix = read_importance(legacy(tmp_path / "imatrix.dat"))
    assert (matrix.num_chunks, matrix.dataset) == (5, "text")
    columns = matrix.columns()
    assert columns["blk.0.attn_q.weight"].tolist() == [1, 2]
    assert fitted(columns["blk.0.ffn_up_exps.weight"], (2, 9, 2)).tolist() == [[1, 2], [3, 4]]
    assert not is_text(tmp_path / "imatrix.dat")


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    whole = legacy(tmp_path / "imatrix.dat").read_bytes()
    for length in (*range(5, 60, 7), len(whole) - 30):
        (tmp_path / "cut.dat").write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.dat"):
            read_importance(tmp_path / "cut.dat")
    (tmp_path / "cut.dat").write_bytes(whole.replace(struct.pack("<f", 5.0), struct.pack("<f", -5.0)))
    with pytest.raises(ModelLoadError, match="a negative number"):
        read_importance(tmp_path / "cut.dat")
    with pytest.raises(ModelLoadError, match="not 'imatrix'"):
        read_importance(write_model(tmp_path / "model.gguf"))
    with pytest.raises(UsageError, match="the calibration text is empty"):
        split_text([1], 8)


def test_the_command_measures_writes_and_reads(tmp_path: Path) -> None:
    model, text, kept = write_model(tmp_path / "m.gguf"), tmp_path / "text.txt", tmp_path / "i.gguf"
    text.write_text("abcd dcba abab cdcd " * 20)
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    code, _, error = run(model, first, "--type", "q4_k_m", "--imatrix", text, "--save-imatrix", kept)
    assert code == 0, error
    assert run(model, second, "--type", "q4_k_m", "--imatrix", kept)[0] == 0
    one, two = open_gguf(first), open_gguf(second)
    assert one.metadata["quantize.imatrix.file"] == "text.txt"
    assert two.metadata["quantize.imatrix.file"] == "i.gguf"
    assert one.metadata["quantize.imatrix.entries_count"] == 14
    importance: dict[str, Importance] = read_importance(kept).columns()
    for name, info in one.tensors.items():
        if info.type_name in ("Q4_K", "Q6_K"):
            x = open_gguf(model).weight(name).dequantize()
            np.testing.assert_array_equal(one.array(name), quantize(info.type_name, x, importance.get(name)))
        np.testing.assert_array_equal(one.array(name), two.array(name))
    other = write_model(tmp_path / "other.gguf", width=512)
    assert "it belongs to another model" in run(other, tmp_path / "c.gguf", "--type", "q8_0", "--imatrix", kept)[2]
    legacy(tmp_path / "x.dat").write_bytes((tmp_path / "x.dat").read_bytes().replace(b"blk.0", b"abc.0"))
    assert (
        "none of its names is a tensor"
        in run(model, tmp_path / "c.gguf", "--type", "q8_0", "--imatrix", tmp_path / "x.dat")[2]
    )
    assert "needs --imatrix TEXT" in run(model, tmp_path / "c.gguf", "--type", "q8_0", "--save-imatrix", kept)[2]
