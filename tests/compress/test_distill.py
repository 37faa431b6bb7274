"""Distillation: its loss against the full divergence, a student that comes nearer to its teacher, and the cache."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from octavo.backends.torch import distillation
from octavo.backends.torch.distillation import TeacherTokens, TrainingOptions, divergence_of, train
from octavo.backends.whole_texts import TextRunner
from octavo.cli.distill import distill
from octavo.compress.distill import TeacherCache, likeliest
from octavo.errors import NumericalError
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import open_gguf
from octavo.models import build_graph
from octavo.quality.figures import kl_divergence, log_softmax
from octavo.tokenizer import load_tokenizer
from tests.compress.models import write_model
from tests.compress.test_prune import logits
from tests.compress.test_prune import run as prune

TEXT = "ab cd a b dcab abcd bb cc " * 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(distill, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


def some_rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(6, 20, generator=generator) * 2 for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_all_tokens_give_the_divergence_itself(kind: str) -> None:
    student, teacher = some_rows()
    p, q = torch.log_softmax(teacher, 1), torch.log_softmax(student, 1)
    found = divergence_of(student, torch.arange(20).repeat(6, 1), p, kind)  # type: ignore[arg-type]
    rows = (p, student) if kind == "forward" else (q, teacher)
    assert found.item() == pytest.approx(kl_divergence(rows[0].numpy(), rows[1].numpy()).mean(), rel=1e-4)


def test_the_other_tokens_count_as_one() -> None:
    student, teacher = some_rows()
    p = torch.log_softmax(teacher, 1)
    top = p.topk(5, dim=1)
    found = divergence_of(student, top.indices, top.values, "forward")
    expected = 0.0
    for row in range(6):
        a = [*top.values[row].exp().tolist(), 1 - float(top.values[row].exp().sum())]
        chosen = torch.softmax(student, 1)[row, top.indices[row]]
        b = [*chosen.tolist(), 1 - float(chosen.sum())]
        expected += sum(x * np.log(x / y) for x, y in zip(a, b, strict=True)) / 6
    assert found.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_slope_is_that_of_the_divergence(dtype: torch.dtype) -> None:
    """Of more rows than are taken at a time, beside autograd's."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(70, 30, generator=generator)).to(dtype).requires_grad_()
    top = torch.log_softmax(torch.randn(70, 30, generator=generator), dim=-1).topk(5)
    plain = logits.detach().float().requires_grad_()
    q = torch.log_softmax(plain, dim=-1).gather(1, top.indices)
    rest = [torch.log(1 - x.exp().sum(1, keepdim=True)) for x in (top.values, q)]
    p, q = torch.cat([top.values, rest[0]], 1), torch.cat([q, rest[1]], 1)
    expected = (p.exp() * (p - q)).sum(1).mean()
    found = divergence_of(logits, top.indices, top.values, "forward")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for loss in (found, expected):
        loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.float(), plain.grad, rtol=1e-2, atol=1e-5)


