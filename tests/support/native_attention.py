"""A native program with a single attention record, and dense float64 attention to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.backends.cpu.lowering import lower
from octavo.batch import Batch, BlockBytes
from octavo.config import KVDtype
from octavo.graph.layer_formats import LayerFormat
from octavo.graph.ops.attention import Attention, AttentionParams, FusedAttention, RopeParams
from octavo.graph.ops.kv_rounding import round_keys, round_values
from octavo.graph.ops.latent_attention import LatentAttention
from octavo.graph.values import TOKENS, Value
from tests.support.batches import Request, blocks_for, step

TOKENS_SYMBOL = 0
PAGE = 4096


@dataclass(frozen=True)
class Extras:
    """FusedAttention's operations on heads before the dot product, and the tables of both operations."""

    rope: RopeParams | None = None
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    eps: float = 1e-5
    sinks: np.ndarray | None = None
    distance_bias: np.ndarray | None = None  # [num_heads, 2 * reach + 1]
    key_mean: np.ndarray | None = None  # [num_kv_heads, head_dim], what an int8 cache takes off keys
    bare_norms: str = ""  # those of q, k and v that have a norm without a weight

    def has_norm(self, name: str) -> bool:
        return name in self.bare_norms or getattr(self, f"{name}_norm", None) is not None


@dataclass(frozen=True)
class Setup:
    """The settings of a run; only the cache type may change the bits of the result."""

    isa: str = "avx2"
    threads: int = 1
    block_size: int = 16
    fused: bool = True
    latent: bool = False  # LatentAttention: values are the first columns of keys, those of a sequence are not read
    checked: bool = False
    max_tokens: int = 600
    model_len: int = 8192
    num_blocks: int = 1200
    kv_dtype: KVDtype = "float16"


