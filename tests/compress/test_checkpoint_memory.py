"""Calibration layer by layer: what is in memory at a time, and the values between two layers on the disk."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.layers import Tokens, Values, run_layer
from octavo.compress.checkpoints import awq
from octavo.compress.checkpoints.calibration import read_calibration
from octavo.compress.checkpoints.methods import Choices, choose_method
from octavo.compress.checkpoints.quantization_plan import QuantizationPlan, plan_quantization
from octavo.compress.checkpoints.quantize_layers import LayerQuantizer
from octavo.compress.checkpoints.workplace import Workplace
from octavo.compress.checkpoints.write import quantize_checkpoint
from octavo.loader.atomic_folder import AtomicFolder
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.safetensors import open_safetensors
from tests.compress.test_checkpoint_types import save_source

WIDTH = 384
SHAPE = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": 48}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 8}
LAYER_BYTES = 4 * 7 * WIDTH * WIDTH
"""Of the matrices of a layer in float32."""
STATISTICS_BYTES = 4 * 4 * WIDTH * WIDTH
"""The products of the columns of a layer's four inputs: what is kept of the activations."""
TEXT_TOKENS = 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models by their number of layers."""
    folder = tmp_path_factory.mktemp("memory")
    return {layers: save_source(folder / f"{layers}", num_hidden_layers=layers, **SHAPE) for layers in (3, 6)}


def plan_of(checkpoint: object) -> QuantizationPlan:
    return plan_quantization(checkpoint, [])  # type: ignore[arg-type]


def peak_bytes(type_name: str, source: Path, out: Path, num_texts: int) -> int:
    """The most bytes that Python and numpy had at a time, without mapped files, which the system reclaims."""
    with closing(open_checkpoint(source)) as checkpoint:
        plan = plan_of(checkpoint)
        method = choose_method(type_name, Choices(), [WIDTH], "bfloat16")
        whole = read_calibration(source / "calibration.md", checkpoint, num_texts)
        texts = [text[:TEXT_TOKENS] for text in whole]
        tracemalloc.start()
        try:
            quantize_checkpoint(plan, method, texts, out, max_shard_bytes=None, report=lambda *_: None)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("type_name", ["gptq-4bit", "awq", "w8a8"])
def test_two_layers_are_in_memory(
    type_name: str, sources: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the statistics of the inputs; and neither more layers nor more texts change it."""
    monkeypatch.setattr(awq, "_SAMPLED_ROWS", 64)  # of so small matrices, 512 would be nearly all
    few = peak_bytes(type_name, sources[3], tmp_path / "a", 2)
    assert few < 2 * LAYER_BYTES + STATISTICS_BYTES
    assert peak_bytes(type_name, sources[6], tmp_path / "b", 2) < 1.03 * few
    assert peak_bytes(type_name, sources[3], tmp_path / "c", 4) < 1.03 * few


def test_values_between_layers_are_on_the_disk(
    sources: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer begins with what the layer before it made, read from a file that goes when the layer is finished."""
    seen: list[list[Values]] = []
    real = LayerQuantizer._layer

    def layer(self: LayerQuantizer, index: int, weights: object) -> object:
        files = sorted(path.name for path in (tmp_path / "out.partial/work").glob("values-*"))
        assert files == ([f"values-{index:05}.safetensors"] if index else [])
        with closing(self.place.values(index, len(self.texts))) as values:
            seen.append([*values])
        return real(self, index, weights)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerQuantizer, "_layer", layer)
    with closing(open_checkpoint(sources[3])) as checkpoint:
        plan = plan_of(checkpoint)
        texts = [text[:TEXT_TOKENS] for text in read_calibration(sources[3] / "calibration.md", checkpoint, 3)]
        method = choose_method("gptq-4bit", Choices(), [WIDTH], "bfloat16")
        quantize_checkpoint(plan, method, texts, tmp_path / "out", max_shard_bytes=None, report=lambda *_: None)
    with closing(open_checkpoint(tmp_path / "out")) as made:  # whose weights the first layers had by then
        values: list[Values] = [() for _ in texts]
        for layer_graph, found in zip(plan.layers, seen, strict=True):
            for expected, stored in zip(values, found, strict=True):
                assert len(expected) == len(stored)
                for a, b in zip(expected, stored, strict=True):
                    np.testing.assert_array_equal(a, b)
            values = run_layer(layer_graph, made.weights, texts, values, all_logits=False)
    assert len(seen[1][0]) > 0


def test_values_on_the_disk_are_the_same_bytes(sources: dict[int, Path], tmp_path: Path) -> None:
    """Text by text as they are computed, of several lengths."""
    rng = np.random.default_rng(0)
    with closing(open_checkpoint(sources[3])) as checkpoint, AtomicFolder(tmp_path / "out") as folder:
        layer = plan_of(checkpoint).layers[0]
        texts: list[Tokens] = [np.zeros(n, np.int32) for n in (3, 7, 1)]
        made = [tuple(rng.normal(size=(len(text), v.cols)).astype(np.float32) for v in layer.outputs) for text in texts]

        def one_by_one() -> Iterator[Values]:
            yield from made

        place = Workplace(folder, {})
        place.write_values(1, layer, texts, one_by_one())
        [path] = (folder.partial / "work").glob("values-*")
        with closing(open_safetensors(path)) as file:
            assert sum(info.nbytes for info in file.tensors.values()) == sum(a.nbytes for v in made for a in v)
        with closing(place.values(1, len(texts))) as stored:
            for expected, found in zip(made, stored, strict=True):
                for a, b in zip(expected, found, strict=True):
                    assert a.tobytes() == b.tobytes()
