"""Gemma 3n, text: four streams of hidden states, per-layer inputs, shared keys and values, sparse MLPs.

AltUp: arXiv 2301.13310; LAuReL: arXiv 2411.07501.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope
from octavo.graph.ops.rowwise import Activation, GatedActivation
from octavo.graph.ops.streams import AddToStreams, Columns, MatchMagnitude, MixStreams, SideBySide, Sparsify
from octavo.graph.values import Value
from octavo.models import _per_layer, gemma3
from octavo.models._attention import AttentionConfig, windows_from_gguf, windows_from_hf
from octavo.models._decoder import hf_rope
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import scaled
from octavo.models._weights import Stack, WeightTable

ALIASES = ("gemma3n_text",)

_ALTUP, _LAUREL = "layers.*.altup.", "layers.*.laurel."
WEIGHTS = WeightTable(
    names={
        **_per_layer.WEIGHTS.names,
        "altup_proj": "altup_projections",
        "altup_unembd_proj": "altup_unembed_projections",
        "blk.*.altup_correct_coef": _ALTUP + "correction_coefs",
        "blk.*.altup_predict_coef": _ALTUP + "prediction_coefs",
        "blk.*.altup_router": _ALTUP + "modality_router",
        "blk.*.altup_router_norm": _ALTUP + "router_norm",
        "blk.*.altup_correct_scale": _ALTUP + "correct_output_scale",
        "blk.*.laurel_l": _LAUREL + "linear_left",
        "blk.*.laurel_r": _LAUREL + "linear_right",
        "blk.*.laurel_post_norm": _LAUREL + "post_laurel_norm",
        _ALTUP + "correct_output_scale": _ALTUP + "correct_output_scale.weight",
    },
    transforms=tuple(
        Stack(f"{stem}.*", stem, "safetensors") for stem in ("altup_projections", "altup_unembed_projections")
    ),
)

# Values that published files leave out.
DEFAULTS: dict[str, object] = {
    "vocab_size": 262_400,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_PATTERN = 5  # every fifth layer is global
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # if a file does not give it
_SHARED = 15
_STREAMS, _MAX_STREAMS = 4, 64
_FLOOR = 1e-5  # minimum mean square of a stream


@dataclass(frozen=True, slots=True)
class Config(_per_layer.Config):
    """Gemma 3n's configuration, with streams and sparse gates."""

    deviations: tuple[float | None, ...] = ()  # [num_layers]: deviations below which a gate is 0; None means not sparse
    num_streams: int = _STREAMS
    active: int = 0  # the stream that layers compute with
    scales_corrected: bool = True

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = _per_layer.with_widest_mlp(reader, "feed_forward_length", "block_count")
        plain = cls.read_gguf(reader.with_defaults({"rope.freq_base": gemma3.GLOBAL_THETA}), shapes)
        windows = windows_from_gguf(reader, _PATTERN, reader.integer("attention.sliding_window"))
        theta = reader.number("rope.freq_base_swa", gemma3.LOCAL_THETA, low=1.0)
        shared = "attention.shared_kv_layers"
        default = min(_SHARED, plain.num_layers - 1)
        num_shared = reader.integer(shared, default, low=0, high=MAX_LAYERS)
        config = replace(
            plain,
            attention=AttentionConfig(windows, qk_norm=True, scale=1.0),
            rope=replace(plain.rope, local=scaled(plain.head_dim, theta)),
            logit_softcap=reader.number("final_logit_softcapping", 30.0),
            sources=_per_layer.cache_sources(reader, shared, windows, num_shared),
            deviations=_deviations_of_gguf(reader, plain.num_layers),
            input_width=reader.integer("embedding_length_per_layer_input", 256, high=MAX_WIDTH),
        )
        return _with_streams(config, reader, "altup.num_inputs", "altup.active_idx")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = _per_layer.text_section(reader, DEFAULTS)
        reader = _per_layer.with_widest_mlp(reader, "intermediate_size", "num_hidden_layers")
        windows = windows_from_hf(reader, _PATTERN, 512)
        plain = cls.read_hf(
            reader,
            attention=AttentionConfig(windows, qk_norm=True, scale=1.0),
            rope=hf_rope(reader, gemma3.global_rope(reader), gemma3.GLOBAL_THETA),
            mlp=MLPConfig.from_hf(reader, activation=("gelu_pytorch_tanh",)),
        )
        num_shared = reader.integer("num_kv_shared_layers", _SHARED, low=0, high=MAX_LAYERS)
        config = replace(
            plain,
            rope=replace(plain.rope, local=gemma3.local_rope(reader, plain.head_dim)),
            logit_softcap=reader.number("final_logit_softcapping", 30.0),
            sources=_per_layer.cache_sources(reader, "num_kv_shared_layers", windows, num_shared),
            deviations=_deviations_of_hf(reader, plain.num_layers),
            input_width=reader.integer("hidden_size_per_layer_input", 256, high=MAX_WIDTH),
            scales_corrected=reader.flag("altup_correct_scale", True),
        )
        return _with_streams(config, reader, "altup_num_inputs", "altup_active_idx")


def _with_streams(config: Config, reader: ConfigReader, count: str, active: str) -> Config:
    num_streams = reader.integer(count, _STREAMS, low=2, high=_MAX_STREAMS)
    return replace(config, num_streams=num_streams, active=reader.integer(active, 0, low=0, high=num_streams - 1))


