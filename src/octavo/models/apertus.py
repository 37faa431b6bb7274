"""Apertus: Llama with xIELU with learned slopes in place of the gated MLP, and norms on the heads of q and k. arXiv
2509.14233.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.rowwise import Activation
from octavo.graph.values import Value
from octavo.models import llama
from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import Softplus, WeightTable

BETA, EPS = 0.5, -1e-6  # the slope at zero, and the start of e^x - 1
STEM = "layers.*.mlp.act_fn."
WEIGHTS = WeightTable(
    names={
        "layers.*.attention_layernorm": "layers.*.input_layernorm",
        "layers.*.feedforward_layernorm": "layers.*.post_attention_layernorm",
        STEM + "alpha_p": STEM + "above.weight",
        STEM + "alpha_n": STEM + "below.weight",
    },
    transforms=(
        Softplus(STEM + "above", only="safetensors"),
        Softplus(STEM + "below", BETA, only="safetensors"),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Apertus's configuration, with the slopes of xIELU.

    slopes: each layer's slopes above and below zero, if a GGUF file gives them; in other files they are weights.
    """

    slopes: tuple[tuple[float, float], ...] = ()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = cls.read_gguf(reader, shapes, attention=AttentionConfig(same_windows_from_gguf(reader), qk_norm=True))
        general = ConfigReader(reader.values)
        low = -math.inf
        alphas = (general.numbers(f"xielu.alpha_{part}", plain.num_layers, low=low) for part in "pn")
        for key, value in (("xielu.beta", BETA), ("xielu.eps", EPS)):
            found = general.numbers(key, plain.num_layers, low=low)
            if any(not math.isclose(number, value, rel_tol=1e-2) for number in found):
                raise general.error(key, found, f"must be {value}")
        above, below = ([math.log1p(math.exp(-abs(a))) + max(a, 0.0) for a in part] for part in alphas)
        return replace(plain, slopes=tuple((p, n + BETA) for p, n in zip(above, below, strict=True)))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"rms_norm_eps": 1e-5})
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader), qk_norm=True),
            rope=hf_rope(reader, theta=12e6),
            mlp=MLPConfig.from_hf(reader, activation=("xielu",)),
        )


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    return llama.build(g, cfg, mlp=_mlp)


def _mlp(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    stem = f"layers.{layer}.mlp"
    return g.linear(_xielu(g, g.linear(x, f"{stem}.up_proj"), cfg, layer), f"{stem}.down_proj")


def _xielu(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    """Return above * x^2 for positive x, below * (e^x - 1 - x) otherwise, plus beta * x. arXiv 2411.13010."""
    parts = g.add(Activation(x, "relu2")), g.add(Activation(x, "below_zero"))
    stem = f"layers.{layer}.mlp.act_fn"
    if cfg.slopes:
        above, below = (part * slope for part, slope in zip(parts, cfg.slopes[layer], strict=True))
    else:
        above, below = (g.scale_columns(y, f"{stem}.{n}") for y, n in zip(parts, ("above", "below"), strict=True))
    return above + below + x * BETA
