"""Products with weights of every kind in the shapes of a model's layers, compared with the library on plain weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_cases import Case, Figure, Machine, check, in_turns, seconds_of
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.kernels.dense import dense_gate, dense_linear
from octavo.backends.torch.kernels.dequantize import dequantize
from octavo.backends.torch.kernels.experts import expert_linear, sort_by_expert
from octavo.backends.torch.kernels.gate import coded_rows
from octavo.backends.torch.kernels.linear import linear
from octavo.backends.torch.kernels.planes import Planes, planes_of
from octavo.backends.torch.plain import ProductEnd
from octavo.backends.torch.products import linear as product
from octavo.quantization.packed import CodebookWeight, Float8Weight, GroupedWeight, Weight
from tests.support.canonical import random_grouped
from tests.support.quantize import random_weight

_BASE = 64  # rows of random codes, repeated to the height of a matrix; the widths are real
FORMATS = ("I4_128_Z", "Q4_K", "F8_E4M3_128X128", "Q8_0", "Q6_K", "NF4_64", "MXFP4", "Q2_K", "I8_ROW")
CODED = ("I8_ROW", "F8_E4M3_ROW", "F8_E4M3_128X128")
_TABLE = tuple(np.linspace(-1, 1, 16).tolist())


def random_of(type_name: str, shape: tuple[int, int], seed: int = 1) -> Weight:
    """Return random valid codes of a canonical type; for types used in models they are about as large as trained ones.

    Eight-bit types have rounded inputs, too.
    """
    rows, width = shape
    rng = np.random.default_rng(seed)
    if type_name == "I4_128_Z":
        scales = rng.uniform(0.002, 0.005, (rows, width // 128)).astype(np.float16)
        zeros = rng.integers(6, 10, scales.shape, dtype=np.uint8)
        return GroupedWeight(4, 128, rng.integers(0, 256, (rows, width // 2), dtype=np.uint8), scales, zeros=zeros)
    if type_name == "I8_ROW":
        return replace(random_grouped(shape, seed, bits=8, group=None), inputs="int8")
    if type_name.startswith("F8_E4M3"):
        codes = rng.integers(0, 0x7E, shape, dtype=np.uint8) | rng.integers(0, 2, shape, dtype=np.uint8) << 7
        sides = (128, 128) if type_name.endswith("128X128") else (1, None)
        blocks = (-(-rows // sides[0]), -(-width // (sides[1] or width)))
        return Float8Weight("E4M3", codes, rng.uniform(5e-5, 2e-4, blocks).astype(np.float32), *sides, "e4m3")
    if type_name == "NF4_64":
        scales = rng.uniform(0.5, 1, (rows, width // 64)).astype(np.float32)
        return CodebookWeight("NF4", _TABLE, 64, rng.integers(0, 256, (rows, width // 2), dtype=np.uint8), scales)
    return random_weight(type_name, shape, seed)


def tall(planes: Planes, rows: int, machine: Machine) -> Planes:
    """Repeat the rows of a small weight, in separate tensors."""
    times = rows // planes.shape[-2]
    shared = ("table", "column_order")
    tensors: dict[str, Any] = {
        name: x.to(machine.device) if name in shared else x.to(machine.device).repeat(times, 1)
        for name, x in planes.tensors.items()
    }
    return replace(planes, shape=(rows, planes.shape[-1]), **tensors)


def _floor_s(machine: Machine, nbytes: float, operations: float, product: str = "bf16 product") -> float | None:
    read, rate = machine.ceilings.get("read"), machine.ceilings.get(product)
    return None if not read or not rate else max(nbytes / read, operations / rate)


def plain(machine: Machine) -> list[Figure]:
    """Measure the library's products with plain weights, and our kernel for few rows."""
    found = []
    for rows in machine.shapes.rows:
        total = floor = own_total = 0.0
        for name, out, width in machine.shapes.products:
            nbytes = out * width * machine.dtype.itemsize

            def make(size: tuple[int, int, int] = (rows, out, width)) -> Callable[[], Tensor]:
                x, w = machine.normal(size[0], size[2]), machine.normal(*size[1:], scale=size[2] ** -0.5)
                return partial(functional.linear, x, w)

            calls = in_turns(machine, make, nbytes)
            total += seconds_of(machine, calls)
            floor += _floor_s(machine, nbytes, 2.0 * rows * out * width) or 0
            if rows <= 4:
                own = [partial(dense_linear, *call.args) for call in calls]  # type: ignore[attr-defined]
                check("few rows, plain weights", own[0](), calls[0]().float(), 1e-2)  # type: ignore[attr-defined]
                own_total += seconds_of(machine, own)
            if rows <= 4 and name == "gate and up":
                found.append(_gate(machine, [call.args for call in calls]))  # type: ignore[attr-defined]
        machine.known[f"plain {rows}"] = total
        found.append(Figure(f"library, rows {rows}", total * 1e6, "microseconds", floor / total or None))
        if own_total:
            found.append(Figure(f"library over own, rows {rows}", total / own_total, "x", floor / own_total or None))
    return found


