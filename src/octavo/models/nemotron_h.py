"""Nemotron H and Nemotron 3: each layer is one of Mamba 2, attention, an MLP or experts. NVIDIA, arXiv 2504.03624."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, plain_mlp
from octavo.models._mamba import (
    MIXER,
    MIXER_NAMES,
    NO_HEADS,
    check_steps,
    checked_scan,
    has_mamba,
    mamba2,
    mamba_names,
    mamba_transforms,
    scan_from_gguf,
)
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._routing import grouped_from_gguf, grouped_from_hf
from octavo.models._weights import Stack, WeightTable, shared_expert_names

ALIASES = ("nemotron_h_moe",)

_ATTENTION, _MLP = "layers.*.self_attn.", "layers.*.mlp."
_PARTS = ("up_proj", "down_proj")
WEIGHTS = WeightTable(
    prefixes=("backbone.", "model."),
    names={
        **mamba_names(MIXER),
        **shared_expert_names(),
        "blk.*.ffn_latent_down": _MLP + "fc1_latent_proj",
        "blk.*.ffn_latent_up": _MLP + "fc2_latent_proj",
        # safetensors
        **MIXER_NAMES,
        **{f"{MIXER}{part}_proj": f"{_ATTENTION}{part}_proj" for part in "qkvo"},
        **{MIXER + part: _MLP + part for part in (*_PARTS, "gate", "fc1_latent_proj", "fc2_latent_proj")},
        MIXER + "gate.e_score_correction_bias": _MLP + "gate.e_score_correction.bias",
        **{
            f"{MIXER}{kind}.{part}": f"{_MLP}{kind}.{part}"
            for kind in ("experts.*", "shared_experts")
            for part in _PARTS
        },
    },
    transforms=(
        *(Stack(f"{_MLP}experts.*.{part}", f"{_MLP}experts.{part}", "safetensors") for part in _PARTS),
        *mamba_transforms(),
    ),
)
# The names of the kinds of layers, newer and older, and their letters in patterns.
_KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Nemotron H's configuration. A layer's weights determine its kind. Queries and keys are not rotated."""

    scan: ScanHeads = NO_HEADS

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        # One number per layer, 0 for a layer of another kind.
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        for key in ("attention.head_count_kv", "feed_forward_length"):
            reader = reader.with_largest(key, num_layers)
        experts = None
        if reader.has("expert_count"):
            experts = grouped_from_gguf(reader.with_defaults({"expert_gating_func": 2}), shapes)
        config = cls.read_gguf(reader, shapes, mlp=MLPConfig.from_gguf(reader, experts))
        return config._still(scan_from_gguf(reader))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = _with_defaults(reader)
        check_steps(reader)
        for key, value in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if reader.text(key, value) != value:
                raise reader.error(key, reader.text(key), f"must be {value}")
        scan = ScanHeads(
            num_heads=reader.integer("mamba_num_heads", 128),
            head_dim=reader.integer("mamba_head_dim", 64, high=MAX_WIDTH),
            num_groups=reader.integer("n_groups", 8),
            state_dim=reader.integer("ssm_state_size", 128, high=MAX_WIDTH),
        )
        experts, width = None, reader.integer("intermediate_size", high=MAX_WIDTH)
        if reader.has("n_routed_experts"):
            experts, width = grouped_from_hf(reader), reader.integer("moe_intermediate_size", high=MAX_WIDTH)
        config = cls.read_hf(
            reader,
            norm_eps="layer_norm_epsilon",
            attention=AttentionConfig(same_windows(reader)),
            mlp=MLPConfig(width, experts),
        )
        return config._still(checked_scan(reader, "n_groups", scan))

    def _still(self, scan: ScanHeads) -> Config:
        return replace(self, scan=scan, rope=replace(self.rope, rotates=(False,) * self.num_layers))


def layer_kinds(reader: ConfigReader) -> str:
    """Return the kind of each layer in config.json as a letter: M, *, - or E. Raises ModelLoadError naming the key."""
    if reader.has("hybrid_override_pattern"):
        pattern = reader.text("hybrid_override_pattern")
        if not pattern or len(pattern) > MAX_LAYERS or set(pattern) - set(_KINDS.values()):
            raise reader.error("hybrid_override_pattern", pattern, "must have the letters M, *, - and E")
        return pattern
    key = "layers_block_type" if reader.has("layers_block_type") else "layer_types"
    kinds = reader.value(key)
    count = len(kinds) if isinstance(kinds, list) else 0
    if not 0 < count <= MAX_LAYERS:
        raise reader.error(key, kinds, f"must have the kinds of 1 to {MAX_LAYERS} layers")
    return "".join(_KINDS[kind] for kind in reader.texts(key, count, _KINDS))


def _with_defaults(reader: ConfigReader) -> ConfigReader:
    """Return config.json with the number of layers and its omitted defaults."""
    kinds = layer_kinds(reader)
    reader = reader.renamed({"attention_head_dim": "head_dim", "norm_eps": "layer_norm_epsilon"})
    reader = reader.replaced("num_hidden_layers", len(kinds))
    if "E" not in kinds:  # transformers writes the keys of experts for all models
        reader = reader.replaced("n_routed_experts", None)
    return reader.with_defaults({"head_dim": 128, "layer_norm_epsilon": 1e-5, "n_group": 1, "topk_group": 1})


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = h + _mixer(g, g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps), cfg, i)
    return g.logits(g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps), cfg.output_head)


def _mixer(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    stem = f"layers.{layer}.mlp"
    if has_mamba(g, layer):
        return mamba2(g, x, cfg.scan, layer, cfg.norm_eps)
    if f"{stem}.gate.weight" in g.weights:
        return _experts(g, x, cfg, stem)
    return plain_mlp(g, x, stem, "relu2") if f"{stem}.up_proj.weight" in g.weights else attention(g, x, cfg, layer)


def _experts(g: Graph, x: Value, cfg: Config, stem: str) -> Value:
    """Build a layer's experts without gates, and its shared expert.

    In some models the routed experts read and write narrower rows.
    """
    assert cfg.mlp.experts is not None
    shared = plain_mlp(g, x, f"{stem}.shared_experts", "relu2")
    if f"{stem}.fc1_latent_proj.weight" not in g.weights:
        return g.moe(x, stem, cfg.mlp.experts, kind="relu2") + shared
    latent = g.linear(x, f"{stem}.fc1_latent_proj")
    routed = g.moe(latent, stem, cfg.mlp.experts, kind="relu2", router_x=x)
    return g.linear(routed, f"{stem}.fc2_latent_proj") + shared
