"""Perplexity, divergence and their windows: against the formulas written out, and against the reference backend."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from octavo import LLM, SamplingParams
from octavo.backends import ExecutorLimits, reference
from octavo.cli.evaluate import evaluate
from octavo.errors import NumericalError, UsageError
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import build_graph
from octavo.quality.evaluation import ReferenceOptions, WindowOptions, evaluate_text
from octavo.quality.figures import Perplexity, kl_divergence, log_softmax
from octavo.quality.reference_scores import ReferenceStore, reference_key
from octavo.quality.scorer import Scorer, scorer_config
from octavo.quality.texts import read_text
from octavo.quality.windows import Window, chunk_windows, strided_windows
from octavo.tokenizer import load_tokenizer
from tests.quality.conftest import TEXT, spoilt
from tests.support.batches import Request, step
from tests.support.processes import octavo_here
from tests.support.text_models import save_encoder


def exact_logprobs(path: Path, window: Window) -> np.ndarray:
    """[tokens - 1, vocab] in float64: of each token but the first, by the numpy backend."""
    checkpoint = open_checkpoint(path)
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    executor = reference.compile(graph, checkpoint.weights, ExecutorLimits(64, 1, 64, 64), dtype=np.float64)
    executor.allocate_cache(16, 4)
    request = Request(window.token_ids, list(range(16)))
    logits = executor.submit(step([(request, len(window.token_ids))])).wait().logits[:-1]
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_chunks_are_those_of_llama_cpp() -> None:
    """tools/perplexity: n_ctx / 2 is the first position whose logits count, and it tells of the token after it."""
    found = chunk_windows(range(100, 121), 8, bos_token_id=1)
    assert [window.token_ids for window in found] == [[1, *range(101, 108)], [1, *range(109, 116)]]
    assert [window.token_ids[window.first :] for window in found] == [[105, 106, 107], [113, 114, 115]]
    assert [window.num_counted for window in found] == [8 - 1 - 8 // 2] * 2
    assert chunk_windows(range(8), 8)[0].token_ids == [*range(8)]


@pytest.mark.parametrize(("size", "stride"), [(8, 4), (8, 7), (8, 1), (30, 10), (5, 2)])
def test_strided_windows_count_every_token_but_the_first_once(size: int, stride: int) -> None:
    windows = strided_windows(range(21), size, stride)
    assert [token for window in windows for token in window.token_ids[window.first :]] == [*range(1, 21)]
    assert [window.start for window in windows] == [window.token_ids[window.first] for window in windows]
    assert max(len(window.token_ids) for window in windows) == min(size, 21)


def test_the_formulas() -> None:
    rng = np.random.default_rng(0)
    p, q = (rng.standard_normal((70, 40)).astype(np.float32) * 3 for _ in range(2))
    wide_p, wide_q = (np.exp(x.astype(np.float64)) for x in (p, q))
    wide_p, wide_q = (x / x.sum(axis=1, keepdims=True) for x in (wide_p, wide_q))
    expected = (wide_p * np.log(wide_p / wide_q)).sum(axis=1)
    np.testing.assert_allclose(kl_divergence(log_softmax(p), q), expected, rtol=1e-4)
    rounded = log_softmax(p).astype(np.float16)
    np.testing.assert_allclose(kl_divergence(rounded, q), expected, rtol=2e-3)
    assert kl_divergence(rounded, p).max() < 1e-6
    impossible = np.array([[0, -np.inf]], np.float32)
    np.testing.assert_allclose(kl_divergence(impossible, np.zeros((1, 2), np.float32)), [np.log(2)], rtol=1e-6)
    figures = Perplexity.of(np.log(np.array([0.5, 0.25, 0.125], np.float32)))
    assert figures.perplexity == pytest.approx(4)
    assert figures.standard_error == pytest.approx(4 * np.log(2) / np.sqrt(3))


@pytest.mark.parametrize("step_tokens", [7, 64])
def test_a_scorer_agrees_with_the_reference_backend(tiny: Path, step_tokens: int) -> None:
    """Windows in pieces, and many in a step."""
    ids = load_tokenizer(open_checkpoint(tiny)).encode(TEXT)
    windows = [*chunk_windows(ids, 32), *strided_windows(ids[:50], 20, 9)]
    options = {"max_num_batched_tokens": step_tokens, "max_num_seqs": min(5, step_tokens)}
    with Scorer(scorer_config(str(tiny), 32, options)) as scorer:
        scored = [*scorer.score(windows, wants_logits=True)]
    assert [window for window, _ in scored] == windows
    for window, scores in scored:
        expected = exact_logprobs(tiny, window)[window.first - 1 :]
        targets = window.token_ids[window.first :]
        of_targets = expected[range(len(targets)), targets]
        np.testing.assert_allclose(scores.logprobs, of_targets, atol=1e-2)
        np.testing.assert_array_equal(scores.ranks, 1 + (expected > of_targets[:, None]).sum(axis=1))
        np.testing.assert_allclose(log_softmax(scores.logits), expected, atol=1e-2)


def test_a_model_against_a_reference_that_is_kept(tiny: Path, other: Path, text: Path, tmp_path: Path) -> None:
    wanted = WindowOptions(size=16)
    kept = ReferenceOptions(str(tiny), {"backend": "reference"}, folder=tmp_path / "kept")
    report, tokens = evaluate_text(str(other), read_text(text), wanted, reference=kept)
    assert report.divergence is not None
    windows = chunk_windows(load_tokenizer(open_checkpoint(tiny)).encode(TEXT), 16)
    p, q = (np.concatenate([exact_logprobs(m, w)[w.first - 1 :] for w in windows]) for m in (tiny, other))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    assert report.divergence.mean_kl == pytest.approx(kl.mean(), rel=5e-3)
    assert report.divergence.p99_kl == pytest.approx(np.quantile(kl, 0.99), rel=2e-2)
    assert report.divergence.top1 == pytest.approx((p.argmax(axis=1) == q.argmax(axis=1)).mean())
    targets = [token for window in windows for token in window.token_ids[window.first :]]
    assert report.perplexity.perplexity == pytest.approx(np.exp(-q[range(len(q)), targets].mean()), rel=1e-3)
    assert report.divergence.reference_perplexity == pytest.approx(np.exp(-p[range(len(p)), targets].mean()), rel=1e-3)
    np.testing.assert_allclose(tokens.kl, kl, atol=1e-2)
    [folder] = (tmp_path / "kept").iterdir()
    made_at = (folder / "logprobs.npy").stat().st_mtime_ns
    again, _ = evaluate_text(str(tiny), read_text(text), wanted, reference=kept)
    assert again.divergence is not None
    assert again.divergence.mean_kl < 1e-4
    assert again.divergence.top1 == 1
    assert (folder / "logprobs.npy").stat().st_mtime_ns == made_at  # found, not made again
    (folder / "top1.npy").write_bytes(b"\x93NUMPY")  # half a file is no reference
    evaluate_text(str(tiny), read_text(text), wanted, reference=kept)
    assert (folder / "logprobs.npy").stat().st_mtime_ns > made_at


def test_a_file_is_read_once_for_all_references_until_it_changes(tmp_path: Path) -> None:
    file, seen = tmp_path / "a.gguf", []
    file.write_bytes(b"a" * 1000)

    def key(*facts: object) -> str:
        return reference_key([file], *facts, progress=lambda done, total: seen.append((done, total)))

    names = [key(1), key(2), key(1)]
    assert names[0] == names[2] != names[1]
    assert seen == [(1000, 1000)]
    file.write_bytes(b"b" * 1001)
    assert key(1) not in names
    assert len(seen) == 2


def test_references_keep_to_their_limit(tiny: Path, tmp_path: Path) -> None:
    windows = [Window([2, 3, 4, 5], 1, 1)]
    with Scorer(scorer_config(str(tiny), 4, {})) as scorer:
        store = ReferenceStore(60, tmp_path)  # 3 rows of 8 tokens in float16 take 48 bytes
        store.make("first", windows, 8, scorer.score(windows, wants_logits=True))
        assert store.find("first") is not None
        for name in (".new-killed", ".new-busy"):
            (tmp_path / name).mkdir()
        os.utime(tmp_path / ".new-killed", (0, 0))
        store.make("second", windows, 8, scorer.score(windows, wants_logits=True))
        assert [path.name for path in tmp_path.glob(".new-*")] == [".new-busy"]
        assert store.find("first") is None
        assert store.find("second") is not None
        with pytest.raises(UsageError, match=r"3 positions take 48 B on disk, and the limit is 40 B"):
            ReferenceStore(40, tmp_path).make("third", windows, 8, scorer.score(windows, wants_logits=True))
    assert reference_key([tiny], 1) != reference_key([tiny], 2)


def test_the_command_writes_figures_and_tokens(tiny: Path, text: Path, tmp_path: Path) -> None:
    options = ("--text", text, "--window", "16", "--tokens", "64")
    done = octavo_here("eval", tiny, *options, "--per-token", tmp_path / "tokens.jsonl", "--json")
    report = json.loads(done.stdout)
    lines = [json.loads(line) for line in (tmp_path / "tokens.jsonl").read_text().splitlines()]
    assert len(lines) == report["perplexity"]["num_tokens"] == 4 * 7
    assert np.exp(np.mean([line["loss"] for line in lines])) == pytest.approx(report["perplexity"]["perplexity"])
    shown = octavo_here("eval", tiny, *options, "--convention", "strided", "--stride", "8").stdout
    assert "strided: windows of 16 tokens, 8 apart" in shown
    assert "llama.cpp's: chunks of 16 tokens" in octavo_here("eval", tiny, *options).stdout


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("", (), "is empty"),
        ("  \n", (), "is empty"),
        ("abca", (), "the text has 3 tokens; at least 16 are needed"),
        ("\udcff", (), "byte 0 is not UTF-8"),
        (TEXT, ("--tokens", "9"), "9 tokens are fewer than one window of 16"),
        (TEXT, ("--stride", "4"), "--stride applies only to --convention strided"),
        (TEXT, ("--convention", "strided", "--stride", "17"), "stride is 17; it must be from 1 to"),
        (TEXT, ("--limit", "3"), "--limit applies only to tasks"),
        (TEXT, ("--reference-backend", "reference"), "--reference-backend needs --reference"),
        (TEXT, ("--per-token", "/nowhere/tokens.jsonl"), "/nowhere: no such directory"),
        (TEXT, ("--task", "t.jsonl"), "--text applies only to a text: leave out --task"),
    ],
)
def test_wrong_inputs_end_in_one_line(
    content: str, options: tuple[str, ...], words: str, tiny: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content.encode(errors="surrogateescape"))
    done = octavo_here("eval", tiny, "--text", text, "--window", "16", *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_models_that_cannot_be_scored(tiny: Path, damaged: Path, text: Path, tmp_path: Path) -> None:
    done = octavo_here("eval", damaged, "--text", text, "--window", "16")
    assert done.returncode == 1
    assert re.search(r"token 9 of the text cannot be scored: the model's logits contain NaN", done.stderr)
    encoder = save_encoder("bert", tmp_path / "encoder")
    for more in (("--window", "16"), ("--task", _task(tmp_path))):
        done = octavo_here("eval", encoder, *more)
        assert done.returncode == 2
        assert "produces no logits: it is an encoder or a reranker" in done.stderr
    missing = octavo_here("eval", tiny, "--text", tmp_path / "none.txt")
    assert "No such file" in missing.stderr


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.0.attn_v.weight", "blk.0.ffn_gate.weight", "output_norm.weight"])
def test_weights_that_are_no_numbers_are_named(name: str, value: float, tiny: Path, tmp_path: Path) -> None:
    """Also those whose infinity would not reach the logits."""
    path = spoilt(tiny, name, value)
    for command in (("--window", "16"), ("--task", _task(tmp_path))):
        result = CliRunner().invoke(evaluate, [str(path), *map(str, command)])
        assert isinstance(result.exception, NumericalError)
        assert re.search(r"tensor '.*' contains NaN or infinity.*; use an intact model", str(result.exception))
        assert "\n" not in str(result.exception)


def test_infinite_values_of_a_model_are_noticed(tiny: Path) -> None:
    """A value beyond float32, of weights that are numbers, is no large number in the cache."""
    path = spoilt(tiny, "blk.0.attn_v.weight", 3e38)
    with LLM(str(path), max_model_len=64) as llm, pytest.raises(NumericalError, match="logits contain NaN"):
        llm.generate("abcd", SamplingParams(max_tokens=4))


def _task(folder: Path) -> Path:
    path = folder / "task.jsonl"
    path.write_text('{"query": "ab", "choices": ["c", "d"], "gold": 0}\n')
    return path