def _gate(machine: Machine, inputs: Sequence[tuple[Tensor, Tensor]]) -> Figure:
    """Measure gate, up and activation in one launch.

    inputs: rows and the matrix of both, several times.
    """
    (x, w), calls = inputs[0], [partial(dense_gate, *pair, None, "silu") for pair in inputs]
    a, b = functional.linear(x.float(), w.float()).chunk(2, dim=1)
    check("gate and up of few rows", calls[0](), functional.silu(a) * b, 1e-2)
    seconds = seconds_of(machine, calls)
    share = machine.share(w.nbytes, "read", seconds)
    return Figure(f"gate, up and activation, rows {len(x)}", seconds * 1e6, "microseconds", share)


def quantized(machine: Machine, type_name: str) -> list[Figure]:
    """Measure one format on all four matrices of a layer, compared with the library on plain weights."""
    found = []
    bases = {width: random_of(type_name, (_BASE, width)) for _, _, width in machine.shapes.products}
    planes = {width: planes_of(weight) for width, weight in bases.items()}
    for rows in machine.shapes.rows:
        total = floor = 0.0
        widest: tuple[float, float | None] = (0.0, None)
        for name, out, width in machine.shapes.products:
            small = planes[width]
            assert small is not None

            def make(p: Planes = small, size: tuple[int, int] = (rows, out)) -> Callable[[], Tensor]:
                return partial(linear, machine.normal(size[0], p.shape[-1]), tall(p, size[1], machine))

            calls = in_turns(machine, make, small.nbytes * out / _BASE)
            x, numbers = calls[0].args[0], torch.from_numpy(bases[width].dequantize()).to(machine.device)  # type: ignore[attr-defined]
            ours = calls[0]()
            assert isinstance(ours, Tensor)
            check(f"{type_name} {name}, rows {rows}", ours[:, -_BASE:], x.float() @ numbers.float().T, 2e-2)
            seconds = seconds_of(machine, calls)
            least = _floor_s(machine, small.nbytes * out / _BASE, 2.0 * rows * out * width)
            total, floor = total + seconds, floor + (least or 0)
            if name == "gate and up":
                widest = (seconds, None if least is None else least / seconds)
        found.append(Figure(f"layer, rows {rows}", total * 1e6, "microseconds", floor / total or None))
        if rows == 1:
            found.append(Figure("gate and up, rows 1", widest[0] * 1e6, "microseconds", widest[1]))
        if (plain_s := machine.known.get(f"plain {rows}")) is not None:
            found.append(Figure(f"plain over this, rows {rows}", plain_s / total, "x"))
    return found


def written_out(machine: Machine) -> list[Figure]:
    """Measure expanding weights to plain numbers, by format."""
    out, width = machine.shapes.widest
    found = []
    for type_name in FORMATS:
        base = random_of(type_name, (_BASE, width))
        small = planes_of(base)
        assert small is not None
        p = tall(small, out, machine)
        numbers = torch.from_numpy(base.dequantize()).to(machine.device)
        check(f"{type_name} written out", dequantize(p, machine.dtype)[-_BASE:], numbers, 1e-2)
        seconds = seconds_of(machine, [lambda p=p: dequantize(p, machine.dtype)])
        moved = p.nbytes + out * width * machine.dtype.itemsize
        found.append(Figure(f"{type_name}", seconds * 1e6, "microseconds", machine.share(moved, "copy", seconds)))
    return found


