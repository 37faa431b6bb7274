"""Operations with states against their numpy meaning in float64, over the steps of several sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.torch.kernels.recurrence import StateRows, delta_rule, selective_scan, short_conv
from octavo.batch import Batch
from octavo.graph.ops.base import Evaluation
from octavo.graph.ops.recurrence import DeltaHeads, GatedDeltaRule, ScanHeads, SelectiveScan, ShortConv
from octavo.graph.values import TOKENS, Parameter, Value

_COUNTS = (3, 1, 0, 6)
_TOKENS = sum(_COUNTS)
_POSITIONS = np.concatenate([np.arange(3) + 5, [0], np.arange(6)]).astype(np.int32)  # the first goes on
_SLOTS = np.array([4, 0, 1, 2], np.int32)
_SAVES = np.array([[[1, 5], [0, -1]], [[0, -1], [0, -1]], [[0, -1], [0, -1]], [[2, 6], [6, 3]]], np.int32)


def _batch() -> Batch:
    starts = np.cumsum([0, *_COUNTS]).astype(np.int32)
    none = np.zeros((1, 4, 1), np.int32)
    tokens = np.zeros(_TOKENS, np.int32)
    batch = Batch(tokens, _POSITIONS, starts, np.ones(4, np.int32), none, none[0], none[0, 0])
    batch.state_slots, batch.state_saves = _SLOTS, _SAVES
    return batch


def _rows(device: torch.device, *, padding: int = 0) -> StateRows:
    starts = np.cumsum([0, *_COUNTS])
    sequences = np.repeat(np.arange(4), _COUNTS)
    arrays = (
        np.append(starts, [starts[-1]] * padding), sequences, _POSITIONS, np.append(_SLOTS, [-1] * padding),
        np.concatenate([_SAVES, np.tile([[[0, -1]] * 2], (padding, 1, 1))]),
    )  # fmt: skip
    return StateRows(*(torch.from_numpy(a.astype(np.int32)).to(device) for a in arrays))


def _check(
    op: Any, device: torch.device, run: Callable[[list[torch.Tensor], list[torch.Tensor], torch.Tensor], torch.Tensor]
) -> None:
    """run: (inputs, weights, state) -> output, of the kernel."""
    rng = np.random.default_rng(8)
    values = {value: rng.normal(size=(_TOKENS, value.cols)) for value in op.inputs}
    weights = {
        p: -rng.uniform(0.1, 1, p.shape) if p.name == "decay" else rng.normal(size=p.shape) for p in op.parameters
    }
    state = rng.normal(size=(7, *op.cache.shapes[0]))
    on_device = torch.from_numpy(state.astype(np.float32)).to(device)
    wide = [
        torch.from_numpy(np.pad(v, ((0, 0), (0, 3))).astype(np.float32)).to(device)[:, :-3] for v in values.values()
    ]
    plain = [torch.from_numpy(w.astype(np.float32)).to(device) for w in weights.values()]
    found = run(wide, plain, on_device)
    expected = op.evaluate(Evaluation(_batch(), np.float64, weights, {}, {0: [state]}, values))
    np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(on_device.cpu().numpy(), state, rtol=2e-4, atol=2e-5)


def _value(cols: int) -> Value:
    return Value(cols, TOKENS, cols)


@pytest.mark.parametrize(("taps", "kind", "has_bias"), [(4, "silu", True), (2, None, False), (8, None, True)])
def test_short_convolution(taps: int, kind: str | None, has_bias: bool, device: torch.device) -> None:
    bias = Parameter("bias", (70,)) if has_bias else None
    op = ShortConv(_value(70), Parameter("weight", (70 * taps,)), bias, 0, kind)
    _check(op, device, lambda x, w, s: short_conv(x[0], s, (w[0], w[1] if has_bias else None), kind, _rows(device)))


@pytest.mark.parametrize("is_tiled", [True, False])
def test_gated_delta_rule(is_tiled: bool, device: torch.device) -> None:
    heads = DeltaHeads(2, 4, 24, 40, is_tiled)
    op = GatedDeltaRule(
        _value(2 * 2 * 24 + 4 * 40), _value(4), Value(9, TOKENS, 4), Parameter("decay", (4,)),
        Parameter("dt_bias", (4,)), heads, 0,
    )  # fmt: skip
    _check(op, device, lambda x, w, s: delta_rule((x[0], x[1], x[2]), s, (w[0], w[1]), heads, 1e-6, _rows(device)))


def test_selective_scan_beside_padding_rows(device: torch.device) -> None:
    heads = ScanHeads(4, 40, 2, 24)
    names = ("decay", "skip", "dt_bias")
    op = SelectiveScan(_value(160 + 2 * 48), _value(4), *(Parameter(n, (4,)) for n in names), heads, 0)
    rows = _rows(device, padding=2)
    _check(op, device, lambda x, w, s: selective_scan((x[0], x[1]), s, (w[0], w[1], w[2]), heads, rows))
