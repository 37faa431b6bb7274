"""Tiny EAGLE-3 heads in the formats of SpecForge and speculators, and a numpy definition of what they compute."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from tests.support.safetensors_writer import safetensors

Array = NDArray[np.float64]
THETA, EPS = 10000.0, 1e-5


@dataclass
class TinyEagle:
    """A head for a tiny model.

    tensors: by SpecForge's names.
    target_ids: the model's token for each row of its logits.
    """

    model: PreTrainedModel
    tensors: dict[str, NDArray[Any]]
    target_ids: NDArray[np.int64]
    num_heads: int
    num_kv_heads: int
    norms_residual: bool = False
    keys: dict[str, Any] = field(default_factory=dict)  # further ones of config.json

    def save(self, directory: Path, *, is_of_speculators: bool = False) -> Path:
        """Save the head and return the directory."""
        tensors, hidden = dict(self.tensors), self.model.config.hidden_size
        tensors["d2t"] = self.target_ids - np.arange(len(self.target_ids))
        layer = {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": hidden,
            "intermediate_size": len(tensors["midlayer.mlp.up_proj.weight"]),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "vocab_size": self.model.config.vocab_size,
            "max_position_embeddings": 256,
            "rope_theta": THETA,
            "rms_norm_eps": EPS,
        }
        config = {"draft_vocab_size": len(self.target_ids), "norm_before_residual": self.norms_residual, **self.keys}
        if is_of_speculators:
            config |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
            tensors = {name.replace("midlayer.", "layers.0."): array for name, array in tensors.items()}
        else:
            config |= {"architectures": ["LlamaForCausalLMEagle3"], **layer}
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "model.safetensors").write_bytes(safetensors(tensors))
        return directory

    def steps(self, token_ids: list[int], of_model: Array, own: Array, start: int, cache: list[Array]) -> list[Array]:
        """Return logits and the head's hidden states of tokens from a position on.

        of_model: [tokens, 3 * hidden].
        own: [tokens, hidden]; where either is used, the other is zero.
        cache: keys and values so far, which grow.
        """
        w = {name: array.astype(np.float64) for name, array in self.tensors.items()}
        embeddings = w.get("embed_tokens.weight", self.model.model.embed_tokens.weight.detach().double().numpy())
        is_of_model = of_model.any(axis=1, keepdims=True)
        hidden = of_model @ w["fc.weight"].T + is_of_model * w.get("fc.bias", 0.0) + own
        normed = _norm(hidden, w["midlayer.hidden_norm.weight"])
        x = np.hstack([_norm(embeddings[token_ids], w["midlayer.input_layernorm.weight"]), normed])
        h = (normed if self.norms_residual else hidden) + self._attention(x, start, cache, w)
        y = _norm(h, w["midlayer.post_attention_layernorm.weight"])
        gate, up = (y @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w["midlayer.mlp.down_proj.weight"].T
        return [_norm(h, w["norm.weight"]) @ w["lm_head.weight"].T, h]

    def _attention(self, x: Array, start: int, cache: list[Array], w: dict[str, Array]) -> Array:
        q, k, v = (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
        count = len(x)
        q, k = (_rotated(y.reshape(count, n, -1), start) for y, n in ((q, self.num_heads), (k, self.num_kv_heads)))
        v = v.reshape(count, self.num_kv_heads, -1)
        cache[:] = [np.concatenate([old[:start], new]) for old, new in zip(cache, (k, v), strict=True)] or [k, v]
        keys, values = (np.repeat(each, self.num_heads // self.num_kv_heads, axis=1) for each in cache)
        scores = np.einsum("qhd,khd->hqk", q, keys) / np.sqrt(q.shape[2])
        is_later = np.arange(len(keys))[None, :] > np.arange(start, start + count)[:, None]
        scores = np.where(is_later, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, values).reshape(count, -1)
        return mixed @ w["midlayer.self_attn.o_proj.weight"].T


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * weight


def _rotated(x: Array, start: int) -> Array:
    """Rotate the two halves of each head by the position."""
    half = x.shape[2] // 2
    angles = np.arange(start, start + len(x))[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def random_eagle(model: PreTrainedModel, *, norms_residual: bool = False, **keys: Any) -> TinyEagle:
    """Make a random head.

    keys: additional keys of config.json.
    """
    rng, width, inner = np.random.default_rng(11), model.config.hidden_size, 96
    vocab, own = model.config.vocab_size, 60

    def matrix(rows: int, cols: int) -> NDArray[np.float32]:
        return (rng.normal(size=(rows, cols)) * cols**-0.5).astype(np.float32)

    tensors = {
        "fc.weight": matrix(width, 3 * width),
        "lm_head.weight": matrix(own, width) * 4,
        **{
            f"midlayer.self_attn.{n}_proj.weight": matrix(rows, 2 * width)
            for n, rows in (("q", 64), ("k", 32), ("v", 32))
        },
        "midlayer.self_attn.o_proj.weight": matrix(width, 64),
        **{f"midlayer.mlp.{n}_proj.weight": matrix(inner, width) for n in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": matrix(width, inner),
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = (1 + 0.1 * rng.normal(size=width)).astype(np.float32)
    target_ids = np.sort(rng.permutation(vocab)[:own])
    return TinyEagle(model, tensors, target_ids, 4, 2, norms_residual, keys)


def agreeing_eagle(model: PreTrainedModel) -> TinyEagle:
    """Make a head that is always right, for a model whose next token depends only on the last one.

    Its attention sees each token's own embedding, and its output head is the model's with rows in another order.
    """
    width, head = model.config.hidden_size, random_eagle(model, norms_residual=True)
    own, target_ids = np.eye(width, 2 * width, dtype=np.float32), np.roll(np.arange(model.config.vocab_size), 7)
    tensors = head.tensors | {
        "midlayer.self_attn.q_proj.weight": 6 * own,
        "midlayer.self_attn.k_proj.weight": 6 * own,
        "midlayer.self_attn.v_proj.weight": own,
        "midlayer.self_attn.o_proj.weight": np.eye(width, dtype=np.float32),
        "midlayer.hidden_norm.weight": np.zeros(width, np.float32),
        "midlayer.input_layernorm.weight": np.ones(width, np.float32),
        "midlayer.mlp.down_proj.weight": np.zeros_like(head.tensors["midlayer.mlp.down_proj.weight"]),
        "norm.weight": model.model.norm.weight.detach().float().numpy(),
        "lm_head.weight": model.lm_head.weight.detach().float().numpy()[target_ids],
    }
    return TinyEagle(model, tensors, target_ids, 1, 1, norms_residual=True)
