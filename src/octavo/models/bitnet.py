"""BitNet b1.58: Llama with ternary weights, a norm before each output projection and a squared relu. arXiv 2402.17764.

Each published weight matrix holds three values, times one number per matrix. Octavo computes with them as they are
stored. The authors trained with activations rounded to eight bits; here only the CPU's kernels do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Value
from octavo.models import llama
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable

ALIASES = ("bitnet-b1.58",)
_KINDS = ("relu2", "silu", "swish")

WEIGHTS = WeightTable(
    names={
        "blk.*.attn_sub_norm": "layers.*.self_attn.attn_sub_norm",
        "blk.*.ffn_sub_norm": "layers.*.mlp.ffn_sub_norm",
    }
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """BitNet's configuration, with the activation of the gate.

    kind: the activation. Files with the older name, `bitnet`, contain models that use silu.
    """

    kind: str = "relu2"

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return replace(cls.read_gguf(reader, shapes), kind="silu" if reader.prefix == "bitnet." else "relu2")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        kind = reader.text("hidden_act", "relu2")
        return cls.read_hf(
            reader.with_defaults({"rms_norm_eps": 1e-5}),
            attention=AttentionConfig(same_windows(reader)),
            rope=hf_rope(reader, theta=500000.0),
            mlp=MLPConfig.from_hf(reader, activation=_KINDS),
            kind="silu" if kind == "swish" else kind,
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    return llama.build(g, cfg, _attention, _mlp)


def _attention(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    p, rope = f"layers.{layer}.self_attn.", cfg.rope_params(layer)
    assert rope is not None
    q, k, v = (g.linear(x, f"{p}{n}_proj") for n in "qkv")
    q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    out = g.attention(q, k, v, cfg.attention_params(layer))
    return g.linear(g.rms_norm(out, p + "attn_sub_norm", cfg.norm_eps), p + "o_proj")


def _mlp(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    stem = f"layers.{layer}.mlp"
    gate, up = (g.linear(x, f"{stem}.{n}_proj") for n in ("gate", "up"))
    h = g.rms_norm(g.add(GatedActivation(gate, up, cfg.kind)), f"{stem}.ffn_sub_norm", cfg.norm_eps)
    return g.linear(h, f"{stem}.down_proj")