def coded(machine: Machine, type_name: str) -> list[Figure]:
    """Measure coded rows with coded weights, and rows coded from a norm's sums, as in a step."""
    s, found = machine.shapes, []
    out, width = s.widest
    base = random_of(type_name, (_BASE, width))
    small = planes_of(base)
    assert small is not None
    assert small.inputs is not None
    ceiling = "int8 product" if small.inputs.kind == "int8" else "fp8 product"
    for rows in (1, 8, 32, 128, 1024, 8192) if machine.is_gpu else (1, 3):

        def make(p: Planes = small, count: int = rows) -> Callable[[], Tensor]:
            assert p.inputs is not None
            x = coded_rows(machine.normal(count, width), p.inputs)
            return partial(product, x, tall(p, out, machine), ProductEnd(), repeats=False)

        calls = in_turns(machine, make, small.nbytes * out / _BASE)
        x = calls[0].args[0]  # type: ignore[attr-defined]
        numbers = _numbers_of(CodedRows(x.codes[:4], x.scales[:4], x.form, x.dtype))
        ours = calls[0]()
        assert isinstance(ours, Tensor)
        expected = numbers @ torch.from_numpy(base.dequantize()).to(machine.device).float().T
        check(f"{type_name} codes, rows {rows}", ours[:4, -_BASE:], expected, 1e-2)
        seconds = seconds_of(machine, calls)
        floor = _floor_s(machine, small.nbytes * out / _BASE, 2.0 * rows * out * width, ceiling)
        share = None if floor is None else floor / seconds
        found.append(Figure(f"gate and up, rows {rows}", seconds * 1e6, "microseconds", share))
        made = [partial(coded_rows, machine.normal(rows, width), small.inputs)]
        found.append(Figure(f"codes of rows {rows}", seconds_of(machine, made) * 1e6, "microseconds"))
    return found


def _numbers_of(x: CodedRows) -> Tensor:
    """Return the numbers that codes represent, in float32."""
    codes = x.codes if x.form.kind == "int8" else x.codes.view(torch.float8_e4m3fn)
    cols = codes.shape[1]
    return codes.float() * x.scales.repeat_interleave(x.form.group or cols, dim=1)[:, :cols]


def stack_of(type_name: str, shape: tuple[int, int, int], machine: Machine) -> Planes:
    """Return a stack [experts, out, in], whose matrices repeat the rows of `random_of` with the height `_BASE`."""
    count, out, width = shape
    small = planes_of(random_of(type_name, (_BASE, width)))
    assert small is not None
    of_all = tall(small, count * out, machine)
    fields: dict[str, Any] = {
        name: x if name in ("table", "column_order") else x.reshape(count, out, -1)
        for name, x in of_all.tensors.items()
    }
    return replace(of_all, shape=shape, **fields)


def experts(machine: Machine) -> list[Figure]:
    """Measure the products of a mixture of experts: two of eight for each of 32 rows."""
    s, found = machine.shapes, []
    rows, top_k = (32, 2) if machine.is_gpu else (2, 2)
    chosen = torch.stack([torch.randperm(s.experts, device=machine.device)[:top_k] for _ in range(rows)])
    places = sort_by_expert(chosen, s.experts)
    x = machine.normal(rows, s.hidden)
    for name in ("plain", "Q4_K", "MXFP4"):
        if name == "plain":
            weight: Planes | Tensor = machine.normal(s.experts, s.expert_rows, s.hidden)
            numbers = weight[chosen[0, 0], :_BASE].float()
        else:
            weight = stack_of(name, (s.experts, s.expert_rows, s.hidden), machine)
            numbers = torch.from_numpy(random_of(name, (_BASE, s.hidden)).dequantize()).to(machine.device).float()
        call = partial(expert_linear, x, weight, places, top_k)
        check(f"experts {name}", call()[0, :_BASE], numbers @ x[0].float(), 2e-2)
        seconds = seconds_of(machine, [call])
        nbytes = weight.nbytes * len(chosen.unique()) / s.experts
        share = machine.share(nbytes, "read", seconds)
        found.append(Figure(f"{name}, rows {rows}", seconds * 1e6, "microseconds", share))
    return found


CASES = [
    Case("products, plain", "products", plain, 40),
    *(Case(f"products, {name}", "products", partial(quantized, type_name=name), 45) for name in FORMATS[:5]),
    *(Case(f"products of codes, {name}", "products", partial(coded, type_name=name), 20) for name in CODED),
    Case("products, experts", "products", experts, 20),
    Case("weights written out", "products", written_out, 30),
    *(Case(f"products, {name}", "products", partial(quantized, type_name=name), 45) for name in FORMATS[5:]),
]
