"""Granite 4: Mamba 2 in most layers, attention in some, experts beside a shared MLP. Dao and Gu, arXiv 2405.21060."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Value
from octavo.models import granite
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import hf_rope
from octavo.models._layers import attention, gated_mlp
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Flatten, NegativeExp, Split, WeightTable, rotary_pairs

ALIASES = ("granitemoehybrid",)

_MAMBA, _EXPERTS, _SHARED = "layers.*.mamba.", "layers.*.mlp.experts.", "layers.*.shared_mlp."
_NAMES = {
    # GGUF; without experts the shared MLP has the names of a plain one
    **{
        f"blk.*.ffn_{part}{kind}": f"{_SHARED}{part}_proj" for part in ("gate", "up", "down") for kind in ("", "_shexp")
    },
    "blk.*.ssm_in": _MAMBA + "in_proj",
    "blk.*.ssm_conv1d": _MAMBA + "conv1d",
    "blk.*.ssm_a": _MAMBA + "decay.weight",
    "blk.*.ssm_d": _MAMBA + "skip.weight",
    "blk.*.ssm_dt": _MAMBA + "dt",
    "blk.*.ssm_norm": _MAMBA + "norm",
    "blk.*.ssm_out": _MAMBA + "out_proj",
    # safetensors
    _MAMBA + "A_log": _MAMBA + "decay.weight",
    _MAMBA + "D": _MAMBA + "skip.weight",
    _MAMBA + "dt_bias": _MAMBA + "dt.bias",
    _SHARED + "output_linear": _SHARED + "down_proj",
    "layers.*.block_sparse_moe.router.layer": "layers.*.mlp.gate",
    "layers.*.block_sparse_moe.input_linear": _EXPERTS + "input_linear",
    "layers.*.block_sparse_moe.output_linear": _EXPERTS + "down_proj",
}
WEIGHTS = WeightTable(
    names=_NAMES,
    transforms=(
        *rotary_pairs("gguf"),
        Split(_MAMBA + "in_proj", (_MAMBA + "z_proj", _MAMBA + "xbc_proj", _MAMBA + "dt_proj"), lambda c: c.mamba_rows),
        Split(_SHARED + "input_linear", (_SHARED + "gate_proj", _SHARED + "up_proj"), lambda c: (c.shared_size,) * 2),
        Split(
            _EXPERTS + "input_linear",
            (_EXPERTS + "gate_proj", _EXPERTS + "up_proj"),
            lambda c: (c.mlp.intermediate_size,) * 2,
        ),
        NegativeExp(_MAMBA + "decay", "safetensors"),
        *(Flatten(_MAMBA + part) for part in ("conv1d", "decay", "skip", "norm")),
    ),
)
# Of steps, as Python and as transformers write infinity.
_NO_LIMITS = ((0.0, math.inf), [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
_NO_HEADS = ScanHeads(1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Config(granite.Config):
    """Layers with the weights of a state space have no attention. Most models do not rotate queries and keys."""

    shared_size: int = 0
    scan: ScanHeads = _NO_HEADS

    @property
    def mamba_rows(self) -> tuple[int, int, int]:
        """Rows of the gate, of x, b and c, and of the steps."""
        inner = self.scan.num_heads * self.scan.head_dim
        return inner, inner + 2 * self.scan.num_groups * self.scan.state_dim, self.scan.num_heads

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        inner, heads = reader.integer("ssm.inner_size", high=MAX_WIDTH), reader.integer("ssm.time_step_rank")
        if inner % heads:
            raise reader.error("ssm.inner_size", inner, f"must be a multiple of {heads} heads")
        scan = ScanHeads(
            num_heads=heads,
            head_dim=inner // heads,
            num_groups=reader.integer("ssm.group_count"),
            state_dim=reader.integer("ssm.state_size", high=MAX_WIDTH),
        )
        config = cls.read_gguf(
            reader.with_largest("attention.head_count_kv", reader.integer("block_count", high=MAX_LAYERS)),
            shapes,
            mlp=MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=True)),
        )
        rotates = reader.flag("rope.scaling.finetuned", True)  # the converter's name for it
        return replace(
            granite.scaled_gguf(config, reader),
            rope=replace(config.rope, rotates=(rotates,) * config.num_layers),
            scan=_checked(reader, "ssm.group_count", scan),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        if reader.has("layer_types"):
            for kind in reader.texts("layer_types", num_layers):
                if kind not in ("mamba", "attention", "linear_attention", "full_attention"):
                    raise reader.error("layer_types", kind, "must be mamba, attention or their newer names")
        positions = reader.values.get("position_embedding_type")
        if positions not in (None, "rope", "nope"):
            raise reader.error("position_embedding_type", positions, "must be rope, nope or null")
        limits = reader.values.get("time_step_limit")
        if limits is not None and limits not in _NO_LIMITS:
            raise reader.error("time_step_limit", limits, "must be [0, infinity]: steps are not limited")
        heads = reader.integer("mamba_n_heads", 128)
        inner = reader.integer("mamba_expand", 2) * reader.integer("hidden_size", high=MAX_WIDTH)
        if reader.values.get("mamba_d_head") == "auto":
            reader = ConfigReader({**reader.values, "mamba_d_head": inner // heads})
        scan = ScanHeads(
            num_heads=heads,
            head_dim=reader.integer("mamba_d_head", inner // heads, high=MAX_WIDTH),
            num_groups=reader.integer("mamba_n_groups", 1),
            state_dim=reader.integer("mamba_d_state", 256, high=MAX_WIDTH),
        )
        has_experts = reader.integer("num_local_experts", 8, low=0) > 0
        config = cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader)),
            rope=replace(hf_rope(reader), rotates=(positions == "rope",) * num_layers),
            mlp=MLPConfig.from_hf(reader, experts_from_hf(reader, normalize=True) if has_experts else None),
        )
        return replace(
            granite.scaled_hf(config, reader),
            shared_size=reader.integer("shared_intermediate_size", 1024, high=MAX_WIDTH),
            scan=_checked(reader, "mamba_n_groups", scan),
        )


def _checked(reader: ConfigReader, key: str, scan: ScanHeads) -> ScanHeads:
    if scan.num_heads % scan.num_groups:
        raise reader.error(key, scan.num_groups, f"does not divide {scan.num_heads} heads")
    if scan.num_heads * scan.head_dim > MAX_WIDTH:
        raise reader.error(key, scan.num_groups, f"{scan.num_heads} heads of {scan.head_dim} are too wide")
    return scan


def build(g: Graph, cfg: Config) -> Value:
    """The logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens") * cfg.embedding_multiplier
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        if f"layers.{i}.mamba.conv1d.weight" in g.weights:
            mixed = mamba2(g, x, cfg.scan, f"layers.{i}.mamba", cfg.norm_eps)
        else:
            mixed = attention(g, x, cfg, i)
        h = h + mixed * cfg.residual_multiplier
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        out = gated_mlp(g, x, f"layers.{i}.shared_mlp")
        if cfg.mlp.experts is not None:
            out = g.moe(x, f"layers.{i}.mlp", cfg.mlp.experts) + out
        h = h + out * cfg.residual_multiplier
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, scale=1.0 / cfg.logits_scaling)


def mamba2(g: Graph, x: Value, heads: ScanHeads, stem: str, eps: float) -> Value:
    """The state space of the weights under `stem`, with its convolution, gate and norm: [TOKENS, hidden].

    The heads of each group are normalized by themselves.
    """
    z, xbc, dt = (g.linear(x, f"{stem}.{part}_proj") for part in ("z", "xbc", "dt"))
    out = g.selective_scan(g.short_conv(xbc, f"{stem}.conv1d", "silu"), dt, stem, heads)
    group = heads.num_heads * heads.head_dim // heads.num_groups
    return g.linear(g.rms_norm(g.add(GatedActivation(z, out, "silu")), f"{stem}.norm", eps, group), f"{stem}.out_proj")
