"""Zamba 2: Mamba 2 in all layers, and a few shared attention and MLP blocks before some of them.

Zyphra, arXiv 2411.15242.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.ops.streams import Columns, SideBySide
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._mamba import NO_HEADS, checked_scan, mamba2, mamba_names, mamba_transforms
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable

_MIXER_EPS = 1e-5  # epsilon of the state spaces' norms, regardless of the other norms
_LONG = 16384  # tokens, for models with use_long_context
_KINDS = ("mamba", "linear_attention", "hybrid")

WEIGHTS = WeightTable(
    names={
        **mamba_names(),
        **mamba_names("layers.*.mamba_decoder.mamba."),
        "layers.*.mamba_decoder.input_layernorm": "layers.*.input_layernorm",
        "final_layernorm": "norm",
    },
    transforms=mamba_transforms(),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Zamba 2's configuration, with shared blocks.

    shared: layers that follow a shared block; the blocks alternate in this order.
    num_blocks: number of shared blocks.
    """

    scan: ScanHeads = NO_HEADS
    shared: tuple[int, ...] = ()
    num_blocks: int = 1
    kind: str = "gelu"

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        hidden, heads = reader.integer("hidden_size", high=MAX_WIDTH), reader.integer("num_attention_heads", 32)
        reader = reader.with_defaults({"intermediate_size": 4 * hidden, "rms_norm_eps": 1e-5})
        reader = reader.replaced("head_dim", reader.integer("attention_head_dim", 2 * hidden // heads, high=MAX_WIDTH))
        if reader.flag("use_long_context", False):
            reader = reader.replaced("max_position_embeddings", _LONG)
        if not reader.flag("tie_word_embeddings", True):
            raise reader.error("tie_word_embeddings", False, "must be true, as in the published models")
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        plain = cls.read_hf(
            reader.with_defaults({"tie_word_embeddings": True}),
            attention=AttentionConfig(same_windows(reader)),
            mlp=MLPConfig.from_hf(reader, activation=("gelu",)),
            scan=_scan(reader, hidden),
            shared=_shared(reader, num_layers),
            num_blocks=reader.integer("num_mem_blocks", 1),
        )
        # Scores are scaled for half the width of a head, because the other half belongs to the embeddings.
        attention = replace(plain.attention, scale=(plain.head_dim / 2) ** -0.5)
        rotates = (reader.flag("use_mem_rope", False),) * num_layers
        return replace(plain, attention=attention, rope=replace(plain.rope, rotates=rotates))


def _scan(reader: ConfigReader, hidden: int) -> ScanHeads:
    inner, heads = reader.integer("mamba_expand", 2) * hidden, reader.integer("n_mamba_heads", 8)
    if inner % heads:
        raise reader.error("n_mamba_heads", heads, f"must divide {inner} columns")
    groups, state = reader.integer("mamba_ngroups", 1), reader.integer("mamba_d_state", 64, high=MAX_WIDTH)
    return checked_scan(reader, "mamba_ngroups", ScanHeads(heads, inner // heads, groups, state))


def _shared(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    kinds = reader.texts("layers_block_type", num_layers, _KINDS)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "hybrid")


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = embedded = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = h
        if i in cfg.shared:
            x = h + g.linear(_shared_block(g, cfg, g.add(SideBySide(h, embedded)), i), f"layers.{i}.linear")
        x = g.rms_norm(x, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + mamba2(g, x, cfg.scan, i, _MIXER_EPS)
    return g.logits(g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps), cfg.output_head)


def _shared_block(g: Graph, cfg: Config, x: Value, layer: int) -> Value:
    """Build the block before a layer, with the low-rank adapters of that layer: [TOKENS, hidden]."""
    place = cfg.shared.index(layer)
    p = f"layers.{cfg.shared[place % cfg.num_blocks]}.shared_transformer."
    x = g.rms_norm(x, p + "input_layernorm", cfg.norm_eps)
    q, k, v = (_adapted(g, x, f"{p}self_attn.{n}_proj", f"{p}self_attn.linear_{n}_adapter_list.{place}") for n in "qkv")
    if (rope := cfg.rope_params(layer)) is not None:
        q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    x = g.linear(g.attention(q, k, v, cfg.attention_params(layer)), p + "self_attn.o_proj")
    x, p = g.rms_norm(x, p + "pre_ff_layernorm", cfg.norm_eps), p + "feed_forward."
    both = _adapted(g, x, p + "gate_up_proj", f"{p}gate_up_proj_adapter_list.{place}")
    gate, up = (g.add(Columns(both, begin, both.cols // 2)) for begin in (0, both.cols // 2))
    return g.linear(g.add(GatedActivation(gate, up, cfg.kind)), p + "down_proj")


def _adapted(g: Graph, x: Value, stem: str, adapter: str) -> Value:
    y = g.linear(x, stem)
    return y + g.linear(g.linear(x, adapter + ".0"), adapter + ".1") if adapter + ".0.weight" in g.weights else y
