"""A tiny random RWKV 7: its definition in numpy, as a checkpoint of flash-linear-attention, and as a GGUF file.

arXiv 2503.14456, sections 3 and 4. transformers does not support it, so this reference was written from the paper.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = dict[str, NDArray[np.float32]]
HIDDEN, HEADS, LAYERS, WIDTH, EPS = 128, 2, 3, 160, 1e-5
VOCAB = 288
DIM = HIDDEN // HEADS
RANKS = {"w": 24, "a": 20, "v": 12, "g": 28}
WORDS = [bytes([byte]) for byte in range(256)]
"""The tokens from 1 on: bytes, and longer ones that share beginnings."""
WORDS += [
    b"th",
    b"the",
    b"there",
    b" the",
    b"\n\n",
    b"\xe4\xbd",
    b"\xe4\xbd\xa0\xe5\xa5\xbd",
    b"'\"",
    b"\\x",
    b"User: ",
]
_RANK_KEYS = {"w": "decay", "a": "a", "v": "v", "g": "gate"}


def config(vocab_size: int) -> dict[str, object]:
    """Return the published config.json with other sizes."""
    keys = {"model_type": "rwkv7", "hidden_size": HIDDEN, "head_dim": DIM, "num_hidden_layers": LAYERS}
    keys |= {"intermediate_size": WIDTH, "hidden_act": "sqrelu", "norm_eps": EPS, "norm_first": True, "attn": None}
    keys |= {f"{name}_low_rank_dim": RANKS[part] for part, name in _RANK_KEYS.items()}
    keys |= {"vocab_size": vocab_size, "max_position_embeddings": 64, "tie_word_embeddings": False}
    return {**keys, "value_dim": [HIDDEN] * LAYERS, "bos_token_id": 0, "eos_token_id": 0}


def tensors(vocab_size: int = VOCAB) -> Tensors:
    """Return the weights by their names in the published files."""
    random = np.random.default_rng(7)
    found: Tensors = {}

    def add(name: str, *shape: int, scale: float | None = None, mean: float = 0.0) -> None:
        deviation = shape[-1] ** -0.5 if scale is None else scale
        found[name] = (mean + deviation * random.standard_normal(shape)).astype(np.float32)

    def norm(name: str) -> None:
        add(name + ".weight", HIDDEN, scale=0.1, mean=1.0)
        add(name + ".bias", HIDDEN, scale=0.1)

    add("model.embeddings.weight", vocab_size, HIDDEN, scale=0.4)
    add("lm_head.weight", vocab_size, HIDDEN)
    norm("model.norm")
    norm("model.layers.0.pre_norm")
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        norm(p + "attn_norm")
        norm(p + "ffn_norm")
        norm(p + "attn.g_norm")
        for part in "rwkvag":
            add(f"{p}attn.x_{part}", 1, 1, HIDDEN, scale=0.3, mean=0.5)
        add(p + "ffn.x_k", 1, 1, HIDDEN, scale=0.3, mean=0.5)
        for part in ("k_k", "k_a"):
            add(p + "attn." + part, HIDDEN, scale=0.2, mean=0.9)
        add(p + "attn.r_k", HEADS, DIM, scale=0.3)
        for part in "rkvo":
            add(f"{p}attn.{part}_proj.weight", HIDDEN, HIDDEN)
        for part, rank in RANKS.items():
            if part == "v" and i == 0:
                continue
            add(f"{p}attn.{part}_lora.lora.0.weight", rank, HIDDEN)
            add(f"{p}attn.{part}_lora.lora.2.weight", HIDDEN, rank)
            if part != "g":
                add(f"{p}attn.{part}_lora.lora.2.bias", HIDDEN, scale=0.5)
        add(p + "ffn.key.weight", WIDTH, HIDDEN)
        add(p + "ffn.value.weight", HIDDEN, WIDTH)
    return found


def save(directory: Path, vocab_size: int = VOCAB) -> Path:
    """Save the checkpoint of flash-linear-attention."""
    save_file(tensors(vocab_size), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config(vocab_size)))
    save_vocabulary(directory)
    return directory


def save_vocabulary(directory: Path) -> Path:
    """Save the file of RWKV's tokenizer: texts where the bytes are UTF-8, byte strings elsewhere."""
    lines = [f"{i} {_shown(data)} {len(data)}" for i, data in enumerate(WORDS, 1)]
    (directory / "rwkv_vocab_v20230424.txt").write_text("\n".join(lines) + "\n")
    return directory


def _shown(data: bytes) -> str:
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return repr(data)


def expected_logits(token_ids: list[int], vocab_size: int = VOCAB) -> NDArray[np.float32]:
    """Compute [tokens, vocab] with the paper's formulas, token by token in float64."""
    w = {name.removeprefix("model."): array.astype(np.float64) for name, array in tensors(vocab_size).items()}
    h = _layer_norm(w["embeddings.weight"][token_ids], w, "layers.0.pre_norm", EPS)
    first = None
    for i in range(LAYERS):
        p = f"layers.{i}."
        out, first = _time_mix(_layer_norm(h, w, p + "attn_norm", EPS), w, p + "attn.", first)
        h = h + out
        x = _layer_norm(h, w, p + "ffn_norm", EPS)
        x = _shared(x, w[p + "ffn.x_k"].reshape(-1))
        h = h + np.square(np.maximum(x @ w[p + "ffn.key.weight"].T, 0.0)) @ w[p + "ffn.value.weight"].T
    logits: NDArray[np.float32] = (_layer_norm(h, w, "norm", EPS) @ w["lm_head.weight"].T).astype(np.float32)
    return logits


