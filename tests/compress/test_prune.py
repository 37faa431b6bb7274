"""Pruned models: what goes is what matters least, and what is left is the model without it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from octavo.backends.layers import layers_of, run_layer
from octavo.cli.prune import prune as command
from octavo.cli.quantize import tokens_of
from octavo.compress.importance import split_text
from octavo.compress.prune import block_influence, sparse_matrix
from octavo.compress.to_gguf import gguf_form_of
from octavo.errors import UsageError
from octavo.graph.values import Parameter
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.loader.gguf import open_gguf
from octavo.models import build_graph
from tests.compress.models import write_model
from tests.compress.test_convert import save
from tests.support.processes import octavo_here

TEXT = "ab cd a b dcab abcd bb cc " * 5
TOKENS = np.array([2, 3, 4, 5, 6, 7, 2, 4, 3, 5], np.int32)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prune")
    (folder / "text.txt").write_text(TEXT)
    return write_model(folder / "model.gguf", layers=4)


def run(source: Path, path: Path, *options: object) -> tuple[int, str, str]:
    arguments = [source, path, "--calibration", source.parent / "text.txt", "--dtype", "f32", *options]
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


def logits(checkpoint: Checkpoint, tokens: np.ndarray = TOKENS) -> np.ndarray:
    graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
    values: list[tuple[np.ndarray, ...]] = [()]
    for layer in layers_of(graph):
        values = run_layer(layer, checkpoint.weights, [tokens], values)
    return values[0][0]


def test_layers_go_by_their_influence(source: Path, tmp_path: Path) -> None:
    """A layer whose outputs are nearly zero goes first; the others are as before, under new numbers."""
    import gguf

    quiet = tmp_path / "quiet.gguf"
    data = bytearray(source.read_bytes())
    for name in ("attn_output", "ffn_down"):
        info = open_gguf(source).tensors[f"blk.2.{name}.weight"]
        data[info.offset : info.offset + info.nbytes] = bytes(info.nbytes)
    quiet.write_bytes(data)
    (tmp_path / "text.txt").write_text(TEXT)
    with closing(open_checkpoint(quiet)) as checkpoint:
        graph = build_graph(checkpoint.architecture, checkpoint.config, checkpoint.weights.shapes)
        influence = block_influence(checkpoint, graph, [TOKENS])
        before = logits(checkpoint)
    assert influence[0] == np.inf
    assert influence[2] == pytest.approx(0, abs=1e-6)
    assert min(influence[1], influence[3]) > 1e-3
    path = tmp_path / "pruned.gguf"
    code, out, error = run(quiet, path, "--layers", 1)
    assert code == 0, error
    assert "layers 2: block influence 0.0000" in out
    with closing(open_checkpoint(path)) as after:
        assert after.config.num_layers == 3
        np.testing.assert_allclose(logits(after), before, atol=2e-4)
    assert gguf.GGUFReader(path).fields["llama.block_count"].contents() == 3


def test_heads_and_columns(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "pruned.gguf"
    code, out, error = run(source, path, "--heads", 0.5, "--ffn", 0.25)
    assert code == 0, error
    assert "heads: 4 of 8 remain in each layer, and 2 of keys" in out
    assert "feed-forward columns: 192 of 256" in out
    with closing(open_checkpoint(path)) as after:
        assert (after.config.num_heads, after.config.num_kv_heads, after.config.head_dim) == (4, 2, 32)
        assert after.weights.shapes["layers.0.mlp.down_proj.weight"] == (256, 192)
        assert np.isfinite(logits(after)).all()


def test_heads_that_do_nothing_change_nothing(source: Path, tmp_path: Path) -> None:
    """Two groups of heads have no weights in the output projection: without them the logits stay."""
    quiet = tmp_path / "quiet.gguf"
    data = bytearray(source.read_bytes())
    for layer in range(4):
        info = open_gguf(source).tensors[f"blk.{layer}.attn_output.weight"]
        values = np.frombuffer(data, np.float16, 256 * 256, info.offset).reshape(256, 256)
        values[:, 64:192] = 0  # groups 1 and 2 of 4, of two heads of 32 columns each
    quiet.write_bytes(data)
    (tmp_path / "text.txt").write_text(TEXT)
    assert run(quiet, tmp_path / "p.gguf", "--heads", 0.5)[0] == 0
    with closing(open_checkpoint(quiet)) as before, closing(open_checkpoint(tmp_path / "p.gguf")) as after:
        np.testing.assert_allclose(logits(after), logits(before), atol=2e-4)


@pytest.mark.parametrize(
    ("reader", "maker", "share", "option"),
    [("attn_output", "attn_v", slice(64, 192), "--heads"), ("ffn_down", "ffn_up", slice(64, 192), "--ffn")],
)
def test_what_no_input_reaches_goes_whatever_its_weights_are(
    reader: str, maker: str, share: slice, option: str, source: Path, tmp_path: Path
) -> None:
    """Half of the columns have large weights, and inputs of zero: by magnitude alone the others would go."""
    quiet = tmp_path / "quiet.gguf"
    data = bytearray(source.read_bytes())
    heads = slice(32, 96) if maker == "attn_v" else share  # the values of groups 1 and 2, which two heads share each
    for layer in range(4):
        for name, rows, columns, factor in ((maker, heads, slice(None), 0), (reader, slice(None), share, 50)):
            info = open_gguf(source).tensors[f"blk.{layer}.{name}.weight"]
            values = np.frombuffer(data, np.float16, info.nbytes // 2, info.offset).reshape(info.shape)
            values[rows, columns] *= np.float16(factor)
    quiet.write_bytes(data)
    (tmp_path / "text.txt").write_text(TEXT)
    code, _, error = run(quiet, tmp_path / "p.gguf", option, 0.5)
    assert code == 0, error
    with closing(open_checkpoint(quiet)) as before, closing(open_checkpoint(tmp_path / "p.gguf")) as after:
        np.testing.assert_allclose(logits(after), logits(before), atol=2e-4)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_a_layer_is_made_sparse_by_what_the_sparse_layers_before_it_make(method: str, tmp_path: Path) -> None:
    """The second layer's matrices by hand, from inputs that the first one makes with and without its zeros."""
    source, path = write_model(tmp_path / "m.gguf"), tmp_path / "p.gguf"
    (tmp_path / "text.txt").write_text("ab cd a b " * 3)
    code, _, error = run(source, path, "--sparsity", "0.5", "--method", method)
    assert code == 0, error
    name = "layers.1.self_attn.q_proj.weight"
    with closing(open_checkpoint(source)) as whole, closing(open_checkpoint(path)) as pruned:
        first, second = layers_of(build_graph(whole.architecture, whole.config, whole.weights.shapes))
        ids, begin = tokens_of(whole, tmp_path / "text.txt")
        texts = split_text(ids, 8, begin)
        made = []
        for checkpoint in (pruned, whole):
            inputs: list[np.ndarray] = []

            def observe(parameter: Parameter, x: np.ndarray, _: int | None, found: list[np.ndarray] = inputs) -> None:
                if parameter.name == name:
                    found.append(x.astype(np.float64))

            values = run_layer(first, checkpoint.weights, texts, [()] * len(texts))
            run_layer(second, whole.weights, texts, values, observe=observe)
            x = np.concatenate(inputs)
            products = x.T @ x if method == "sparsegpt" else np.square(x).sum(axis=0)
            made.append(sparse_matrix(whole.weights[name].dequantize(), products, 0.5, method))  # type: ignore[arg-type]
        found = pruned.weights[name].dequantize()
    np.testing.assert_allclose(found, made[0], rtol=1e-3, atol=1e-5)
    assert ((made[0] != 0) != (made[1] != 0)).any()


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("sparsity", ["0.5", "2:4"])
def test_sparse_models(tmp_path: Path, method: str, sparsity: str) -> None:
    source, path = write_model(tmp_path / "m.gguf", layers=1), tmp_path / "p.gguf"
    (tmp_path / "text.txt").write_text("ab cd " * 30)
    code, out, error = run(source, path, "--sparsity", sparsity, "--method", method)
    assert code == 0, error
    assert "no kernel skips them" in out
    file = open_gguf(path)
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
        zeros = file.weight(name).dequantize() == 0
        np.testing.assert_array_equal(zeros.sum(axis=1), 128)
        if sparsity == "2:4":
            assert (zeros.reshape(256, -1, 4).sum(axis=2) == 2).all()
    assert (file.weight("token_embd.weight").dequantize() != 0).mean() > 0.99


