"""Tensors in another type: the same bytes with any number of threads, experts with their own importance."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.quantizers import quantize
from octavo.compress import encode as module
from octavo.compress.encode import Encoding, Importance, encode
from octavo.errors import ModelWriteError
from octavo.quantization.packed import DenseWeight, GGMLWeight


def encoded(
    weight: DenseWeight | GGMLWeight, type_name: str, importance: Importance | None = None, threads: int = 2
) -> NDArray[np.uint8]:
    with ThreadPoolExecutor(threads) as pool:
        encoding = Encoding("blk.0.ffn_up.weight", weight.shape, lambda: weight, type_name, importance)
        return np.concatenate([piece for pieces in encode([encoding], pool, threads) for piece in pieces])


def numbers(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_threads_and_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(37, 256)
    expected = quantize("Q4_K", x)
    monkeypatch.setattr(module, "PIECE_VALUES", 3 * 256)
    for threads in (1, 3):
        np.testing.assert_array_equal(encoded(DenseWeight(x), "Q4_K", threads=threads), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_follow_one_another_and_large_ones_are_made_when_their_turn_comes(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(module, "PIECE_VALUES", 2 * 256)
    shapes = [(2, 256), (1, 256), (3, 256), (40, 256), (2, 256), (50, 256), (1, 256)]
    arrays = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)]
    used: list[int] = []  # the tensors whose bytes are complete
    used_before: dict[int, int] = {}  # of each tensor: how many when it was made

    def encoding(i: int) -> Encoding:
        def make() -> DenseWeight:
            used_before[i] = len(used)
            return DenseWeight(arrays[i])

        return Encoding(f"blk.{i}.ffn_up.weight", shapes[i], make, "Q4_K")

    with ThreadPoolExecutor(threads) as pool:
        for i, pieces in enumerate(encode([encoding(i) for i in range(len(shapes))], pool, threads)):
            np.testing.assert_array_equal(np.concatenate(list(pieces)), quantize("Q4_K", arrays[i]))
            used.append(i)
    assert all(used_before[i] == i for i in (3, 5))
    assert used_before[1] == 0  # begun beside those before them
    assert used_before[4] < 4


def test_each_expert_has_its_own_importance() -> None:
    x, importance = numbers(3, 8, 256), np.abs(numbers(3, 256))
    found = encoded(DenseWeight(x), "Q3_K", importance)
    parts = [quantize("Q3_K", x[i], importance[i]) for i in range(3)]
    np.testing.assert_array_equal(found, np.concatenate(parts))


@pytest.mark.parametrize(("type_name", "dtype"), [("F16", np.float16), ("F32", np.float32)])
def test_plain_types(type_name: str, dtype: type[np.generic]) -> None:
    x = numbers(5, 7)
    np.testing.assert_array_equal(encoded(DenseWeight(x), type_name).view(dtype), x.astype(dtype).ravel())


def test_a_tensor_of_the_type_wanted_is_copied() -> None:
    blocks = quantize("Q4_0", numbers(4, 64))
    weight = GGMLWeight.from_bytes("Q4_0", blocks, (4, 64))
    np.testing.assert_array_equal(encoded(weight, "Q4_0"), blocks)
    np.testing.assert_array_equal(encoded(weight, "Q8_0"), quantize("Q8_0", weight.dequantize()))


@pytest.mark.parametrize("type_name", ["Q4_0", "F16", "F32"])
def test_a_number_that_is_none_is_refused_by_the_tensors_name(type_name: str) -> None:
    x = numbers(4, 64)
    x[2, 3] = np.nan
    weight = DenseWeight(x.astype(np.float16)) if type_name == "F32" else DenseWeight(x)
    with pytest.raises(ModelWriteError, match=r"tensor 'blk\.0\.ffn_up\.weight' cannot become"):
        encoded(weight, type_name)