def _time_mix(
    x: NDArray[np.float64], w: dict[str, NDArray[np.float64]], p: str, first: NDArray[np.float64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    mixed = {part: _shared(x, w[f"{p}x_{part}"].reshape(-1)) for part in "rwkvag"}

    def low_rank(part: str, kind: str = "") -> NDArray[np.float64]:
        inner = mixed[part] @ w[f"{p}{part}_lora.lora.0.weight"].T
        inner = np.tanh(inner) if kind == "tanh" else _sigmoid(inner) if kind == "sigmoid" else inner
        bias = w.get(f"{p}{part}_lora.lora.2.bias", np.zeros(HIDDEN))
        return inner @ w[f"{p}{part}_lora.lora.2.weight"].T + bias

    r, k, v = (mixed[part] @ w[f"{p}{part}_proj.weight"].T for part in "rkv")
    decays = np.exp(-np.exp(-0.5) * _sigmoid(low_rank("w", "tanh")))
    rates = _sigmoid(low_rank("a"))
    if first is not None:
        v = v + (first - v) * _sigmoid(low_rank("v"))
    removal = (k * w[p + "k_k"]).reshape(-1, HEADS, DIM)
    removal = removal / np.linalg.norm(removal, axis=-1, keepdims=True)
    k = k * (1.0 + (rates - 1.0) * w[p + "k_a"])
    r, k, values, decays, rates = (y.reshape(-1, HEADS, DIM) for y in (r, k, v, decays, rates))
    state, out = np.zeros((HEADS, DIM, DIM)), np.empty_like(values)  # rows of values, columns of keys
    for t in range(len(x)):
        removed = np.einsum("hvk,hk->hv", state, removal[t])
        state = state * decays[t][:, None]
        state -= removed[:, :, None] * (rates[t] * removal[t])[:, None]
        state += values[t][:, :, None] * k[t][:, None]
        out[t] = np.einsum("hvk,hk->hv", state, r[t])
    centered = out - out.mean(axis=-1, keepdims=True)
    normed = centered / np.sqrt(out.var(axis=-1, keepdims=True) + DIM * EPS)
    normed = normed.reshape(-1, HIDDEN) * w[p + "g_norm.weight"] + w[p + "g_norm.bias"]
    bonus = (r * k * w[p + "r_k"]).sum(axis=-1, keepdims=True) * values
    out = (normed + bonus.reshape(-1, HIDDEN)) * low_rank("g", "sigmoid")
    return out @ w[p + "o_proj.weight"].T, v if first is None else first


def _shared(x: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mix each row of x with the previous row by this share; before the first row there are zeros."""
    before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])
    return x + (before - x) * share


def _layer_norm(
    x: NDArray[np.float64], w: dict[str, NDArray[np.float64]], name: str, eps: float
) -> NDArray[np.float64]:
    normed = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    return normed * w[name + ".weight"] + w[name + ".bias"]


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-x))


def save_gguf(path: Path, vocab_size: int = VOCAB) -> Path:
    """Write the model as llama.cpp's converter does, with the names of the gguf package."""
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_block_count(LAYERS)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(0)
    writer.add_layer_norm_eps(EPS)
    writer.add_wkv_head_size(DIM)
    writer.add_token_shift_count(2)
    writer.add_decay_lora_rank(RANKS["w"])
    writer.add_iclr_lora_rank(RANKS["a"])
    writer.add_value_residual_mix_lora_rank(RANKS["v"])
    writer.add_gate_lora_rank(RANKS["g"])
    writer.add_tokenizer_model("rwkv")
    escaped = [repr(token)[2:-1] for token in WORDS]
    rest = [f"[PAD{i}]" for i in range(1 + len(escaped), vocab_size)]
    writer.add_token_list(["<s>", *escaped, *rest])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL] + [kinds.NORMAL] * len(escaped) + [kinds.UNUSED] * len(rest))
    for name, array in _gguf_tensors(tensors(vocab_size)):
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(stored: Tensors) -> list[tuple[str, NDArray[np.float32]]]:
    whole = {"model.embeddings": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
    whole["model.layers.0.pre_norm"] = "token_embd_norm"
    found = [
        (f"{whole[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}", array)
        for name, array in stored.items()
        if name.rpartition(".")[0] in whole
    ]
    for i in range(LAYERS):
        p, b = f"model.layers.{i}.", f"blk.{i}."
        for old, new in (("attn_norm", "attn_norm"), ("ffn_norm", "attn_norm_2"), ("attn.g_norm", "time_mix_ln")):
            found += [(f"{b}{new}.{kind}", stored[f"{p}{old}.{kind}"]) for kind in ("weight", "bias")]
        shares = [stored[f"{p}attn.x_{part}"] for part in "rwkvag"]
        found.append((b + "time_mix_lerp_fused.weight", np.stack(shares)))
        found.append((b + "channel_mix_lerp_k.weight", stored[p + "ffn.x_k"]))
        for part in RANKS:
            source = "a" if part == "v" and i == 0 else part  # llama.cpp asks for them and does not use them
            stem = f"{p}attn.{source}_lora.lora."
            found.append((f"{b}time_mix_{part}1.weight", stored[stem + "0.weight"]))
            found.append((f"{b}time_mix_{part}2.weight", stored[stem + "2.weight"]))
            if part != "g":
                found.append((f"{b}time_mix_{part}0.weight", stored[stem + "2.bias"]))
        found += [
            (f"{b}time_mix_{part}.weight", stored[f"{p}attn.{part}"].reshape(-1)) for part in ("k_k", "k_a", "r_k")
        ]
        names = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
        found += [(f"{b}time_mix_{new}.weight", stored[f"{p}attn.{old}.weight"]) for old, new in names.items()]
        found += [(f"{b}channel_mix_{part}.weight", stored[f"{p}ffn.{part}.weight"]) for part in ("key", "value")]
    return found