def test_wanda_by_hand() -> None:
    matrix = np.array([[1, -2, 3, 4], [4, 3, -2, 1]], np.float32)
    norms = np.array([100, 1, 1, 1], np.float64)  # squares: the first column counts ten times as much
    found = sparse_matrix(matrix, norms, 0.5, "wanda")
    np.testing.assert_array_equal(found, [[1, 0, 0, 4], [4, 3, 0, 0]])
    np.testing.assert_array_equal(sparse_matrix(matrix, norms, "2:4", "wanda"), found)


def test_sparsegpt_against_the_exact_solution() -> None:
    """For the mask that it chose, least squares is the best; SparseGPT comes near it, and far below Wanda's error."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 32)) @ rng.normal(size=(32, 32))
    matrix = rng.normal(size=(16, 32)).astype(np.float32)
    products = x.T @ x
    found = sparse_matrix(matrix, products, 0.5, "sparsegpt")
    wanda = sparse_matrix(matrix, np.diag(products), 0.5, "wanda")
    best = np.zeros_like(matrix)
    for row, mask in enumerate(found != 0):
        best[row, mask] = np.linalg.lstsq(x[:, mask], x @ matrix[row], rcond=None)[0]

    def error(w: np.ndarray) -> float:
        return float((((w - matrix) @ x.T) ** 2).sum())

    assert (found == 0).sum() == 16 * 16
    assert error(best) <= error(found) < 0.85 * error(wanda)


def test_a_safetensors_checkpoint(tmp_path: Path) -> None:
    source = save("qwen2", tmp_path / "model")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    with closing(open_checkpoint(source)) as checkpoint:
        gguf_form_of(checkpoint)
    options = ["--calibration", tmp_path / "text.txt", "--layers", 1, "--ffn", 0.5]
    result = CliRunner().invoke(command, [str(a) for a in (source, tmp_path / "p.gguf", *options)])
    assert result.exit_code == 0, result.exception
    with closing(open_checkpoint(tmp_path / "p.gguf")) as after:
        assert after.config.num_layers == 2


def test_the_report_is_that_of_a_comparison(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source and result with every figure; the same numbers as `octavo compare` gives for both files."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "judged.txt").write_text("abcd ab dc" * 30)
    path, options = tmp_path / "pruned.gguf", ("--text", tmp_path / "judged.txt", "--window", 16)
    code, out, error = run(source, path, "--ffn", 0.5, "--report", *options, "--turns", 1, "--threads", 1)
    assert code == 0, error
    for heading in ("size", "bits", "perplexity", "KL mean", "KL p99", "top 1", "decode", "prefill", "memory", "front"):
        assert heading in out
    whole, pruned = (
        line.split() for line in out.splitlines() if line.startswith(("model ", "pruned ")) and "±" in line
    )
    assert (float(whole[3]), float(pruned[3])) == (pytest.approx(16, abs=0.1), pytest.approx(32, abs=0.1))  # bits
    assert "\nuse " in out
    compare = (source, path, "--reference", source, *options, "--turns", 0, "--json", "--num-threads", 1)
    done = octavo_here("compare", *map(str, compare))
    assert done.returncode == 0, done.stderr
    for line, model in zip((whole, pruned), json.loads(done.stdout)["models"], strict=True):
        report = model["report"]
        assert f"{report['perplexity']['perplexity']:.3f}" in line
        assert f"{report['divergence']['mean_kl']:.5f}" in line
    assert (whole[7], pruned[7] > "0.00100") == ("0.00000", True)  # KL mean


def test_models_of_one_name_have_their_paths_in_the_report(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[list[tuple[str, Path]]] = []
    monkeypatch.setattr("octavo.cli.prune.report_models", lambda models, *_: reported.append(models))
    (tmp_path / "judged.txt").write_text("abcd ab dc" * 30)
    same, other = tmp_path / source.name, tmp_path / "pruned.gguf"
    for path in (same, other):
        code, _, error = run(source, path, "--ffn", 0.5, "--report", "--text", tmp_path / "judged.txt", "--window", 16)
        assert code == 0, error
    names = [[name for name, _ in models] for models in reported]
    assert names == [[str(source), str(same)], ["model", "pruned"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to remove"),
        (("--ffn", 0.5, "--turns", 1), "--turns applies only to the report: add --report"),
        (("--ffn", 0.5, "--report", "--text", "/nowhere/text"), "/nowhere/text"),
        (("--ffn", 0.5, "--report", "--reference-cache", "much"), "much"),
        (("--ffn", 0.5, "--report", "--tokens", 16), "16 tokens are fewer than one window of 512"),
        (("--layers", 4), "--layers 4: the model has 4 layers, and at least one must remain"),
        (("--sparsity", "half"), "write a share such as 0.5, or 2:4"),
        (("--sparsity", "1.5"), "must be between 0 and 1"),
        (("--ffn", 0.99), "0 feed-forward columns would remain"),
        (("--heads", 0.9), "0 groups of heads"),
    ],
)
def test_mistakes_end_in_one_line(source: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    code, _, error = run(source, tmp_path / "p.gguf", *options)
    assert code != 0
    assert message in error
    assert not list(tmp_path.iterdir())


def test_experts_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf", experts=4)
    (tmp_path / "text.txt").write_text(TEXT)
    assert "only decoders without experts can be pruned" in run(source, tmp_path / "p.gguf", "--layers", 1)[2]


def test_sparsity_needs_fours() -> None:
    with pytest.raises(UsageError, match="needs a multiple of 4"):
        sparse_matrix(np.ones((2, 6), np.float32), np.ones(6), "2:4", "wanda")
