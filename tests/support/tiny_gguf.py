"""A tiny llama model with a vocabulary as a GGUF file, whose fields tests replace one at a time."""

from __future__ import annotations

import numpy as np

from tests.support.gguf_writer import Tensor, Value, gguf, key

VOCABULARY = 8
WIDTH = 32
HIDDEN = 64
KEYS: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": HIDDEN,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "c", "d", "ab", "cd"],
    "tokenizer.ggml.scores": np.zeros(VOCABULARY, np.float32),
    "tokenizer.ggml.token_type": np.array([3, 3, 1, 1, 1, 1, 1, 1], np.int32),
    "tokenizer.ggml.merges": ["a b", "c d"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (VOCABULARY, WIDTH),
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.attn_k.weight": (WIDTH // 2, WIDTH),
    "blk.0.attn_v.weight": (WIDTH // 2, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, WIDTH),
    "blk.0.ffn_norm.weight": (WIDTH,),
    "blk.0.ffn_gate.weight": (HIDDEN, WIDTH),
    "blk.0.ffn_up.weight": (HIDDEN, WIDTH),
    "blk.0.ffn_down.weight": (WIDTH, HIDDEN),
}


def plain_tensors(seed: int = 0) -> list[Tensor]:
    """Return the tensors with random content, all as F32."""
    rng = np.random.default_rng(seed)
    means = {name: float(len(shape) == 1) for name, shape in SHAPES.items()}
    values = {name: rng.normal(mean, 0.3, SHAPES[name]).astype(np.float32) for name, mean in means.items()}
    return [Tensor(name, "F32", SHAPES[name], array.tobytes()) for name, array in values.items()]


def tiny_tensors(seed: int = 0) -> list[Tensor]:
    """Return the tensors with random content: matrices as Q8_0 blocks, vectors as F32."""
    rng = np.random.default_rng(seed)
    tensors = []
    for name, shape in SHAPES.items():
        if len(shape) == 1:
            tensors.append(Tensor(name, "F32", shape, rng.normal(1, 0.1, shape).astype(np.float32).tobytes()))
            continue
        blocks = shape[0] * shape[1] // 32
        scales = np.full((blocks, 1), 0.01, np.float16).view(np.uint8)
        codes = rng.integers(0, 256, (blocks, 32), dtype=np.uint8)
        tensors.append(Tensor(name, "Q8_0", shape, np.concatenate([scales, codes], axis=1).tobytes()))
    return tensors


def tiny_keys(changes: dict[str, Value | None] | None = None) -> list[bytes]:
    """Return the metadata with some values replaced, added, or left out (None)."""
    values = {**KEYS, **(changes or {})}
    return [key(name, value) for name, value in values.items() if value is not None]


def tiny_gguf(changes: dict[str, Value | None] | None = None, tensors: list[Tensor] | None = None) -> bytes:
    """Return the whole file."""
    return gguf(tiny_keys(changes), tiny_tensors() if tensors is None else tensors)


def wide_gguf(num_layers: int) -> bytes:
    """Return a model whose layers take 6 MiB each in float32."""
    hidden = 16384
    tensors = []
    for name, shape in SHAPES.items():
        shape = tuple(hidden if size == HIDDEN else size for size in shape)
        names = [name.replace("blk.0.", f"blk.{i}.") for i in range(num_layers if name.startswith("blk.") else 1)]
        tensors += [Tensor(each, "F32", shape, np.ones(shape, np.float32).tobytes()) for each in names]
    return tiny_gguf({"llama.block_count": num_layers, "llama.feed_forward_length": hidden}, tensors)
