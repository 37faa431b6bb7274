"""The kernel calls whose compilation is recorded: the shapes of an 8B model, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from octavo.backends.torch.coded import CodeForm
from octavo.backends.torch.kernels import cache_view
from octavo.backends.torch.kernels.attention import Sequences, decode_attention, prefill_attention
from octavo.backends.torch.kernels.cache_view import CacheView
from octavo.backends.torch.kernels.coded_linear import coded_linear
from octavo.backends.torch.kernels.dense import dense_gate, dense_linear
from octavo.backends.torch.kernels.dequantize import dequantize
from octavo.backends.torch.kernels.experts import Gate, Sorted, expert_gate, expert_linear
from octavo.backends.torch.kernels.gate import coded_rows, empty_codes, gated
from octavo.backends.torch.kernels.linear import linear
from octavo.backends.torch.kernels.norm import layer_norm, rms_norm, rms_norm_coded
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.kernels.recurrence import StateRows, delta_rule, selective_scan, short_conv
from octavo.backends.torch.kernels.rope import HeadSteps, prepare_heads, rotate, write_cache
from octavo.backends.torch.kernels.sample import Entries, RowOptions, gather_tokens, sample_rows
from octavo.backends.torch.products import gate
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.recurrence import DeltaHeads, ScanHeads
from octavo.quantization.packed import Float8Weight, Weight
from tests.support.canonical import random_grouped
from tests.support.quantize import random_weight

Case = tuple[str, Callable[[], object]]
_IN = 4096
_FORMS = (CodeForm("int8"), CodeForm("e4m3"), CodeForm("e4m3", 128))


def _planes(weight: Weight) -> Planes:
    found = planes_of(weight)
    assert found is not None
    return found.to("meta")


def _weights() -> Iterator[tuple[str, Planes]]:
    yield "I4_128_Z", _planes(random_grouped((256, _IN), 1, group=128, mins="zeros"))
    for name in ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K"):
        yield name, _planes(random_weight(name, (256, _IN), 1))


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(form: CodeForm) -> str:
    return form.kind + (f" {form.group}" if form.group else "")


def _products() -> Iterator[Case]:
    for name, planes in _weights():
        yield f"dequantize {name}", lambda p=planes: dequantize(p, torch.bfloat16)
        yield f"gate {name} 1", lambda p=planes: gate(_empty(1, _IN), p, None, "silu", None)
        for rows in (1, 8, 128):
            yield f"linear {name} {rows}", lambda p=planes, r=rows: linear(_empty(r, _IN), p)


def _cache(p: AttentionParams, dtype: torch.dtype) -> CacheView:
    shape = (64, p.num_kv_heads, 16)
    is_latent = p.cache.value_dim != p.head_dim
    values = None if is_latent else _empty(*shape, p.cache.value_dim, dtype=dtype)
    scales = [_empty(*shape, dtype=torch.float32) if dtype == torch.int8 else None for _ in range(2)]
    return CacheView(_empty(*shape, p.head_dim, dtype=dtype), values, *scales)


def _ints(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int32)


def _attention() -> Iterator[Case]:
    models = {
        "8B": AttentionParams(0, 32, 8, 128, 0.1),
        "dim 64, window, sinks": AttentionParams(0, 64, 8, 64, 0.1, window=128),
        "dim 256, soft cap": AttentionParams(0, 8, 4, 256, 0.1, softcap=50.0),
        "dim 96": AttentionParams(0, 32, 32, 96, 0.1),
        "latent": AttentionParams(0, 128, 1, 576, 0.1, value_dim=512),
    }
    seqs = Sequences(_ints(33), _ints(32), _ints(32, 256))
    for name, p in models.items():
        kinds = (torch.bfloat16, torch.float8_e4m3fn, torch.int8) if name == "8B" else (torch.bfloat16,)
        for dtype in kinds:
            cache, kind = _cache(p, dtype), str(dtype).removeprefix("torch.")
            sinks = (_empty(p.num_heads) if "sinks" in name else None, None)
            q = _empty(32, p.num_heads, p.head_dim)
            yield (
                f"decode {name} {kind}",
                lambda a=(q, cache, p, seqs, 4096), s=sinks: decode_attention(*a, tables_of=s),
            )
            yield f"prefill {name} {kind}", lambda a=(q, cache, p, seqs), s=sinks: prefill_attention(*a, tables_of=s)


def _rowwise() -> Iterator[Case]:
    p = AttentionParams(0, 32, 8, 128, 0.1)
    steps = HeadSteps(_empty(8192, 2, 64, dtype=torch.float32), _empty(128), _empty(128), (True, True, False), 1e-6)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        kind, a = (
            str(dtype).removeprefix("torch."),
            (_empty(32, 6144), _cache(p, dtype), p, steps, _ints(32), _ints(32)),
        )
        yield f"heads {kind}", lambda a=a: prepare_heads(*a)
    rest = (p, HeadSteps(), _ints(32), _ints(32))
    yield "heads without steps", lambda: prepare_heads(_empty(32, 6144), _cache(p, torch.bfloat16), *rest)
    alone = (_empty(32, _IN), None, p, steps, _ints(32), _ints(32))
    yield "heads without a cache", lambda: prepare_heads(*alone)
    latent = AttentionParams(0, 128, 1, 576, 0.1, value_dim=512)
    for dtype in (torch.bfloat16, torch.int8):
        keys, cache = _empty(32, 1, 576), _cache(latent, dtype)
        yield (
            f"write a latent {str(dtype).removeprefix('torch.')}",
            lambda k=keys, c=cache: write_cache(k, None, c, _ints(32)),
        )
    x, weight = _empty(32, _IN), _empty(_IN)
    yield "rotate", lambda: rotate(x, 128, _empty(8192, 2, 64, dtype=torch.float32), _ints(32))
    yield "rms_norm", lambda: rms_norm(x, weight, 1e-6)
    for form in _FORMS:
        yield f"rms_norm {_name(form)}", lambda f=form: rms_norm_coded(x, weight, 1e-6, f)
    yield "layer_norm", lambda: layer_norm(x, weight, weight, 1e-6)
    for kind in ("silu", "gelu", "gelu_tanh"):
        yield f"gated {kind}", lambda k=kind: gated(_empty(32, 28672), k)
    for form in _FORMS:
        yield f"gated {_name(form)}", lambda f=form: coded_rows(_empty(32, 14336), f, "silu", _empty(32, 14336))


def _further_products() -> Iterator[Case]:
    places = Sorted(_ints(24 * 16), _ints(24), 16)
    experts = {"plain": _empty(8, 256, _IN), "Q4_0": _planes(random_weight("Q4_0", (8, 64, _IN), 1))}
    for name, weight in experts.items():
        yield f"experts {name}", lambda w=weight: expert_linear(_empty(32, _IN), w, places, 2)
        yield (
            f"gate and up of experts {name}",
            lambda w=weight: expert_gate(_empty(32, _IN), (w, w), places, 2, (None, None), Gate("silu")),
        )
    yield "gate 1", lambda: dense_gate(_empty(1, _IN), _empty(_IN, _IN), None, "silu")
    yield "dense 1", lambda: dense_linear(_empty(1, _IN), _empty(_IN, _IN))
    operands = (_empty(32, _IN), _empty(_IN, _IN), None, _empty(32, _IN))
    yield "one tile 32", lambda: dense_linear(*operands, deterministic=True)


def _coded_products() -> Iterator[Case]:
    int8 = random_grouped((256, _IN), 1, bits=8, group=None)
    row = Float8Weight("E4M3", np.ones((256, _IN), np.uint8), np.ones((256, 1), np.float32), 1)
    weights = {
        "int8": replace(int8, inputs="int8"),
        "e4m3": replace(row, inputs="e4m3"),
        "e4m3 128": replace(row, scales=np.ones((2, 32), np.float32), block_rows=128, block_columns=128, inputs="e4m3"),
    }
    for name, weight in weights.items():
        planes = _planes(weight)
        assert planes.inputs is not None
        for rows in (1, 8, 48, 1024):
            x = empty_codes(_empty(rows, _IN), _IN, planes.inputs)
            yield f"coded {name} {rows}", lambda x=x, p=planes: coded_linear(x, p)


def _sampling() -> Iterator[Case]:
    floats, doubles = _empty(32, dtype=torch.float32), _empty(32, dtype=torch.float64)
    options = RowOptions(floats, _ints(32), doubles, doubles, floats, _ints(32), _ints(32), doubles)
    bias, history = (_ints(33), _ints(64), _empty(64, dtype=torch.float32)), (_ints(33), _ints(64), _ints(64))
    entries = Entries(_ints(32), bias, history, (floats, floats, floats), _ints(32, 4008))
    yield "sample", lambda: sample_rows(_empty(32, 128256, dtype=torch.float32), options, entries, 5)
    yield "gather", lambda: gather_tokens(_ints(32), _ints(32), _ints(32))


def _states() -> Iterator[Case]:
    rows = StateRows(_ints(33), _ints(32), _ints(32), _ints(32), _ints(32, 2))
    float32 = {"dtype": torch.float32}
    heads, delta = _empty(32, **float32), DeltaHeads(16, 32, 128, 128)
    state = _empty(64, 32, 128, 128, **float32)
    yield (
        "short_conv",
        lambda: short_conv(_empty(32, 8192), _empty(64, 3, 8192, **float32), (_empty(8192 * 4), None), "silu", rows),
    )
    yield (
        "delta_rule",
        lambda: delta_rule(
            (_empty(32, 8192), _empty(32, 32), _empty(32, 32)), state, (heads, heads), delta, 1e-6, rows
        ),
    )
    scan = ScanHeads(32, 128, 8, 128)
    yield (
        "selective_scan",
        lambda: selective_scan((_empty(32, 6144), _empty(32, 32)), state, (heads, heads, heads), scan, rows),
    )


def cases(arch: int) -> Iterator[Case]:
    """Yield (name, call) for every case on a GPU of this compute capability. A process compiles for only one."""
    vars(cache_view)["_converts_e4m3"] = lambda _device: arch >= 89
    for group in (_states, _rowwise, _further_products, _coded_products, _sampling, _attention, _products):
        for name, call in group():
            if arch >= 89 or not name.startswith("coded e4m3"):  # has no such products
                yield name, call
