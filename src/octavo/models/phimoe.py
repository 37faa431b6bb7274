"""Phi 3.5 MoE: LayerNorm with biases, long-rope, and experts chosen by SparseMixer. arXiv 2404.14219, 2409.12136."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.ops.moe import Routing
from octavo.graph.values import Value
from octavo.models import mixtral
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._layers import attention, mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_section

WEIGHTS = mixtral.WEIGHTS
_JITTER = 0.01
_TOP_K = 2  # SparseMixer supports no other number


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of Phi 3.5 MoE. Every layer has experts; the head has a bias if the checkpoint has one."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        mlp = MLPConfig.from_gguf(reader, _routing(reader, "expert_count", "expert_used_count", _JITTER))
        return cls.read_gguf(reader, shapes, mlp=mlp)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"rms_norm_eps": 1e-5})
        window = reader.integer("sliding_window") if reader.has("sliding_window") else None
        jitter = reader.number("router_jitter_noise", _JITTER, low=-1.0, high=1.0)
        section = rope_section(reader)
        if section.has("long_mscale"):
            long, short = (section.number(f"{name}_mscale") for name in ("long", "short"))
            if long != short:
                raise section.error("short_mscale", short, f"must be long_mscale, {long}")
            section = section.with_defaults({"attention_factor": long})
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader, window)),
            rope=hf_rope(reader, section),
            mlp=MLPConfig.from_hf(reader, _routing(reader, "num_local_experts", "num_experts_per_tok", jitter)),
        )


def _routing(reader: ConfigReader, count: str, chosen: str, jitter: float) -> Routing:
    """Return the routing of SparseMixer.

    count, chosen: keys of the number of experts and of the number chosen for each token.
    """
    top_k = reader.integer(chosen, _TOP_K, high=reader.integer(count, 16))
    if top_k != _TOP_K:
        raise reader.error(chosen, top_k, f"must be {_TOP_K}")
    return Routing(top_k, "sparsemixer", normalize=False, jitter=jitter)


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.layer_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i)
        x = g.layer_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + mlp(g, x, cfg, i)
    h = g.layer_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, bias="lm_head")
