"""Norms, activations and the steps of heads before attention against their numpy meaning in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.backends.torch.coded import CodeForm, rounded
from octavo.backends.torch.kernels.cache_view import CacheView
from octavo.backends.torch.kernels.common import INTERPRETED
from octavo.backends.torch.kernels.gate import activated, coded_rows, gated
from octavo.backends.torch.kernels.norm import layer_norm, rms_norm, rms_norm_coded
from octavo.backends.torch.kernels.rope import HeadSteps, prepare_heads, rotate, write_cache
from octavo.graph.ops import attention as attention_ops
from octavo.graph.ops import rowwise
from octavo.graph.ops.attention import AttentionParams, RopeParams
from octavo.quantization.packed.float8 import e4m3, e4m3_values
from tests.support.rounded_inputs import coded_inputs, rounded_inputs


def _random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)).to(device)


def _near(found: torch.Tensor, expected: np.ndarray, tolerance: float = 3e-6) -> None:
    np.testing.assert_allclose(found.cpu().double().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("cols", "group", "weights"), [(96, 0, 96), (130, 0, 130), (96, 32, 32), (96, 16, 96), (40, 0, 0)]
)
def test_rms_norm(cols: int, group: int, weights: int, device: torch.device) -> None:
    x = _random(5, cols + 3, device=device)[:, :cols]
    weight = _random(weights, device=device) if weights else None
    found = rms_norm(x, weight, 1e-5, group=group)
    wide = None if weight is None else weight.cpu().double().numpy()
    _near(found, rowwise.rms_norm(x.cpu().double().numpy(), wide, group or cols, 1e-5))


@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(has_bias: bool, device: torch.device) -> None:
    x, weight, bias = (_random(*s, device=device) for s in ((4, 70), (70,), (1, 70)))
    found = layer_norm(x + 50, weight, bias[0] if has_bias else None, 1e-5)
    expected = torch.nn.functional.layer_norm(
        (x + 50).double(), (70,), weight.double(), bias[0].double() if has_bias else None, 1e-5
    )
    _near(found, expected.cpu().numpy(), 2e-5)


@pytest.mark.parametrize("form", [CodeForm("int8"), CodeForm("e4m3"), CodeForm("e4m3", 64)])
@pytest.mark.parametrize("cols", [70, 128, 200])
def test_codes_of_rows_after_a_norm_and_an_activation(form: CodeForm, cols: int, device: torch.device) -> None:
    """A code more or less where a number lies between two: the numbers before it are rounded otherwise by numpy."""
    x = _random(5, cols + 9, device=device)[:, :cols]
    x[2] = 0
    weight = _random(cols, device=device)
    plain = rms_norm(x, weight, 1e-5)
    coded = rms_norm_coded(x, weight, 1e-5, form)
    for wide, rows in [
        (plain, coded),
        (x, coded_rows(x, form)),
        (gated(x, "silu", up=plain), coded_rows(x, form, "silu", plain)),
    ]:
        codes, scales = coded_inputs(wide.cpu().numpy(), *form)
        assert (rows.form, rows.dtype, len(rows)) == (form, x.dtype, 5)
        np.testing.assert_allclose(rows.scales.cpu().numpy(), scales, rtol=1e-6 if INTERPRETED else 1e-5)
        kind = np.int8 if form.kind == "int8" else np.uint8
        steps = codes.view(kind).astype(int) - rows.codes.cpu().numpy().view(kind)
        assert np.abs(steps).max() <= 1
        assert (steps == 0).mean() > 0.99
        numbers = rounded(wide, form).cpu().numpy()
        np.testing.assert_allclose(rounded_inputs(wide.cpu().numpy(), *form), numbers, rtol=1e-6)
        wide_scales = np.repeat(scales, form.group or cols, axis=1)[:, :cols]
        limit = wide_scales / 2 if form.kind == "int8" else np.abs(wide.cpu().numpy()) / 16 + wide_scales / 1024
        assert (np.abs(numbers - wide.cpu().numpy()) <= limit * 1.001).all()


@pytest.mark.parametrize("kind", rowwise.ACTIVATIONS)
def test_activations(kind: str, device: torch.device) -> None:
    x = torch.cat([_random(3, 40, device=device) * 4, torch.tensor([[-200.0, 200.0] * 20], device=device)])
    wide = x.cpu().double().numpy()
    expected = rowwise.ACTIVATIONS[kind](wide)
    _near(activated(x, kind), expected)
    up = _random(4, 41, device=device)[:, :40]
    _near(gated(x, kind, up=up), expected * up.cpu().double().numpy(), 1e-5)
    halves = rowwise.ACTIVATIONS[kind](wide[:, :20]) * wide[:, 20:]
    _near(gated(x, kind), halves, 1e-5)


def test_limits_of_a_gate(device: torch.device) -> None:
    x = _random(3, 40, device=device) * 9
    gate, up = np.split(x.cpu().double().numpy(), 2, axis=1)
    expected = rowwise.quick_gelu(np.minimum(gate, 7)) * (np.clip(up, -7, 7) + 1)
    _near(gated(x, "quick_gelu", limit=7.0, offset=1.0), expected, 1e-5)
    expected = np.minimum(rowwise.quick_gelu(gate), 7) * np.clip(up, -7, 7)
    _near(gated(x, "quick_gelu", limit=7.0, after=True), expected, 1e-5)


def test_no_rows(device: torch.device) -> None:
    none = torch.zeros(0, 8, device=device)
    assert gated(none, "silu").shape == (0, 4)
    assert rms_norm(none, None, 1e-5).shape == (0, 8)
    assert rotate(none, 8, torch.zeros(1, 2, 4, device=device), none[:, 0].int()).shape == (0, 8)


_P = AttentionParams(0, 6, 2, 24, 1.0, value_dim=16, query_scales=(1.0, 1.5, 2.0), scale_length=4, scale_offset=1)
_ROPE = RopeParams(tuple(1.0 / 10.0**i for i in range(8)), 1.25)


def _angles(positions: int, device: torch.device) -> torch.Tensor:
    angle = np.arange(positions)[:, None] * np.asarray(_ROPE.frequencies)
    table = np.stack([np.cos(angle), np.sin(angle)], axis=1) * _ROPE.attention_factor
    return torch.from_numpy(table.astype(np.float32)).to(device)


def _cache(p: AttentionParams, dtype: torch.dtype, device: torch.device, *, blocks: int = 3) -> CacheView:
    shape = (blocks, p.num_kv_heads, 4)
    fill = 77 if dtype == torch.int8 else 3.0
    keys = torch.full((*shape, p.head_dim), fill, device=device).to(dtype)
    values = torch.full((*shape, p.cache.value_dim), fill, device=device).to(dtype)
    if dtype != torch.int8:
        return CacheView(keys, values, key_factor=0.5 if keys.itemsize == 1 else 1.0)
    return CacheView(keys, values, torch.zeros(shape, device=device), torch.zeros(shape, device=device))


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_heads_before_attention(dtype: torch.dtype, has_norms: bool, device: torch.device) -> None:
    p, cache = _P, _cache(_P, dtype, device)
    qkv = _random(4, sum(p.widths) + 5, device=device)[:, : sum(p.widths)]
    q_norm, k_norm = _random(24, device=device), _random(24, device=device) + 1
    positions = torch.tensor([0, 3, 11, 9], dtype=torch.int32, device=device)
    slots = torch.tensor([5, 0, -1, 11], dtype=torch.int32, device=device)
    norms = (has_norms,) * 3
    scales = torch.tensor(p.query_scales, device=device)
    weights = (q_norm, k_norm) if has_norms else (None, None)
    steps = HeadSteps(_angles(12, device), *weights, norms, 1e-5, scales)
    found = prepare_heads(qkv, cache, p, steps, slots, positions)

    wide, at = qkv.cpu().double().numpy(), positions.cpu().numpy()
    q, k, v = np.split(wide, np.cumsum(p.widths)[:2], axis=1)
    if has_norms:
        q = rowwise.rms_norm(q, q_norm.cpu().double().numpy(), 24, 1e-5)
        k = rowwise.rms_norm(k, k_norm.cpu().double().numpy(), 24, 1e-5)
        v = rowwise.rms_norm(v, None, 16, 1e-5)
    q = attention_ops.rotate(q, 24, _ROPE, at) * attention_ops._query_scales(p, at)
    _near(found.reshape(4, -1), q, 1e-5)
    expected = {"keys": attention_ops.rotate(k, 24, _ROPE, at).reshape(4, 2, 24), "values": v.reshape(4, 2, 16)}
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.int8: 0.01, torch.float8_e5m2: 0.13}.get(dtype, 0.07)
    for name, numbers in expected.items():
        stored = getattr(cache, name).float()
        factor = cache.key_factor if name == "keys" else 1.0
        scales_of = cache.key_scales if name == "keys" else cache.value_scales
        stored = stored * (factor if scales_of is None else scales_of[..., None])
        for token, slot in ((0, 5), (1, 0), (3, 11)):
            row, want = stored[slot // 4, :, slot % 4].cpu().double().numpy(), numbers[token]
            assert np.abs(row - want).max() <= tolerance * np.abs(want).max()
        untouched = getattr(cache, name)[1, :, 2].float()
        assert (untouched == (77 if dtype == torch.int8 else 3.0)).all()


def test_rotation_alone_and_queries_of_another_layers_keys(device: torch.device) -> None:
    x = _random(3, 6 * 24, device=device)
    positions = torch.tensor([0, 7, 11], dtype=torch.int32, device=device)
    angles = _angles(12, device)
    expected = attention_ops.rotate(x.cpu().double().numpy(), 24, _ROPE, positions.cpu().numpy())
    _near(rotate(x, 24, angles, positions), expected)
    alone = prepare_heads(x, None, _P, HeadSteps(angles), positions, positions)
    _near(alone.reshape(3, -1), expected)


def test_float16_is_limited_to_its_largest_number(device: torch.device) -> None:
    cache = CacheView(torch.zeros(1, 1, 1, 4, dtype=torch.float16, device=device), None)
    keys = torch.tensor([[[1e6, -1e6, float("nan"), float("-inf")]]], device=device)
    write_cache(keys, None, cache, torch.tensor([0], dtype=torch.int32, device=device))
    torch.testing.assert_close(
        cache.keys[0, 0, 0].cpu().float(), torch.tensor([65504, -65504, float("nan"), float("nan")]), equal_nan=True
    )


def test_float8_codes_are_the_nearest(device: torch.device) -> None:
    numbers = np.concatenate([e4m3_values(np.arange(127, dtype=np.uint8)), [500.0, 1e-9, 0.0009765625, 17.0, 19.0]])
    keys = torch.from_numpy(np.concatenate([numbers, -numbers * 1.03]).astype(np.float32)).to(device)
    cache = CacheView(torch.zeros(1, 1, 2, len(keys), device=device).to(torch.float8_e4m3fn), None)
    write_cache(keys[None, None], None, cache, torch.tensor([1], dtype=torch.int32, device=device))
    stored = cache.keys.view(torch.uint8)[0, 0].cpu().numpy()
    assert (stored[1] == e4m3(keys.cpu().numpy())).all()
    assert (stored[0] == 0).all()
    wide = torch.zeros(1, 1, 1, len(keys), device=device).to(torch.float8_e5m2)
    write_cache(keys[None, None], None, CacheView(wide, None), torch.tensor([0], dtype=torch.int32, device=device))
    assert torch.equal(wide[0, 0, 0].cpu().view(torch.uint8), keys.cpu().to(torch.float8_e5m2).view(torch.uint8))