class NativeAttention:
    """One layer. Rows of q, k and v go in, rows of the output come out; the cache is kept between runs."""

    def __init__(self, params: AttentionParams, extras: Extras, setup: Setup) -> None:
        self.params, self.setup = params, setup
        inputs = self._input_widths()
        values, offset = [], 0
        for cols in [*inputs, params.output_width]:
            values.append((offset, cols, TOKENS_SYMBOL))
            offset += -(-setup.max_tokens * cols * 4 // PAGE) * PAGE
        limits = (setup.max_tokens, 64, 1, setup.model_len, 1 << 30)
        self.output = len(inputs)
        self.program = _native.Program(
            setup.isa, setup.threads, (50, 50), limits, values, offset, checked=setup.checked
        )
        op = self._operation(inputs, extras)
        operands = lower(op, self._format(extras))
        arrays = {name: getattr(extras, name) for name in ("sinks", "q_norm", "k_norm", "distance_bias")}
        weights = [(name, arrays.get(name) if value is None else value) for name, value in operands.weights]
        add = self.program.add_plain_weight
        places = [(n, -1 if a is None else add(np.array(a, np.float32).reshape(-1))) for n, a in weights]
        self.program.add_record(
            op.name,
            "layers.0",
            self.output,
            [(name, index) for index, (name, _) in enumerate(operands.inputs)],
            places,
            operands.ints,
            operands.floats,
            cache=(0, 0),
        )
        self.program.finish()
        self.program.allocate_cache(setup.num_blocks, setup.block_size)

    @property
    def block_bytes(self) -> int:
        return block_bytes_of(lambda batch: self.program.submit(batch, -1, None, None))

    def _input_widths(self) -> list[int]:
        p = self.params
        if self.setup.latent:
            parts = (p.cache.value_dim, p.head_dim - p.cache.value_dim)
            return [heads * part for heads in (p.num_heads, 1) for part in parts]
        return [sum(p.widths)] if self.setup.fused else list(p.widths)

    def _operation(self, inputs: list[int], extras: Extras) -> Attention | FusedAttention | LatentAttention:
        """Return the operation without its weights, which are passed as arrays."""
        values = [Value(i, TOKENS, cols) for i, cols in enumerate(inputs)]
        if self.setup.latent:
            return LatentAttention(*values, self.params)
        if self.setup.fused:
            norms = {f"norms_{n}": extras.has_norm(n) for n in "qkv"}
            return FusedAttention(*values, self.params, extras.rope, eps=extras.eps, **norms)
        return Attention(*values, self.params)

    def _format(self, extras: Extras) -> LayerFormat:
        mean = None if extras.key_mean is None else extras.key_mean.reshape(-1)
        return LayerFormat(self.setup.kv_dtype, mean)

    def run(self, batch: Batch, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Compute the output [tokens, params.output_width] from q, k and v [tokens, params.widths]."""
        inputs = [np.concatenate([q, k, v], axis=1)] if self.setup.fused else [q, k, v]
        if self.setup.latent:
            heads = [x.reshape(-1, self.params.head_dim) for x in (q, k)]
            parts = [part for x in heads for part in np.split(x, [self.params.cache.value_dim], axis=1)]
            inputs = [part.reshape(len(q), -1) for part in parts]
        for index, array in enumerate(inputs):
            self.program.value(index, array.shape[0])[:] = array
        self.program.value(self.output, q.shape[0])[:] = np.nan
        self.program.submit(batch, -1, None, None).wait()
        return self.program.value(self.output, q.shape[0]).copy()


def block_bytes_of(submit: Callable[[Batch], object]) -> int:
    """Return the block size in bytes of a native program's cache, as stated in its error for an empty cache."""
    batch = step([(Request([0], [0]), 1)])
    batch.block_loads = BlockBytes(np.zeros(1, np.int32), np.zeros((1, 0), np.uint8))
    with pytest.raises(ValueError, match="has 0 bytes per block, must have") as refusal:
        submit(batch)
    return int(str(refusal.value).split()[-1])


@dataclass
class Sequence:
    """One request with the rows of its tokens: q, k and v of [length, columns]."""

    request: Request
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    outputs: list[np.ndarray] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.request.token_ids)


def random_sequences(
    rng: np.random.Generator, params: AttentionParams, lengths: list[int], block_size: int, num_blocks: int
) -> list[Sequence]:
    """Make sequences of these lengths with blocks scattered over the whole cache."""
    free = rng.permutation(num_blocks).tolist()
    sequences = []
    for length in lengths:
        blocks = [free.pop() for _ in range(blocks_for(length, block_size))]
        q, k, v = (rng.standard_normal((length, width)).astype(np.float32) for width in params.widths)
        sequences.append(Sequence(Request([0] * length, blocks), q * 1.5, k, v))
    return sequences


def advance(
    native: NativeAttention, scheduled: list[tuple[Sequence, int]], copies: Iterable[tuple[int, int]] = ()
) -> None:
    """Run one step with the next `count` tokens of each sequence, and append the results to its outputs.

    copies: cache blocks that are copied first, as (source, destination).
    """
    spans = [slice(s.request.computed, s.request.computed + count) for s, count in scheduled]
    rows = [
        np.concatenate([getattr(s, name)[span] for (s, _), span in zip(scheduled, spans, strict=True)])
        for name in "qkv"
    ]
    batch = step([(s.request, count) for s, count in scheduled], block_size=native.setup.block_size)
    batch.logits_indices = np.zeros(0, np.int32)
    batch.block_copies = np.array(list(copies), np.int32).reshape(-1, 2)
    out = native.run(batch, *rows)
    start = 0
    for sequence, count in scheduled:
        sequence.outputs.append(out[start : start + count])
        start += count


def rotate(x: np.ndarray, rope: RopeParams) -> np.ndarray:
    """Rotate x [tokens, heads, head_dim] from position 0 on, in float64, using complex numbers."""
    half = len(rope.frequencies)
    angles = np.arange(x.shape[0])[:, None] * np.array(rope.frequencies, np.float32).astype(np.float64)
    turn = np.exp(1j * angles)[:, None] * rope.attention_factor
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    out = x.copy()
    out[..., :half], out[..., half : 2 * half] = turned.real, turned.imag
    return out


def dense_attention(
    params: AttentionParams, extras: Extras, s: Sequence, kv_dtype: KVDtype | None = None
) -> np.ndarray:
    """Compute the softmax attention of a whole sequence in float64: [length, params.output_width].

    kv_dtype: type that keys and values are rounded to; None means no rounding.
    """
    p, length = params, s.length
    heads_of = ((s.q, p.num_heads), (s.k, p.num_kv_heads), (s.v, p.num_kv_heads))
    q, k, v = (a.astype(np.float64).reshape(length, count, -1) for a, count in heads_of)
    for name, heads, weight in (("q", q, extras.q_norm), ("k", k, extras.k_norm), ("v", v, None)):
        if extras.has_norm(name):
            heads /= np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + extras.eps)
            heads *= 1.0 if weight is None else weight.astype(np.float64)
    if extras.rope:
        q, k = rotate(q, extras.rope), rotate(k, extras.rope)
    k, v = round_keys(k, kv_dtype, extras.key_mean), round_values(v, kv_dtype)
    out = np.empty((length, p.num_heads, v.shape[2]))
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    visible = (distance <= 0) & (distance > -(p.window or length + 1))
    if p.chunked:
        chunks = np.arange(length) // p.window
        visible = (distance <= 0) & (chunks[None, :] == chunks[:, None])
    for head in range(p.num_heads):
        kv_head = head * p.num_kv_heads // p.num_heads
        scores = q[:, head] @ k[:, kv_head].T * p.scale
        if p.query_scales:
            steps = (np.arange(length) + p.scale_offset) // p.scale_length
            scores *= np.take(p.query_scales, steps, mode="clip")[:, None]
        if p.softcap:
            scores = p.softcap * np.tanh(scores / p.softcap)
        if extras.distance_bias is not None:
            reach = extras.distance_bias.shape[1] // 2
            scores += extras.distance_bias[head][np.clip(distance, -reach, reach) + reach]
        if p.alibi_slopes:
            scores += p.alibi_slopes[head] * distance
        weights = np.exp(np.where(visible, scores, -np.inf))
        sink = np.exp(float(extras.sinks[head])) if extras.sinks is not None else 0.0
        out[:, head] = weights @ v[:, kv_head] / (weights.sum(axis=1, keepdims=True) + sink)
    return out.reshape(length, -1)


def relative_errors(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return |found - expected| / |expected| of each row."""
    errors: np.ndarray = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return errors


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest relative error of all rows."""
    return float(relative_errors(found, expected).max())