def _deviations_of_hf(reader: ConfigReader, num_layers: int) -> tuple[float | None, ...]:
    """Convert each layer's share of zeros to standard deviations from the mean of a normal distribution."""
    key = "activation_sparsity_pattern"
    shares = (_SPARSITY,) * _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else ()
    if reader.has(key):
        shares = reader.numbers(key, num_layers, low=-1.0, high=1 - 1e-6)
    for share in shares:
        if share < 0:
            raise reader.error(key, share, "must be from 0 to 1")
    deviations = [NormalDist().inv_cdf(share) if share else None for share in shares]
    return (*deviations, *(None,) * (num_layers - len(deviations)))


def _deviations_of_gguf(reader: ConfigReader, num_layers: int) -> tuple[float | None, ...]:
    key = "activation_sparsity_scale"
    if not reader.has(key):
        return _deviations_of_hf(ConfigReader({}), num_layers)
    values = reader.value(key)
    if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != num_layers:
        raise reader.error(key, values, f"must be {num_layers} numbers")
    # The converter writes minus infinity for a layer that is not sparse.
    dense = [isinstance(value, (float, np.floating)) and value == -math.inf for value in values]
    finite = ConfigReader({key: [0.0 if d else v for v, d in zip(values, dense, strict=True)]})
    numbers = finite.numbers(key, num_layers, low=-100.0, high=100.0)
    return tuple(None if d else number for number, d in zip(numbers, dense, strict=True))


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens") * cfg.hidden_size**0.5
    inputs = _per_layer.inputs_of_layers(g, h, cfg)
    copies = h
    for _ in range(cfg.num_streams - 2):
        copies = g.add(SideBySide(copies, h))
    others = g.add(MatchMagnitude(g.head_linear(copies, "altup_projections"), h, _FLOOR))
    streams = g.add(SideBySide(h, others))
    for i in range(cfg.num_layers):
        streams = _layer(g, cfg, streams, inputs, i)
    h = g.rms_norm(_joined(g, cfg, g.select_rows(streams)), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head, softcap=cfg.logit_softcap)


def _joined(g: Graph, cfg: Config, streams: Value) -> Value:
    """Return the mean of the first stream and the other streams' projections, rescaled to the first one's magnitude."""
    width, count = cfg.hidden_size, cfg.num_streams - 1
    first = g.add(Columns(streams, 0, width))
    projected = g.head_linear(g.add(Columns(streams, width, count * width)), "altup_unembed_projections")
    others = g.add(MatchMagnitude(projected, first, _FLOOR))
    for i in range(count):
        first = first + g.add(Columns(others, i * width, width))
    return first * (1.0 / cfg.num_streams)


def _layer(g: Graph, cfg: Config, streams: Value, inputs: Value, layer: int) -> Value:
    """Predict all streams, run the layer on the active one, and correct the other streams by its change."""
    p = f"layers.{layer}."

    def norm(x: Value, name: str) -> Value:
        return g.rms_norm(x, p + name, cfg.norm_eps)

    def active(x: Value) -> Value:
        return g.add(Columns(x, cfg.active * cfg.hidden_size, cfg.hidden_size))

    def modalities(x: Value) -> Value:
        routed = norm(x, "altup.router_norm") * (1.0 / cfg.hidden_size)
        return g.add(Activation(g.linear(routed, p + "altup.modality_router"), "tanh"))

    mixed = g.linear(modalities(active(streams)), p + "altup.prediction_coefs")
    predicted = g.add(MixStreams(streams, mixed))
    h = active(predicted)
    x = norm(h, "input_layernorm")
    laurel = g.linear(g.linear(x, p + "laurel.linear_left"), p + "laurel.linear_right")
    laurel = x + norm(laurel, "laurel.post_laurel_norm")
    attended = h + norm(_attention(g, x, cfg, layer), "post_attention_layernorm")
    h = (attended + laurel) * math.sqrt(0.5)
    x = _mlp(g, norm(h, "pre_feedforward_layernorm"), cfg, layer)
    activated = h + norm(x, "post_feedforward_layernorm")
    factors = g.linear(modalities(activated), p + "altup.correction_coefs")
    innovation = activated + active(predicted) * -1.0
    ones = (1.0,) * cfg.num_streams
    corrected = g.add(AddToStreams(predicted, innovation, factors, ones))
    first = active(corrected)
    if cfg.scales_corrected:
        first = g.scale_columns(first, p + "altup.correct_output_scale")
    added = _per_layer.gated_input(g, first, inputs, layer, cfg)
    return g.add(AddToStreams(corrected, added, None, (0.0, *ones[1:])))


def _attention(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    p, rope = f"layers.{layer}.self_attn.", cfg.rope_params(layer)
    assert rope is not None
    q = g.add(Rope(g.rms_norm(g.linear(x, p + "q_proj"), p + "q_norm", cfg.norm_eps), cfg.head_dim, rope))
    k = v = None
    if cfg.sources[layer] == layer:
        k = g.add(Rope(g.rms_norm(g.linear(x, p + "k_proj"), p + "k_norm", cfg.norm_eps), cfg.head_dim, rope))
        v = g.rms_norm(g.linear(x, p + "v_proj"), None, cfg.norm_eps, cfg.head_dim)
    return g.linear(g.attention(q, k, v, cfg.attention_params(layer)), p + "o_proj")


def _mlp(g: Graph, x: Value, cfg: Config, layer: int) -> Value:
    stem, deviations = f"layers.{layer}.mlp", cfg.deviations[layer]
    gate, up = (g.linear(x, f"{stem}.{n}_proj") for n in ("gate", "up"))
    if deviations is not None:
        gate = g.add(Sparsify(gate, deviations))
    return g.linear(g.add(GatedActivation(gate, up, "gelu_tanh")), f"{stem}.down_proj")