def test_a_temperature_compares_the_lists_alone() -> None:
    student, teacher = some_rows()
    top = torch.log_softmax(teacher, 1).topk(5, dim=1)
    found = divergence_of(student, top.indices, top.values, "forward", 2.0)
    p = log_softmax((top.values / 2).numpy())
    expected = kl_divergence(p, (student.gather(1, top.indices) / 2).numpy()).mean() * 4
    assert found.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "temperature", "products"),
    [("forward", 1, "float32"), ("forward", 1, "bfloat16"), ("reverse", 1, "float32"), ("forward", 2, "float32")],
)
def test_a_student_comes_nearer_to_its_teacher(
    folder: Path, kind: str, temperature: int, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher without one of its layers; the judge is the divergence of whole models by numpy."""
    monkeypatch.setattr(distillation, "bfloat16_is_faster", lambda: products == "bfloat16")
    teacher, student, healed = write_model(folder / "t.gguf"), folder / "s.gguf", folder / "h.gguf"
    assert prune(teacher, student, "--layers", 1)[0] == 0
    options = ("--steps", 12, "--length", 32, "--rate", 3e-4, "--divergence", kind, "--dtype", "f32")
    options += ("--temperature", temperature, "--top-k", 6)
    code, out, error = run(teacher, student, healed, "--data", folder / "text.txt", *options)
    assert code == 0, error
    assert f"12 steps, products in {products}; loss" in out
    found = []
    with closing(open_checkpoint(teacher)) as checkpoint:
        tokens = np.array(load_tokenizer(checkpoint).encode(TEXT)[:60], np.int32)
        reference = log_softmax(logits(checkpoint, tokens))
    for path in (student, healed):
        with closing(open_checkpoint(path)) as checkpoint:
            assert checkpoint.config.num_layers == 1
            found.append(kl_divergence(reference, logits(checkpoint, tokens)).mean())
    assert found[1] < 0.8 * found[0]
    [kept] = (folder / "cache" / "teachers").iterdir()
    assert np.load(kept / "ids.npy", mmap_mode="r").shape[1:] == (32, 6)
    before = (kept / "ids.npy").stat().st_mtime_ns
    code, _, _ = run(teacher, student, healed, "--data", folder / "text.txt", *options, "--force", "--seed", 1)
    assert code == 0
    assert (kept / "ids.npy").stat().st_mtime_ns == before  # not computed again


@pytest.mark.parametrize(
    ("rows", "cols", "count"), [(1, 1, 1), (5, 96, 96), (40, 1000, 64), (17, 5003, 7), (3, 49152, 64)]
)
@pytest.mark.parametrize("kind", ["normal", "equal", "falling"])
def test_the_likeliest_tokens(rows: int, cols: int, count: int, kind: str) -> None:
    rng = np.random.default_rng(cols)
    logits = rng.normal(scale=3, size=(rows, cols)).astype(np.float32)
    if kind == "equal":
        logits = np.round(logits / 4)
    elif kind == "falling":
        logits = -np.sort(-logits, axis=1)
    ids, logprobs = likeliest(logits, count)
    whole = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, -np.sort(-whole, axis=1)[:, :count], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(logprobs, np.take_along_axis(whole, ids, axis=1), rtol=1e-3, atol=1e-5)
    assert all(len(set(row)) == count for row in ids.tolist())
    assert (logprobs < 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers(bad: float) -> None:
    logits = np.zeros((20, 100), np.float32)
    logits[19, 99] = bad
    with pytest.raises(NumericalError, match="NaN or infinity"):
        likeliest(logits, 5)


def test_products_in_bfloat16_train_nearly_the_same_weights(folder: Path) -> None:
    """A step follows the sign of the gradients, nearly: weights move as they do in float32, and stay float32."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((4, 16, 6)), axis=-1)[..., :3].astype(np.int32)
    teacher = TeacherTokens(ids[..., 0], ids, np.log(np.full(ids.shape, 0.3)).astype(np.float16))
    moved = []
    with closing(open_checkpoint(write_model(folder / "t.gguf"))) as student:
        graph = build_graph(student.architecture, student.config, student.weights.shapes)
        before = {p.name: student.weights[p.name].dequantize() for p in graph.parameters}
        for in_bfloat16 in (False, True):
            trained = train(graph, student.weights, teacher, TrainingOptions(20, in_bfloat16=in_bfloat16))
            assert {array.dtype for array in trained.values()} == {np.dtype(np.float32)}
            moved.append(np.concatenate([(trained[name] - before[name]).ravel() for name in sorted(before)]))
    assert not np.array_equal(*moved)
    assert np.corrcoef(*moved)[0, 1] > 0.95


def test_the_teacher_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six texts take two steps, the second one of fewer texts; the judge is the model by numpy, text by text."""
    compiled: list[int] = []

    class Counted(TextRunner):
        def __init__(self, *arguments: Any) -> None:
            compiled.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr("octavo.compress.distill.TextRunner", Counted)
    texts = np.random.default_rng(0).integers(2, 8, (6, 32)).astype(np.int32)
    with closing(open_checkpoint(write_model(folder / "t.gguf"))) as teacher:
        found = TeacherCache(folder / "kept", 8).tokens(teacher, texts)
        for text, ids, logprobs in zip(texts, found.ids, found.logprobs, strict=True):
            expected = np.take_along_axis(log_softmax(logits(teacher, text)), ids, 1)
            np.testing.assert_allclose(logprobs, expected, atol=0.02)
    assert len(compiled) == 1


def test_a_text_that_was_cut_off_is_made_again(folder: Path) -> None:
    """As a killed run leaves it: its first log-probabilities are there, the others are still zeros."""
    texts = np.random.default_rng(0).integers(2, 8, (3, 32)).astype(np.int32)
    with closing(open_checkpoint(write_model(folder / "t.gguf"))) as teacher:
        expected = np.array(TeacherCache(folder / "kept", 8).tokens(teacher, texts).logprobs)
        [kept] = (folder / "kept").iterdir()
        written = np.load(kept / "logprobs.npy", mmap_mode="r+")
        written[2, 5:] = 0
        written.flush()
        found = TeacherCache(folder / "kept", 8).tokens(teacher, texts).logprobs
        np.testing.assert_array_equal(found, expected)


def test_another_vocabulary_is_refused_before_the_teacher_is_read(folder: Path) -> None:
    teacher, student = write_model(folder / "t.gguf"), folder / "s.gguf"
    student.write_bytes(teacher.read_bytes().replace(b"cd", b"dc").replace(b"c d", b"d c"))
    code, _, error = run(teacher, student, folder / "h.gguf", "--data", folder / "text.txt", "--length", 32)
    assert code != 0
    assert "is 'cd' in the teacher and 'dc' in the student; use models with the same vocabulary" in error
    assert not (folder / "cache" / "teachers").exists()


def test_mistakes_end_in_one_line(folder: Path) -> None:
    teacher = write_model(folder / "t.gguf")
    (folder / "short.txt").write_text("a b")
    assert "fewer than one piece of 256" in run(teacher, teacher, folder / "h.gguf", "--data", folder / "short.txt")[2]
    options = ("--data", folder / "text.txt", "--length", 32)
    code, _, error = run(teacher, teacher, folder / "h.gguf", *options, "--rate", 1e30, "--steps", 5)
    assert code != 0
    assert "use a lower rate" in error
    assert not (folder / "h.gguf").exists()
    code, _, error = run(teacher, teacher, folder / "h.gguf", *options, "--minutes", 1e-12)
    assert code != 0
    assert "--minutes ran out before the first step" in error
    other = write_model(folder / "s.gguf", layers=1)
    assert "this is the source" in run(teacher, other, teacher, *options, "--force")[2]


def test_a_file_that_stays_is_named_before_the_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("octavo.loader.finite_weights.check_weights", read)
    teacher = write_model(folder / "t.gguf")
    (folder / "h.gguf").write_text("kept")
    code, _, error = run(teacher, teacher, folder / "h.gguf", "--data", folder / "text.txt", "--length", 32)
    assert code != 0
    assert "--force" in error
    assert "weights are read" not in error


@pytest.mark.parametrize("place", ["teacher", "student"])
def test_weights_that_are_no_numbers_are_named_before_any_work(folder: Path, place: str) -> None:
    paths = {"teacher": write_model(folder / "t.gguf"), "student": write_model(folder / "s.gguf")}
    with closing(open_checkpoint(paths[place])) as checkpoint:
        name = next(name for name in checkpoint.weights if name.endswith("down_proj.weight"))
    info = open_gguf(paths[place]).tensors["blk.0.ffn_down.weight"]
    data = bytearray(paths[place].read_bytes())
    data[info.offset + 2 : info.offset + 4] = np.array(np.nan, np.float16).tobytes()
    paths[place].write_bytes(data)
    code, _, error = run(*paths.values(), folder / "h.gguf", "--data", folder / "text.txt", "--length", 32)
    assert code != 0
    assert f"{paths[place]}: tensor {name!r} contains NaN" in error
    assert not (folder / "cache" / "teachers").exists()


def test_a_full_disk_is_noticed_before_any_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, full, statvfs = write_model(folder / "t.gguf"), folder / "full", os.statvfs
    full.mkdir()

    def space(path: Path) -> os.statvfs_result:
        found = list(statvfs(path))
        return os.statvfs_result([*found[:4], 0, *found[5:]] if Path(path) == full else found)

    monkeypatch.setattr(os, "statvfs", space)
    options = ("--data", folder / "text.txt", "--length", 32, "--dtype", "f32")
    code, _, error = run(teacher, teacher, full / "h.gguf", *options)
    assert code != 0
    assert "bytes, but only 0 are free; free some or write elsewhere" in error
    assert not list(full.iterdir())
    assert not (folder / "cache" / "teachers").exists()
