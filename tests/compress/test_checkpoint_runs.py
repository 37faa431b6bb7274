"""Quantizing layer by layer: folding changes nothing, errors are smaller, killed runs go on, mistakes end in a line."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.compress.checkpoints import gptq
from octavo.compress.checkpoints.awq import quantized as awq_quantized
from octavo.compress.checkpoints.awq import searched_scale
from octavo.compress.checkpoints.calibration import read_calibration
from octavo.compress.checkpoints.folding import ColumnFold, smoothing_scale
from octavo.compress.checkpoints.grids import GridForm, clipped_grid, grouped, nearest, searched_grid
from octavo.compress.checkpoints.input_statistics import InputObserver, InputStatistics
from octavo.compress.checkpoints.methods import Choices, choose_method
from octavo.compress.checkpoints.quantization_plan import plan_quantization
from octavo.compress.checkpoints.write import quantize_checkpoint
from octavo.errors import ModelLoadError, ModelWriteError, UsageError
from octavo.graph.values import Parameter
from octavo.loader.checkpoint import open_checkpoint
from octavo.quantization.checkpoints._stored import StoredTensor, stored_tensor
from octavo.quantization.ggml_blocks import Floats
from octavo.quantization.packed import DenseWeight, GroupedWeight
from tests.compress.test_checkpoint_types import parts_of, run, save_source
from tests.models.test_parity import assert_close, logits_of
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("runs") / "model")


def inputs(width: int, rows: int = 2048) -> Floats:
    """Rows with some large columns, of which many depend on each other, as activations do."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, width)) @ rng.normal(size=(width, width)) / np.sqrt(width)
    return np.asarray(x * np.exp(rng.normal(size=width)), np.float32)


