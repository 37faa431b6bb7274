"""Operations on parts of the columns against torch's formulas; the blocks of Gemma 3n and 4 against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.errors import GraphError
from octavo.graph.ops.base import Op
from octavo.graph.ops.linear import Embedding
from octavo.graph.ops.rowwise import RMSNorm
from octavo.graph.ops.streams import (
    AddToStreams,
    Columns,
    MatchMagnitude,
    MixStreams,
    ScaleColumns,
    SideBySide,
    Sparsify,
)
from octavo.graph.values import TOKENS, Parameter, Value
from tests.support.batches import Request, step
from tests.support.evaluation import evaluate

ROWS, WIDTH, STREAMS = 7, 10, 3
RNG = np.random.default_rng(0)
X = Value(0, TOKENS, STREAMS * WIDTH)
Y = Value(1, TOKENS, WIDTH)
SQUARE = Value(2, TOKENS, STREAMS**2)
ONE_EACH = Value(3, TOKENS, STREAMS)
VALUES = {value: RNG.normal(size=(ROWS, value.cols)) for value in (X, Y, SQUARE, ONE_EACH)}
WEIGHTS = {Parameter("w", (WIDTH,)): RNG.normal(size=WIDTH), Parameter("one", (1,)): np.array([0.7])}


def torch_of(value: Value) -> torch.Tensor:
    return torch.from_numpy(VALUES[value])


def check(op: Op, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(evaluate(op, VALUES, WEIGHTS), expected.reshape(ROWS, -1).numpy(), atol=1e-12)


def test_columns_and_side_by_side() -> None:
    check(Columns(X, 4, 9), torch_of(X)[:, 4:13])
    check(SideBySide(X, Y), torch.cat([torch_of(X), torch_of(Y)], dim=1))


def test_mixed_streams() -> None:
    streams, mixed = torch_of(X).reshape(ROWS, STREAMS, WIDTH), torch_of(SQUARE).reshape(ROWS, STREAMS, STREAMS)
    check(MixStreams(X, SQUARE), streams + torch.einsum("rij,rjw->riw", mixed, streams))


def test_added_to_streams() -> None:
    streams, offsets = torch_of(X).reshape(ROWS, STREAMS, WIDTH), (0.0, 1.0, -0.5)
    added = torch.tensor(offsets, dtype=torch.float64)[None, :, None] * torch_of(Y)[:, None]
    check(AddToStreams(X, Y, None, offsets), streams + added)
    added = added + torch_of(ONE_EACH)[:, :, None] * torch_of(Y)[:, None]
    check(AddToStreams(X, Y, ONE_EACH, offsets), streams + added)


def test_matched_magnitudes() -> None:
    """A stream whose mean square is below the floor counts as one that has it."""
    streams = torch_of(X).reshape(ROWS, STREAMS, WIDTH).clone()
    streams[:, 1] *= 1e-9
    values = VALUES | {X: streams.reshape(ROWS, -1).numpy()}
    found = evaluate(MatchMagnitude(X, Y, 1e-5), values, {}).reshape(ROWS, STREAMS, WIDTH)
    target = torch_of(Y).square().mean(dim=1).sqrt().numpy()
    rms = np.sqrt(np.mean(found**2, axis=2))
    np.testing.assert_allclose(rms[:, [0, 2]], np.stack([target, target], axis=1))
    expected = streams[:, 1].numpy() * target[:, None] / np.sqrt(1e-5)
    np.testing.assert_allclose(found[:, 1], expected)


def test_scaled_columns() -> None:
    w, one = WEIGHTS
    check(ScaleColumns(Y, w), torch_of(Y) * torch.from_numpy(WEIGHTS[w]))
    check(ScaleColumns(Y, one), torch_of(Y) * 0.7)


def test_sparsified_rows() -> None:
    """Of a normal distribution, the share of zeros is that of the quantile."""
    x = torch_of(X)
    cut = x.mean(dim=1, keepdim=True) + 0.5 * x.std(dim=1, keepdim=True, unbiased=False)
    check(Sparsify(X, 0.5), torch.relu(x - cut))
    wide = Value(0, TOKENS, 100_000)
    normal = {wide: RNG.normal(3.0, 2.0, (1, wide.cols))}
    zeros = evaluate(Sparsify(wide, 1.6448536), normal, {}) == 0
    assert abs(zeros.mean() - 0.95) < 0.003


def test_norms_of_groups_with_a_weight_for_all() -> None:
    x, weight = torch_of(X), Parameter("groups", (STREAMS * WIDTH,))
    groups = torch.nn.functional.rms_norm(x.reshape(ROWS, STREAMS, WIDTH), (WIDTH,), None, 1e-2).reshape(ROWS, -1)
    own = RNG.normal(size=STREAMS * WIDTH)
    found = evaluate(RMSNorm(X, weight, 1e-2, WIDTH), VALUES, {weight: own})
    np.testing.assert_allclose(found, (groups * torch.from_numpy(own)).numpy(), atol=1e-12)


def test_ids_beyond_a_table_take_its_first_row() -> None:
    weight = Parameter("table", (4, 5))
    table = RNG.normal(size=(4, 5))
    batch = step([(Request([3, 4, 0, 90], [0]), 4)])
    found = evaluate(Embedding(weight, has_all=False), {}, {weight: table}, batch)
    np.testing.assert_array_equal(found, table[[3, 0, 0, 0]])


WRONG = {
    "columns": (lambda: Columns(Y, 4, 7), "has no 7 columns from 4 on"),
    "square": (lambda: MixStreams(X, ONE_EACH), "do not make a square"),
    "streams": (lambda: AddToStreams(X, Y, None, (1.0,)), "is not 1 streams"),
    "factors": (lambda: AddToStreams(X, Y, SQUARE, (1.0,) * 3), "not one for each of 3"),
    "target": (lambda: MatchMagnitude(Y, X, 1e-5), "not several times as wide"),
    "scale": (lambda: ScaleColumns(X, Parameter("w", (WIDTH,))), "does not fit w"),
    "group": (lambda: RMSNorm(X, Parameter("w", (WIDTH,)), 1e-5, 4), r"w \[10\] has no groups of 4 columns"),
    "deviations": (lambda: Sparsify(X, float("nan")), "not finite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_shape_rules(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(GraphError, match=message):
        make().infer_shape()
