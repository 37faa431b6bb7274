"""Mamba 2: state spaces in all layers, and no attention. Dao and Gu, arXiv 2405.21060."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.values import Value
from octavo.models._decoder import ModelConfig
from octavo.models._mamba import (
    MIXER,
    NO_HEADS,
    check_steps,
    checked_scan,
    mamba2,
    mamba_names,
    mamba_transforms,
    scan_from_gguf,
)
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable

WEIGHTS = WeightTable(
    prefixes=("backbone.", "model."),
    names={
        **mamba_names(MIXER),
        "embeddings": "embed_tokens",
        "norm_f": "norm",
        "layers.*.norm": "layers.*.input_layernorm",
    },
    transforms=mamba_transforms(),
)
_POSITIONS = 1 << 20  # tokens; nothing in the model limits them


@dataclass(frozen=True, slots=True)
class Config(ModelConfig):
    """The sizes of attention are those of the state space's heads: there is none."""

    norm_eps: float
    tie_word_embeddings: bool
    scan: ScanHeads = NO_HEADS

    @property
    def output_head(self) -> str:
        """The stem of the weight that makes the logits."""
        return "embed_tokens" if self.tie_word_embeddings else "lm_head"

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        embedding = shapes.get("embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ModelLoadError("the file has no token embedding: tensor token_embd.weight is missing or no matrix")
        return cls.of(
            scan_from_gguf(reader),
            vocab_size=embedding[0],
            num_layers=reader.integer("block_count", high=MAX_LAYERS),
            hidden_size=reader.integer("embedding_length", high=MAX_WIDTH),
            max_position_embeddings=reader.integer("context_length", _POSITIONS),
            norm_eps=reader.number("attention.layer_norm_rms_epsilon", high=1.0),
            tie_word_embeddings="lm_head.weight" not in shapes,
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        check_steps(reader)
        if reader.text("hidden_act", "silu") not in ("silu", "swish"):
            raise reader.error("hidden_act", reader.text("hidden_act"), "must be silu")
        heads = reader.integer("num_heads", 128)
        scan = ScanHeads(
            num_heads=heads,
            head_dim=reader.integer("head_dim", 64, high=MAX_WIDTH),
            num_groups=reader.integer("n_groups", 8),
            state_dim=reader.integer("state_size", 128, high=MAX_WIDTH),
        )
        return cls.of(
            checked_scan(reader, "n_groups", scan),
            vocab_size=reader.integer("vocab_size"),
            num_layers=reader.integer("num_hidden_layers", high=MAX_LAYERS),
            hidden_size=reader.integer("hidden_size", high=MAX_WIDTH),
            max_position_embeddings=_POSITIONS,
            norm_eps=reader.number("layer_norm_epsilon", 1e-5, high=1.0),
            tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        )

    @classmethod
    def of(
        cls,
        scan: ScanHeads,
        *,
        vocab_size: int,
        num_layers: int,
        hidden_size: int,
        max_position_embeddings: int,
        norm_eps: float,
        tie_word_embeddings: bool,
    ) -> Config:
        """The configuration of a model with these heads."""
        return cls(
            vocab_size=vocab_size,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=scan.num_heads,
            num_kv_heads=scan.num_groups,
            head_dim=scan.head_dim,
            max_position_embeddings=max_position_embeddings,
            norm_eps=norm_eps,
            tie_word_embeddings=tie_word_embeddings,
            scan=scan,
        )


def build(g: Graph, cfg: Config) -> Value:
    """The logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = h + mamba2(g, g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps), cfg.scan, i, cfg.norm_eps)
    return g.logits(g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps), cfg.output_head)
