"""StableLM 2: LayerNorm, a quarter of a head rotates, attention and MLP side by side if asked. arXiv 2402.17834."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, mlp
from octavo.models._reading import MAX_LAYERS, ConfigReader

_NO_HEAD_NORMS = "a LayerNorm of its own for each head (StableLM 2 12B) is not supported"


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """The shared configuration; parallel: attention and MLP read the same normed input."""

    parallel: bool = False

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        if "layers.0.self_attn.q_norm.weight" in shapes:
            raise ModelLoadError(f"tensor blk.0.attn_q_norm.weight: {_NO_HEAD_NORMS}")
        plain = cls.read_gguf(reader, shapes, norm_eps="attention.layer_norm_epsilon")
        # The 12B model says so by leaving out the norm of the MLP.
        parallel = "layers.0.post_attention_layernorm.weight" not in shapes
        return replace(plain, parallel=reader.flag("use_parallel_residual", parallel) and parallel)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.flag("qk_layernorm", False):
            raise reader.error("qk_layernorm", True, _NO_HEAD_NORMS)
        plain = cls.read_hf(
            reader.with_defaults({"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5}),
            windows=(None,) * reader.integer("num_hidden_layers", high=MAX_LAYERS),
            norm_eps="layer_norm_eps",
        )
        return replace(plain, parallel=reader.flag("use_parallel_residual", False))


def build(g: Graph, cfg: Config) -> Value:
    """The logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.layer_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i, cfg.rope)
        if not cfg.parallel:
            x = g.layer_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + mlp(g, x, cfg, i)
    h = g.layer_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)
