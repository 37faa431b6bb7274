"""Bamba: Granite 4 without experts and multipliers; half of each head rotates. IBM, Princeton and UIUC, 2024."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.models import granitehybrid
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._mamba import scan_from_hf
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable
from octavo.models.granitehybrid import build

__all__ = ["WEIGHTS", "Config", "build"]

# GGUF files have Granite's architecture.
WEIGHTS = WeightTable(
    names={
        **granitehybrid.WEIGHTS.names,
        "final_layernorm": "norm",
        "layers.*.pre_ff_layernorm": "layers.*.post_attention_layernorm",
        **{f"layers.*.feed_forward.{part}_proj": f"layers.*.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    },
    transforms=granitehybrid.WEIGHTS.transforms,
)


@dataclass(frozen=True, slots=True)
class Config(granitehybrid.Config):
    """Bamba's configuration. Layers that have state-space weights have no attention."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        # Half of each head rotates, whatever the file gives.
        reader = reader.replaced("partial_rotary_factor", 0.5).with_defaults({"rms_norm_eps": 1e-5})
        config = cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)))
        return replace(config, scan=scan_from_hf(reader))
