"""A small llama model as a GGUF file, whose widths fit every type."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from octavo.loader.gguf_writer import MetadataValue, OutputTensor, write_gguf

WIDTH = 256


def write_model(
    path: Path,
    *,
    layers: int = 2,
    gqa: int = 2,
    experts: int = 0,
    tied: bool = True,
    width: int = WIDTH,
    ternary: bool = False,
) -> Path:
    """Random float16 weights from a fixed seed, with the vocabulary of eight tokens. ternary: of the matrices."""
    rng = np.random.default_rng(0)
    metadata: dict[str, MetadataValue] = {
        "general.architecture": "llama",
        "general.file_type": 1,
        "llama.block_count": layers,
        "llama.context_length": 64,
        "llama.embedding_length": width,
        "llama.feed_forward_length": width,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 8 // gqa,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "c", "d", "ab", "cd"],
        "tokenizer.ggml.token_type": np.array([3, 3, 1, 1, 1, 1, 1, 1], np.int32),
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    if experts:
        metadata |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
    tensors: list[OutputTensor] = []

    def add(name: str, *shape: int) -> None:
        kind = np.float32 if len(shape) == 1 or "gate_inp" in name else np.float16
        mean = float(len(shape) == 1)
        values = rng.normal(mean, 0.1, shape)
        if ternary and len(shape) > 1:
            values = np.rint(np.clip(10 * values, -1, 1)) / 8
        data = values.astype(kind).view(np.uint8)
        tensors.append(OutputTensor(name, "F32" if kind is np.float32 else "F16", shape, lambda: [data]))

    add("token_embd.weight", 8, width)
    add("output_norm.weight", width)
    if not tied:
        add("output.weight", 8, width)
    for i in range(layers):
        add(f"blk.{i}.attn_norm.weight", width)
        add(f"blk.{i}.ffn_norm.weight", width)
        add(f"blk.{i}.attn_q.weight", width, width)
        for part in ("k", "v"):
            add(f"blk.{i}.attn_{part}.weight", width // gqa, width)
        add(f"blk.{i}.attn_output.weight", width, width)
        suffix, stack = ("_exps", (experts,)) if experts else ("", ())
        if experts:
            add(f"blk.{i}.ffn_gate_inp.weight", experts, width)
        for part in ("gate", "up", "down"):
            add(f"blk.{i}.ffn_{part}{suffix}.weight", *stack, width, width)
    write_gguf(path, metadata, tensors)
    return path
