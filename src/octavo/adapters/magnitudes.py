"""The magnitudes of DoRA (Liu et al., arXiv 2402.09353) as gains on the products with a model's weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from octavo.adapters.adapter import EMBEDDING, AdapterBase
from octavo.batch import Float32
from octavo.errors import ModelLoadError
from octavo.graph.ops.low_rank import HEAD_PLACE, LowRank
from octavo.quantization.packed import Weight

_ROWS = 1 << 12  # rows of the change in memory at once


def with_gains(parts: Mapping[str, LowRank], base: AdapterBase) -> dict[str, LowRank]:
    """Return the parts as gain * (W x) + B' (A x) instead of m / |W + scale B A| * (W x + scale B (A x)).

    Before the call, the gain of a low-rank part contains its magnitudes m. Magnitudes and norms have one number per row
    of the weight.

    Raises ModelLoadError if a row of the changed weight is zero.
    """
    magnified = {name for name, part in parts.items() if part.gain is not None and part.a is not None}
    if not magnified:
        return dict(parts)
    with base.opened() as weights:
        return {
            name: _with_gain(part, name, _weight(name, weights, base.tables)) if name in magnified else part
            for name, part in parts.items()
        }


def _with_gain(part: LowRank, name: str, weight: Float32) -> LowRank:
    assert part.gain is not None, "it has magnitudes"
    norms = _norms(part, weight)
    if not norms.all():
        raise ModelLoadError(f"{name}: a row of the changed weight is zero, so its magnitude has no direction")
    gain = (part.gain / norms).astype(np.float32)
    return replace(part, b=part.b * gain[..., None], gain=gain)


def _weight(name: str, weights: Mapping[str, Weight], tables: Collection[str]) -> Float32:
    """Return the weight [out, in], or a stack of them. An embedding table is transposed, as its parts are."""
    stored = name
    if name == HEAD_PLACE and name not in weights:
        stored = EMBEDDING  # a head that is the embedding
    numbers = weights[stored].dequantize()
    return numbers.T if name in tables else numbers


def _norms(part: LowRank, weight: Float32) -> Float32:
    """Return the norms of the rows of W + scale B A."""
    assert part.a is not None, "it has factors"
    found = np.empty(part.b.shape[:-1], np.float32)
    for begin in range(0, part.b.shape[-2], _ROWS):
        rows = slice(begin, begin + _ROWS)
        changed = weight[..., rows, :] + np.float32(part.scale) * (part.b[..., rows, :] @ part.a)
        found[..., rows] = np.sqrt(np.square(changed, dtype=np.float32).sum(-1))
    return found
