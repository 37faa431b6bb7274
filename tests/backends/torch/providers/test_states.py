"""The chunked forms of `fla-core` as the operations call them, with stand-ins that follow their documentation."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.backends.torch.providers import fla
from octavo.backends.torch.step import StepRows
from octavo.backends.torch.step_arrays import StepArrays
from octavo.batch import Batch
from octavo.graph.ops.base import Evaluation
from octavo.graph.ops.recurrence import DeltaHeads, GatedDeltaRule, ScanHeads, SelectiveScan
from octavo.graph.values import TOKENS, Parameter, Value

COUNTS = (3, 1, 0, 6)
POSITIONS = np.concatenate([np.arange(3) + 5, [0], np.arange(6)]).astype(np.int32)  # the first goes on
SLOTS = np.array([4, 0, 1, 2], np.int32)
SAVES = np.array([[[1, 5], [0, -1]], [[0, -1], [0, -1]], [[0, -1], [0, -1]], [[2, 6], [6, 3]]], np.int32)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The signature of fla-core 0.6; states are [sequences, heads, key, value], gates logarithms."""
    assert options.keys() == {"scale", "initial_state", "output_final_state", "cu_seqlens"}
    initial_state, cu_seqlens, scale = (options[n] for n in ("initial_state", "cu_seqlens", "scale"))
    assert cu_seqlens.dtype == torch.int64
    assert initial_state.dtype == torch.float32
    out, after, ends = torch.empty_like(v), initial_state.clone(), cu_seqlens.tolist()
    for n in range(len(ends) - 1):
        for t in range(ends[n], ends[n + 1]):
            state = after[n] * g[0, t].exp()[:, None, None]
            missing = beta[0, t][:, None] * (v[0, t] - torch.einsum("hk,hkv->hv", k[0, t], state))
            after[n] = state + k[0, t][..., None] * missing[:, None]
            out[0, t] = scale * torch.einsum("hk,hkv->hv", q[0, t], after[n])
    return out, after


def chunk_simple_gla(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The signature of fla-core 0.6."""
    assert options.keys() == {"g", "scale", "initial_state", "output_final_state", "cu_seqlens"}
    g, initial_state, cu_seqlens, scale = (options[n] for n in ("g", "initial_state", "cu_seqlens", "scale"))
    out, after, ends = torch.empty_like(v), initial_state.clone(), cu_seqlens.tolist()
    for n in range(len(ends) - 1):
        for t in range(ends[n], ends[n + 1]):
            after[n] = after[n] * g[0, t].exp()[:, None, None] + k[0, t][..., None] * v[0, t][:, None]
            out[0, t] = scale * torch.einsum("hk,hkv->hv", q[0, t], after[n])
    return out, after


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, call in (("gated_delta_rule", chunk_gated_delta_rule), ("simple_gla", chunk_simple_gla)):
        module: Any = ModuleType(name)
        setattr(module, call.__name__, call)
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)


def arrays() -> StepArrays:
    starts = np.cumsum([0, *COUNTS])
    counts = np.where(SAVES[..., 1] >= 0, SAVES[..., 0], 0).T
    rows = StepRows(
        torch.zeros(sum(COUNTS)), torch.from_numpy(POSITIONS), torch.zeros(sum(COUNTS)), torch.zeros(0),
        torch.from_numpy(starts), tuple(starts.tolist()), None, tuple(map(tuple, counts.tolist())),
        torch.from_numpy(counts),
    )  # fmt: skip
    fresh = np.array([False, True, False, True]).astype(np.int32)
    saved = np.where(SAVES[..., 1] >= 0, SAVES[..., 1], 7).T
    return StepArrays(
        rows, torch.zeros(0), torch.zeros(0), (), *(torch.from_numpy(x.astype(np.int32)) for x in (SLOTS, fresh, saved))
    )


def check(op: Any) -> None:
    rng = np.random.default_rng(8)
    values = {value: rng.normal(size=(sum(COUNTS), value.cols)) for value in op.inputs}
    weights = {
        p: -rng.uniform(0.1, 1, p.shape) if p.name == "decay" else rng.normal(size=p.shape) for p in op.parameters
    }
    state = rng.normal(size=(8, *op.cache.shapes[0]))
    on_device = torch.from_numpy(state.astype(np.float32))
    plain = [torch.from_numpy(x.astype(np.float32)) for x in values.values()]
    of_op = [torch.from_numpy(w.astype(np.float32)) for w in weights.values()]
    found = fla.advanced(op, plain, on_device, of_op, arrays())
    starts = np.cumsum([0, *COUNTS]).astype(np.int32)
    none = np.zeros((1, 4, 1), np.int32)
    batch = Batch(np.zeros(sum(COUNTS), np.int32), POSITIONS, starts, np.ones(4, np.int32), none, none[0], none[0, 0])
    batch.state_slots, batch.state_saves = SLOTS, SAVES
    expected = op.evaluate(Evaluation(batch, np.float64, weights, {}, {0: [state]}, values))
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-4, atol=2e-5)
    used = [4, 0, 2, 5, 6, 3]  # the third sequence has no token, and slot 7 is nobody's
    np.testing.assert_allclose(on_device.numpy()[used], state[used], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("is_tiled", [True, False])
def test_the_gated_delta_rule_with_states_that_are_saved_on_the_way(is_tiled: bool) -> None:
    value = Value(2 * 2 * 24 + 4 * 40, TOKENS, 2 * 2 * 24 + 4 * 40)
    names = ("decay", "dt_bias")
    check(
        GatedDeltaRule(
            value,
            Value(4, TOKENS, 4),
            Value(9, TOKENS, 4),
            *(Parameter(n, (4,)) for n in names),
            DeltaHeads(2, 4, 24, 40, is_tiled),
            0,
        )
    )


def test_the_selective_scan_with_states_that_are_saved_on_the_way() -> None:
    heads = ScanHeads(4, 40, 2, 24)
    names = ("decay", "skip", "dt_bias")
    xbc = Value(160 + 2 * 48, TOKENS, 160 + 2 * 48)
    check(SelectiveScan(xbc, Value(4, TOKENS, 4), *(Parameter(n, (4,)) for n in names), heads, 0))
