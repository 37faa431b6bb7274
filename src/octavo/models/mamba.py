"""Mamba 1 and Falcon Mamba: state spaces with a separate decay for each state value. Gu and Dao, arXiv 2312.00752."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Value
from octavo.models._mamba import MIXER, MIXER_NAMES, StateSpaceConfig, check_silu
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import Flatten, NegativeExp, Split, Transform, Transpose, WeightTable

ALIASES = ("falcon_mamba",)

_STEM = "layers.*.mamba."


@dataclass(frozen=True, slots=True)
class Channels:
    """Sizes of a state space: its columns, the state size of each, and the columns of its steps before `dt_proj`."""

    inner: int = 1
    state_dim: int = 1
    rank: int = 1

    @classmethod
    def from_gguf(cls, reader: ConfigReader) -> Channels:
        """Read the sizes from a GGUF file. Raises ModelLoadError naming the key."""
        names = ("ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
        return cls(*(reader.integer(name, high=MAX_WIDTH) for name in names))

    @classmethod
    def from_hf(cls, reader: ConfigReader, state: str, expand: str, rank: str) -> Channels:
        """Read the sizes from config.json. Raises ModelLoadError naming the key.

        state, expand, rank: names of the keys.
        """
        hidden_size = reader.integer("hidden_size", high=MAX_WIDTH)
        check_silu(reader)
        if reader.value(rank) == "auto":
            reader = reader.replaced(rank, None)
        return cls(
            reader.integer(expand, 2, high=64) * hidden_size,
            reader.integer(state, 16, high=MAX_WIDTH),
            reader.integer(rank, -(-hidden_size // 16), high=MAX_WIDTH),
        )


NO_CHANNELS = Channels()
"""Placeholder sizes, until a file gives them."""


def channel_names(stem: str) -> dict[str, str]:
    """Map weight names in GGUF files, and in safetensors files under `stem`, to the graph's names."""
    parts = ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")
    return {
        "blk.*.ssm_in": _STEM + "in_proj",
        "blk.*.ssm_conv1d": _STEM + "conv1d",
        "blk.*.ssm_x": _STEM + "x_proj",
        "blk.*.ssm_dt": _STEM + "dt_proj",
        "blk.*.ssm_a": _STEM + "decay.weight",
        "blk.*.ssm_d": _STEM + "skip.weight",
        "blk.*.ssm_out": _STEM + "out_proj",
        **{f"blk.*.ssm_{part}_norm": f"{_STEM}{part}_layernorm" for part in ("dt", "b", "c")},
        stem + "A_log": _STEM + "decay.weight",
        stem + "D": _STEM + "skip.weight",
        **({} if stem == _STEM else {stem + part: _STEM + part for part in parts}),
    }


CHANNEL_TRANSFORMS: tuple[Transform, ...] = (
    Split(_STEM + "in_proj", (_STEM + "input_proj", _STEM + "z_proj"), lambda c: (c.channels.inner,) * 2),
    Split(
        _STEM + "x_proj",
        tuple(f"{_STEM}{part}_proj" for part in ("rank", "b", "c")),
        lambda c: (c.channels.rank, c.channels.state_dim, c.channels.state_dim),
    ),
    NegativeExp(_STEM + "decay", "safetensors"),
    Transpose(_STEM + "decay"),
    Flatten(_STEM + "decay", rows=lambda c: c.channels.state_dim),
    Flatten(_STEM + "conv1d", rows=lambda c: c.channels.inner),
)
WEIGHTS = WeightTable(
    prefixes=("backbone.", "model."),
    names={**channel_names(MIXER), **MIXER_NAMES},
    transforms=CHANNEL_TRANSFORMS,
)


@dataclass(frozen=True, slots=True)
class Config(StateSpaceConfig):
    """Mamba 1's configuration, with state spaces. The fields for the sizes of attention are 1.

    inner_eps: epsilon of the norms of steps, b and c, or None if there are none.
    """

    channels: Channels = NO_CHANNELS
    inner_eps: float | None = None

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        config = cls.read_gguf(reader, shapes, channels=Channels.from_gguf(reader))
        return replace(config, inner_eps=config.norm_eps if reader.flag("ssm.dt_b_c_rms", False) else None)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        is_falcon = reader.text("model_type", "mamba") == "falcon_mamba"
        channels = Channels.from_hf(reader, "state_size", "expand", "time_step_rank")
        channels = replace(channels, inner=reader.integer("intermediate_size", channels.inner, high=MAX_WIDTH))
        inner_eps = reader.number("mixer_rms_eps", 1e-6, high=1.0) if is_falcon else None
        return cls.read_hf(reader, tied=True, channels=channels, inner_eps=inner_eps)


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = h + mamba1(g, g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps), i, cfg.inner_eps)
    return g.logits(g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps), cfg.output_head)


def mamba1(g: Graph, x: Value, layer: int, eps: float | None) -> Value:
    """Build a layer's state space, with its convolution and gate: [TOKENS, hidden].

    eps: epsilon of the norms of the steps, b and c, with or without weights; None if there are no norms.
    """
    stem = f"layers.{layer}.mamba"
    x, z = g.linear(x, f"{stem}.input_proj"), g.linear(x, f"{stem}.z_proj")
    x = g.short_conv(x, f"{stem}.conv1d", "silu")
    dt, b, c = (g.linear(x, f"{stem}.{part}_proj") for part in ("rank", "b", "c"))
    if eps is not None:
        names = [f"{stem}.{part}_layernorm" for part in ("dt", "b", "c")]
        weights = [name if f"{name}.weight" in g.weights else None for name in names]
        dt, b, c = (g.rms_norm(y, name, eps, y.cols) for y, name in zip((dt, b, c), weights, strict=True))
    out = g.channel_scan(x, g.linear(dt, f"{stem}.dt_proj"), (b, c), stem)
    return g.linear(g.add(GatedActivation(z, out, "silu")), f"{stem}.out_proj")
