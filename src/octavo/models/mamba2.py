"""Mamba 2: state spaces in all layers, and no attention. Dao and Gu, arXiv 2405.21060."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.values import Value
from octavo.models._mamba import (
    MIXER,
    MIXER_NAMES,
    NO_HEADS,
    StateSpaceConfig,
    check_silu,
    check_steps,
    checked_scan,
    mamba2,
    mamba_names,
    mamba_transforms,
    scan_from_gguf,
)
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable

WEIGHTS = WeightTable(
    prefixes=("backbone.", "model."),
    names={**mamba_names(MIXER), **MIXER_NAMES},
    transforms=mamba_transforms(),
)


@dataclass(frozen=True, slots=True)
class Config(StateSpaceConfig):
    """Mamba 2's configuration. The fields for the sizes of attention hold the sizes of the state-space heads."""

    scan: ScanHeads = NO_HEADS

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        scan = scan_from_gguf(reader)
        return cls.read_gguf(reader, shapes, scan, scan=scan)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        check_steps(reader)
        check_silu(reader)
        scan = ScanHeads(
            num_heads=reader.integer("num_heads", 128),
            head_dim=reader.integer("head_dim", 64, high=MAX_WIDTH),
            num_groups=reader.integer("n_groups", 8),
            state_dim=reader.integer("state_size", 128, high=MAX_WIDTH),
        )
        return cls.read_hf(reader, tied=False, heads=checked_scan(reader, "n_groups", scan), scan=scan)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = h + mamba2(g, g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps), cfg.scan, i, cfg.norm_eps)
    return g.logits(g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps), cfg.output_head)