def error_of(found: Floats, matrix: Floats, gram: Floats) -> float:
    """Of the product, for inputs with this Gram matrix."""
    difference = found - matrix
    return float(np.einsum("rc,rc->", difference @ gram, difference))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_is_the_algorithm_of_the_paper(bits: int, act_order: bool) -> None:
    """Column by column with the whole inverse updated each time (Frantar et al., equations 2 and 3), in float64."""
    matrix = np.random.default_rng(2).normal(size=(24, 160)).astype(np.float32)
    x = inputs(160)
    gram, form = x.T @ x, GridForm(bits, 32, True)
    found = gptq.quantized(matrix, gptq.factor_of(gram, gptq.GPTQOptions(act_order, 0.05)), form)
    order = np.argsort(-np.diagonal(gram), kind="stable") if act_order else np.arange(160)
    hessian = gram[np.ix_(order, order)].astype(np.float64)
    inverse = np.linalg.inv(hessian + 0.05 * np.diagonal(hessian).mean() * np.eye(160))
    w = matrix[:, order].astype(np.float64)
    result = np.empty_like(w)
    scales = found.scales.astype(np.float64)
    for i in range(160):
        code = np.clip(np.rint(w[:, i] / scales[:, i // 32]), -(1 << bits - 1), (1 << bits - 1) - 1)
        result[:, i] = code * scales[:, i // 32]
        error = (w[:, i] - result[:, i]) / inverse[i, i]
        w -= error[:, None] * inverse[i]
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    expected = np.empty_like(result)
    expected[:, order] = result
    # The factor is kept in float32: a number halfway between two codes may fall to the other side.
    assert np.isclose(found.dequantize(), expected, rtol=1e-4, atol=1e-6).mean() > 0.95


def test_the_default_damping_lowers_the_error_of_other_inputs_than_those_it_saw() -> None:
    """Fewer inputs than columns, as with a short text: without damping their noise is taken for structure."""
    matrix = np.random.default_rng(5).normal(size=(64, 256)).astype(np.float32)
    seen, other = np.split(inputs(256), [200])
    form, method = GridForm(4, 128, True), choose_method("gptq-4bit", Choices(), [256], "bfloat16")

    def error(weight: GroupedWeight) -> float:
        return float(np.square(other @ (weight.dequantize() - matrix).T).sum())

    found = error(method.weight(matrix, InputStatistics(seen.T @ seen, seen.max(0), 200)))
    barely = gptq.factor_of(seen.T @ seen, gptq.GPTQOptions(damping=0.01))
    assert found < 0.9 * error(gptq.quantized(matrix, barely, form))
    assert found < 0.9 * error(nearest(matrix, form))


@pytest.mark.parametrize(("kind", "most"), [("gptq-4bit", 0.7), ("awq", 0.8)])
def test_an_attention_sink_does_not_spoil_the_other_tokens(kind: str, most: float) -> None:
    """One token of 512 is 100 times as large, as before `down_proj` of Qwen2.5: it must not be served at their cost."""
    matrix = np.random.default_rng(7).normal(size=(64, 256)).astype(np.float32)
    seen, other = np.split(inputs(256), [1024])
    sink = np.random.default_rng(8).normal(size=256).astype(np.float32)
    sink *= 100 * np.linalg.norm(seen, axis=1).mean() / np.linalg.norm(sink)
    seen[::512] = sink
    method = choose_method(kind, Choices(), [256], "bfloat16")
    rounded = nearest(matrix, method.form)
    observer = InputObserver(lambda *_: "m", method.evenness)
    observer(Parameter("m", (64, 256)), seen, None)
    found = method.weight(matrix, observer.found["m"])

    def error(weight: GroupedWeight, x: Floats) -> float:
        return float(np.square(x @ (weight.dequantize() - matrix).T).sum())

    assert error(found, other) < most * error(rounded, other)
    assert error(found, sink[None]) < error(rounded, sink[None])


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_error_of_the_product_is_much_smaller_than_of_rounding(method: str) -> None:
    matrix = np.random.default_rng(3).normal(size=(64, 256)).astype(np.float32)
    statistics = InputStatistics.empty(256)
    statistics.add(inputs(256))
    form = GridForm(4, 64, method == "gptq")
    if method == "gptq":
        weight = gptq.quantized(matrix, gptq.factor_of(statistics.gram, gptq.GPTQOptions()), form)
    else:
        weight = awq_quantized(matrix, statistics, form)
    plain = error_of(nearest(matrix, form).dequantize(), matrix, statistics.gram)
    assert error_of(weight.dequantize(), matrix, statistics.gram) < (0.6 if method == "gptq" else 0.95) * plain


@pytest.mark.parametrize("sign", [1, -1])
def test_a_symmetric_grid_lends_its_further_code_to_either_side(sign: int) -> None:
    """Whole numbers from -8 to 7, or from -7 to 8, are on a symmetric grid of 4 bits."""
    values = (sign * np.arange(-8, 8, dtype=np.float32))[None].repeat(2, 0)
    form = GridForm(4, 16, True)
    grid = searched_grid(values, np.ones(16, np.float32), form)
    assert (grid.scale < 0).all() == (sign < 0)
    error = grid.rounded(values, form.largest) - values
    plain = nearest(values, form).dequantize() - values
    assert np.square(error).sum() < 0.3 * np.square(plain).sum()


def test_awq_fits_the_scale_of_each_group() -> None:
    """For the codes and zero that it chose, no other float16 scale near its own has a smaller error of the product."""
    matrix = np.random.default_rng(6).standard_t(4, size=(32, 64)).astype(np.float32)
    x, form = inputs(64), GridForm(4, 64, False)
    gram = x.T @ x
    grid = clipped_grid(grouped(matrix, form), gram[None], form)
    codes = grid.codes(grouped(matrix, form), form.largest)[:, 0]
    steps, scales = codes - grid.zero, grid.scale

    def errors(scale: Floats) -> Floats:
        difference = steps * scale - matrix
        return np.einsum("rc,rc->r", difference @ gram, difference)

    assert errors(scales).sum() < 0.9 * error_of(nearest(matrix, form).dequantize(), matrix, gram)
    others = [errors(scales * np.float32(factor)) for factor in (0.97, 1.03)]
    assert np.mean([(errors(scales) <= other).mean() for other in others]) > 0.75


def test_awq_gives_each_column_a_scale_of_its_own() -> None:
    """Few columns have large inputs and middling weights: powers of the inputs scale the wrong ones with them."""
    rng = np.random.default_rng(7)
    matrix = rng.normal(size=(128, 128)).astype(np.float32)
    sizes = np.ones(128, np.float32)
    sizes[:8], sizes[8:16] = 20, 20
    matrix[:, 8:16] *= 4  # whose scale would widen every group
    x = rng.normal(size=(1024, 128)).astype(np.float32) * sizes
    gram, form = x.T @ x, GridForm(4, 64, False)
    statistics = InputStatistics(gram, np.abs(x).max(0), len(x))
    scale = searched_scale(ColumnFold((), ()), statistics, [matrix], form)
    assert scale[:8].mean() > 1.5 * scale[8:16].mean() > scale[16:].mean()
    plain = error_of(nearest(matrix, form).dequantize(), matrix, gram)
    scaled = nearest(matrix * scale, form).dequantize() / scale
    assert error_of(scaled, matrix, gram) < 0.6 * plain


def test_awq_does_not_trade_small_matrices_for_large_ones() -> None:
    """Queries and values read the same inputs; a factor of the queries alone changes no scale."""
    rng = np.random.default_rng(8)
    queries, values = (rng.normal(size=(64, 128)).astype(np.float32) for _ in range(2))
    values[:, ::2] *= 3
    statistics = InputStatistics.empty(128)
    statistics.add(inputs(128))
    form, fold = GridForm(4, 64, False), ColumnFold((), ())
    once, larger = (searched_scale(fold, statistics, [queries * f, values], form) for f in (1, 64))
    np.testing.assert_allclose(larger, once, rtol=1e-2)
    assert not np.allclose(once, 1)


def test_smoothing_moves_the_range_of_large_inputs_into_the_weights() -> None:
    """The formula of SmoothQuant; int8 products of inputs with large columns are nearer with it than without."""
    rng = np.random.default_rng(9)
    x, matrix = rng.normal(size=(256, 128)).astype(np.float32), rng.normal(size=(64, 128)).astype(np.float32)
    x[:, ::16] *= 60
    scale = smoothing_scale(np.abs(x).max(0), [matrix, matrix / 2], 0.5)
    np.testing.assert_allclose(scale, np.sqrt(np.abs(x).max(0) / np.abs(matrix).max(0)), rtol=1e-5)

    def error(a: Floats, w: Floats) -> float:
        steps = [np.abs(m).max(1, keepdims=True) / 127 for m in (a, w)]
        a, w = (np.rint(m / step) * step for m, step in zip((a, w), steps, strict=True))
        return float(np.square(a @ w.T - x @ matrix.T).sum())

    assert error(x / scale, matrix * scale) < 0.3 * error(x, matrix)


@pytest.mark.parametrize(("strength", "changed"), [("0.5", True), ("0", False)])
def test_w8a8_smooths_the_norms_as_far_as_it_is_asked(
    strength: str, changed: bool, source: Path, tmp_path: Path
) -> None:
    options = ("--calibration", source / "calibration.md", "--calibration-chunks", 1, "--smoothing", strength)
    assert run(source, tmp_path / "out", "--type", "w8a8", *options)[0] == 0
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    norms = [name for name in before if name.endswith("layernorm.weight")]
    assert len(norms) == 6
    assert all(torch.equal(before[name], after[name]) != changed for name in norms)


class Scaling:
    """Scales every fold that it is offered, and quantizes nothing."""

    kind, needs_inputs, evenness, form = "awq", True, 0.0, GridForm(4, 32, False)

    def __init__(self) -> None:
        self.folds: list[ColumnFold] = []

    def scale(self, fold: ColumnFold, statistics: InputStatistics, _: list[Floats]) -> Floats:
        self.folds.append(fold)
        rows = np.random.default_rng(4).uniform(0.5, 2, len(fold.shared(statistics.largest))).astype(np.float32)
        return fold.spread(rows)

    def weight(self, matrix: Floats, statistics: InputStatistics | None) -> DenseWeight:
        assert statistics is not None
        return DenseWeight(matrix)

    def tensors(self, weight: DenseWeight) -> dict[str, StoredTensor]:
        return {"weight": stored_tensor(weight.data)}


@pytest.mark.parametrize(
    ("name", "layers", "folds"),
    [("llama", 2, 8), ("qwen2", 3, 12), ("gemma", 2, 8), ("phi3", 2, 4), ("cohere2", 4, 12)],
)
def test_folding_changes_no_logits(
    name: str, layers: int, folds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms with and without an offset, shared heads, biases, fused matrices, and branches that share a norm."""
    source = save_source(tmp_path / "m", name, torch.float32, num_hidden_layers=layers, pad_token_id=0)
    method = Scaling()
    monkeypatch.setattr("octavo.compress.checkpoints.write._identity", lambda *_: {})
    monkeypatch.setattr("octavo.compress.checkpoints.write._write_config", lambda *_: None)
    with closing(open_checkpoint(source)) as checkpoint:
        before = logits_of(checkpoint)
        texts = read_calibration(source / "calibration.md", checkpoint, 1)
        plan: Any = plan_quantization(checkpoint, [])
        quantize_checkpoint(plan, method, texts, tmp_path / "out", max_shard_bytes=None, report=lambda *_: None)  # type: ignore[arg-type]
    assert len(method.folds) == folds
    shutil.copyfile(source / "config.json", tmp_path / "out/config.json")
    changed = load_file(tmp_path / "out/model.safetensors")
    assert sum(not torch.equal(t, changed[n]) for n, t in load_file(source / "model.safetensors").items()) >= 2 * folds
    with closing(open_checkpoint(tmp_path / "out")) as checkpoint:
        assert_close(logits_of(checkpoint), before, 1e-4)


def test_a_later_layer_sees_what_the_earlier_ones_have_become(source: Path, tmp_path: Path) -> None:
    """Layers 1 and 2 get other codes if layer 0 keeps its numbers."""
    options = ("--type", "gptq-2bit", "--calibration", source / "calibration.md", "--calibration-chunks", 2)
    assert run(source, tmp_path / "a", *options)[0] == 0
    assert run(source, tmp_path / "b", *options, "--keep", r"layers\.0\.")[0] == 0
    a, b = (parts_of(tmp_path / name)[0] for name in "ab")
    assert {stem.split(".")[2] for stem in a} - {stem.split(".")[2] for stem in b} == {"0"}
    assert not any(torch.equal(a[stem]["qweight"], b[stem]["qweight"]) for stem in b)
    config = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert r"-:^model\.layers\.0\.mlp\.up_proj$" in config["dynamic"]


def test_a_killed_run_is_no_model_and_goes_on(tmp_path: Path) -> None:
    source = save_source(tmp_path / "m", num_hidden_layers=12)
    command = [sys.executable, "-m", "octavo", "quantize", str(source), "--type", "gptq-4bit", "--calibration"]
    command += [str(source / "calibration.md"), "--calibration-chunks", "8"]
    process = subprocess.Popen([*command[:5], str(tmp_path / "out"), *command[5:]], stderr=subprocess.DEVNULL)
    work = tmp_path / "out.partial/work"

    def has_third_layer() -> bool:
        assert process.poll() is None
        return (work / "layer-00002.safetensors").exists()

    try:
        wait_until(has_third_layer, seconds=150)
    finally:
        process.kill()
        process.wait()
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelLoadError):
        open_checkpoint(tmp_path / "out.partial")
    finished = len(list(work.glob("layer-*.safetensors")))
    assert 3 <= finished < 12
    ended = subprocess.run([*command[:5], str(tmp_path / "out"), *command[5:]], capture_output=True, text=True)
    assert f"{finished} of 12 layers were finished by an earlier run" in ended.stderr
    assert ended.returncode == 0
    assert not (tmp_path / "out.partial").exists()
    assert run(source, tmp_path / "whole", *command[5:])[0] == 0
    whole, gone_on = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert whole.keys() == gone_on.keys()
    assert all(torch.equal(tensor, gone_on[name]) for name, tensor in whole.items())


def test_a_disk_that_is_full_at_the_end_costs_no_work(tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: the model is the only one that is larger."""
    source = save_source(tmp_path / "m", num_hidden_layers=16)
    command = [sys.executable, "-m", "octavo", "quantize", str(source), str(tmp_path / "out"), "--type", "gptq-8bit"]
    command += ["--calibration", str(source / "calibration.md"), "--calibration-chunks", "1"]
    failed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )
    assert failed.returncode == 4
    assert failed.stderr.splitlines()[-1].endswith("out.partial/model.safetensors.partial: File too large")
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "out").exists()
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "16 of 16 layers were finished by an earlier run" in ended.stderr
    assert ended.returncode == 0
    with closing(open_checkpoint(tmp_path / "out")) as checkpoint:
        assert checkpoint.quantization == "gptq"


def test_unfinished_work_for_another_result_is_not_used(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial/work").mkdir(parents=True)
    (tmp_path / "out.partial/work/plan.json").write_text('{"version": 0}')
    (tmp_path / "out.partial/work/layer-00000.safetensors").write_bytes(b"x")
    code, _, err = run(source, tmp_path / "out", "--type", "fp8")
    assert code == 0, err
    assert "were finished" not in err


def test_shards_of_a_run_that_failed_are_not_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run has written its shards; the second goes on with its layers and writes one file."""
    source, out = save_source(tmp_path / "m"), tmp_path / "out"

    def fail(*_: object) -> None:
        raise ModelWriteError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("octavo.compress.checkpoints.write._copy_others", fail)
        assert "the disk is full" in run(source, out, "--type", "rtn-4bit", "--max-part-size", "100KB")[2]
    assert len(list((tmp_path / "out.partial").glob("model-*-of-*.safetensors"))) > 1
    code, _, err = run(source, out, "--type", "rtn-4bit")
    assert code == 0
    assert "layers were finished by an earlier run" in err
    assert [path.name for path in out.iterdir() if "safetensors" in path.name] == ["model.safetensors"]


def test_work_for_another_configuration_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = save_source(tmp_path / "m"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("octavo.compress.checkpoints.write._copy_others", lambda *_: 1 / 0)
        run(source, out, "--type", "rtn-4bit")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rope_theta": 5e4}))
    code, _, err = run(source, out, "--type", "rtn-4bit")
    assert code == 0
    assert "were finished" not in err


def test_fewer_tokens_than_columns_bring_a_warning(tmp_path: Path) -> None:
    source = save_source(tmp_path / "m", intermediate_size=1024)
    options = ("--type", "gptq-4bit", "--calibration", source / "calibration.md", "--calibration-chunks")
    _, _, few = run(source, tmp_path / "few", *options, 1)
    assert "has 512 tokens, fewer than the 1,024 columns of the widest matrix" in few
    assert "fewer than" not in run(source, tmp_path / "more", *options, 2)[2]


def test_conversations_are_written_out_by_the_template(tmp_path: Path) -> None:
    source = save_source(tmp_path / "m")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    lines = [
        {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        {"text": "<user>one<assistant>two"},
        {"prompt": "<user>one", "completion": "<assistant>two"},
    ]
    found = []
    with closing(open_checkpoint(source)) as checkpoint:
        for line in lines:
            (tmp_path / "c.jsonl").write_text(json.dumps(line) + "\n\n")
            found.append(read_calibration(tmp_path / "c.jsonl", checkpoint, 4)[0].tolist())
        assert len(found[0]) > 4
        assert all(ids == found[0] for ids in found)
        for text, message in (
            ("{", "c.jsonl:1 is not valid JSON"),
            ('{"a": 1}', "c.jsonl:1: write an object with text"),
            ("", "is empty"),
        ):
            (tmp_path / "c.jsonl").write_text(text)
            with pytest.raises(UsageError, match=message):
                read_calibration(tmp_path / "c.jsonl", checkpoint, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--type", "gptq"), "add the number of bits: gptq-2bit, gptq-3bit, gptq-4bit, gptq-8bit"),
        (("--type", "gptq-4bit"), "needs --calibration FILE"),
        (("--type", "nf4", "--calibration", "calibration.md"), "--calibration does not apply to --type nf4"),
        (("--type", "awq", "--act-order"), "--act-order does not apply to --type awq"),
        (("--type", "fp8", "--group-size", "64"), "--group-size does not apply to --type fp8"),
        (("--type", "fp8", "--tensor-type", "a=q8_0"), "--tensor-type is for GGUF types"),
        (("--type", "fp8", "--threads", "2"), "--threads is for GGUF types"),
        (("--type", "q4_k_m", "--act-order"), "--act-order does not apply to --type q4_k_m and a GGUF file"),
        (("--type", "q4_k_m", "--smoothing", "0"), "--smoothing does not apply to --type q4_k_m and a GGUF file"),
        (("--type", "fp8", "--keep", "nothing"), "pattern 'nothing' matches no matrix; names look like model.layers.0"),
        (("--type", "awq", "--calibration", "empty.txt"), "empty.txt is empty; give a few pages of text"),
    ],
)
def test_mistakes_end_in_one_line(source: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (source / "empty.txt").write_text("")
    given = [source / a if a.endswith((".md", ".txt")) else a for a in arguments]
    code, _, err = run(source, tmp_path / "out", *given)
    assert code != 0
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_width_that_groups_do_not_divide(tmp_path: Path) -> None:
    source = save_source(tmp_path / "m", intermediate_size=288)
    code, _, err = run(source, tmp_path / "out", "--type", "rtn-4bit", "--group-size", 128)
    assert code != 0
    assert "rows of 288 numbers, not a multiple of the group size 128; use --group-size 32 or -1" in err
    assert run(source, tmp_path / "out", "--type", "rtn-4bit")[0] == 0
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["group_size"] == 32


@pytest.mark.parametrize("type_name", ["fp8", "gptq-4bit"])
def test_weights_that_are_no_numbers_are_named(type_name: str, tmp_path: Path) -> None:
    source = save_source(tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    options = ("--calibration", source / "calibration.md") if type_name != "fp8" else ()
    code, _, err = run(source, tmp_path / "out", "--type", type_name, *options)
    assert code != 0
    assert "'model.layers.1.mlp.up_proj.weight'" in err
    assert "contains NaN or infinity" in err
    assert not (tmp_path / "out").exists()


def test_only_a_models_folder_is_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letters.txt").write_text("dear")
    assert "already exists; --force replaces it" in run(source, tmp_path / "out", "--type", "fp8")[2]
    assert "--force only replaces a model's folder" in run(source, tmp_path / "out", "--type", "fp8", "--force")[2]
    (tmp_path / "out/config.json").write_text("{}")
    assert run(source, tmp_path / "out", "--type", "fp8", "--force")[0] == 0
    assert not (tmp_path / "out/letters.txt").exists()
    code, _, err = run(tmp_path / "out", tmp_path / "again", "--type", "fp8")
    assert code != 0
    assert "already quantized by compressed-tensors" in err


def test_the_default_options_are_the_fields_usual_ones() -> None:
    method = choose_method("gptq-4bit", Choices(), [256, 384], "bfloat16")
    config = method.config(["lm_head"])
    assert (config["bits"], config["group_size"], config["sym"], config["desc_act"]) == (4, 128, True, False)
    assert config["damp_percent"] == 1
    assert "dynamic" not in config


def test_each_expert_is_calibrated_by_the_tokens_that_chose_it(tmp_path: Path) -> None:
    """A short text leaves experts out: these are rounded to the nearest, are counted, and all others are not."""
    sizes = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    source = save_source(tmp_path / "m", "qwen3moe", **sizes)
    (source / "calibration.md").write_text("fox")
    options = ("--calibration", source / "calibration.md", "--group-size", 32)
    code, _, error = run(source, tmp_path / "gptq", "--type", "gptq-4bit", *options)
    assert code == 0, error
    assert run(source, tmp_path / "rtn", "--type", "rtn-4bit", "--group-size", 32)[0] == 0
    calibrated, rounded = (parts_of(tmp_path / name)[0] for name in ("gptq", "rtn"))
    experts = [name for name in rounded if ".experts." in name]
    assert len(experts) == 2 * 16 * 3
    same = [name for name in experts if torch.equal(calibrated[name]["qweight"], rounded[name]["qweight"])]
    assert 0 < len(same) < len(experts)
    assert f"reached {len(same)} matrices of experts, such as {same[0].partition('.experts.')[0]}" in error
