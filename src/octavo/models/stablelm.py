"""StableLM 2: LayerNorm, a quarter of each head rotates, optionally parallel attention and MLP. arXiv 2402.17834.

The 12B model has a LayerNorm on each head of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, mlp
from octavo.models._reading import ConfigReader
from octavo.models._weights import Flatten, Stack, WeightTable

_Q_NORM, _K_NORM = "layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"
# GGUF files have one matrix with a row for each head, checkpoints a vector for each.
WEIGHTS = WeightTable(
    transforms=(
        Stack("layers.*.self_attn.q_layernorm.norms.*", _Q_NORM, "safetensors"),
        Stack("layers.*.self_attn.k_layernorm.norms.*", _K_NORM, "safetensors"),
        Flatten(_Q_NORM, rows=lambda c: c.num_heads),
        Flatten(_K_NORM, rows=lambda c: c.num_kv_heads),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """StableLM 2's configuration.

    parallel: attention and MLP read the same normed input.
    """

    parallel: bool = False

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        # In the 12B model, the only sign is that the MLP's norm is missing.
        parallel = "layers.0.post_attention_layernorm.weight" not in shapes
        qk_norm = "layers.0.self_attn.q_norm.weight" in shapes
        return cls.read_gguf(
            reader,
            shapes,
            norm_eps="attention.layer_norm_epsilon",
            attention=AttentionConfig(same_windows_from_gguf(reader), qk_norm=qk_norm),
            parallel=reader.flag("use_parallel_residual", parallel) and parallel,
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5})
        return cls.read_hf(
            reader,
            norm_eps="layer_norm_eps",
            attention=AttentionConfig(same_windows(reader), qk_norm=reader.flag("qk_layernorm", False)),
            parallel=reader.flag("use_parallel_residual", False),
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.layer_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i, centered=True)
        if not cfg.parallel:
            x = g.layer_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + mlp(g, x, cfg, i)
    h = g.layer_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)
