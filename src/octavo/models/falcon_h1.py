"""Falcon H1: attention and Mamba 2 in parallel in every layer, with multipliers. TII, arXiv 2507.22448."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention
from octavo.models._mamba import (
    NO_HEADS,
    group_cols,
    mamba_names,
    mamba_transforms,
    scan_from_gguf,
    scan_from_hf,
)
from octavo.models._reading import ConfigReader
from octavo.models._weights import ScaledRows, WeightTable

ALIASES = ("falcon-h1",)

_LOW = -1e6  # lower bound of multipliers


@dataclass(frozen=True, slots=True)
class Multipliers:
    """The multipliers of a model's parts. In GGUF files they are already applied to the weights."""

    embedding: float = 1.0
    head: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    mlp_gate: float = 1.0
    mlp_down: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5  # for the gate, x, b, c and the steps

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Multipliers:
        """Read the multipliers from config.json. Raises ModelLoadError naming the key."""
        names = {"embedding": "embedding", "head": "lm_head", "ssm_in": "ssm_in", "ssm_out": "ssm_out"}
        names |= {part: part for part in ("attention_in", "attention_out")}
        fields = {part: reader.number(f"{key}_multiplier", 1.0, low=_LOW) for part, key in names.items()}
        gate, down = reader.numbers("mlp_multipliers", 2, low=_LOW) if reader.has("mlp_multipliers") else (1.0, 1.0)
        ssm = reader.numbers("ssm_multipliers", 5, low=_LOW) if reader.has("ssm_multipliers") else (1.0,) * 5
        return cls(**fields, mlp_gate=gate, mlp_down=down, ssm=ssm)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Falcon H1's configuration, with a state space and multipliers.

    norm_before_gate: the state space's norm, if it has one, comes before its gate.
    """

    scan: ScanHeads = NO_HEADS
    norm_before_gate: bool = False
    multipliers: Multipliers = Multipliers()

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return replace(cls.read_gguf(reader, shapes), scan=scan_from_gguf(reader))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024})
        config = cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)))
        scale = config.head_dim**-0.5 * reader.number("key_multiplier", 1.0, low=_LOW)
        return replace(
            config,
            attention=replace(config.attention, scale=scale),
            scan=scan_from_hf(reader),
            norm_before_gate=reader.flag("mamba_norm_before_gate", True) and reader.flag("mamba_rms_norm", False),
            multipliers=Multipliers.from_hf(reader),
        )


def row_factors(cfg: Config) -> NDArray[np.float32]:
    """Return the factors of the rows of x, b and c, which go through the convolution column by column."""
    scan = cfg.scan
    rows = (scan.num_heads * scan.head_dim, *(scan.num_groups * scan.state_dim,) * 2)
    return np.repeat(np.array(cfg.multipliers.ssm[1:4], np.float32), rows)


WEIGHTS = WeightTable(
    names={
        **mamba_names(),
        # The converter omits the end of this name.
        **{f"blk.*.ffn_norm{end}": "layers.*.post_attention_layernorm.weight" for end in ("", ".weight")},
        "final_layernorm": "norm",
        "layers.*.pre_ff_layernorm": "layers.*.post_attention_layernorm",
        **{f"layers.*.feed_forward.{part}_proj": f"layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")},
    },
    transforms=(ScaledRows("layers.*.mamba.conv1d", row_factors, "safetensors"), *mamba_transforms()),
)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    factors = cfg.multipliers
    h = g.embedding("embed_tokens") * factors.embedding
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        seen = attention(g, x * factors.attention_in, cfg, i) * factors.attention_out
        h = h + (_state_space(g, x * factors.ssm_in, cfg, f"layers.{i}.mamba") * factors.ssm_out + seen)
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        gate, up = (g.linear(x, f"layers.{i}.mlp.{part}_proj") for part in ("gate", "up"))
        out = g.linear(g.add(GatedActivation(gate * factors.mlp_gate, up, "silu")), f"layers.{i}.mlp.down_proj")
        h = h + out * factors.mlp_down
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, scale=factors.head)


def _state_space(g: Graph, x: Value, cfg: Config, stem: str) -> Value:
    """Build the state space from the weights under `stem`: [TOKENS, hidden]. In most models it has no norm."""
    z, xbc, dt = (g.linear(x, f"{stem}.{part}_proj") for part in ("z", "xbc", "dt"))
    gate, *_, step = cfg.multipliers.ssm
    z = z * gate
    out = g.selective_scan(g.short_conv(xbc, f"{stem}.conv1d", "silu"), dt * step, stem, cfg.scan)
    has_norm, group = f"{stem}.norm.weight" in g.weights, group_cols(cfg.scan)
    if has_norm and cfg.norm_before_gate:
        out = g.rms_norm(out, f"{stem}.norm", cfg.norm_eps, group)
    out = g.add(GatedActivation(z, out, "silu"))
    if has_norm and not cfg.norm_before_gate:
        out = g.rms_norm(out, f"{stem}.norm", cfg.norm_eps, group)
    return g.linear(out, f"{stem}.out_proj")
