"""Mamba 2 in a layer, as several families use it: its heads, the names and order of its weights, and its graph.

Dao and Gu, arXiv 2405.21060. Also contains the configuration of models made only of state-space layers, including Mamba
1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.recurrence import ScanHeads
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Value
from octavo.models._decoder import ModelConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Flatten, NegativeExp, Split, Transform

_STEM = "layers.*.mamba."
MIXER = "layers.*.mixer."
"""The stem of the weights in families whose layers are a single block."""
MIXER_NAMES = {"embeddings": "embed_tokens", "norm_f": "norm", "layers.*.norm": "layers.*.input_layernorm"}
"""Names in safetensors files of these families."""
_POSITIONS = 1 << 20  # tokens; nothing in a state space limits them
# Of steps, as Python and as transformers write infinity.
_NO_LIMITS = ((0.0, math.inf), [0.0, math.inf], [0.0, {"__float__": "Infinity"}])

NO_HEADS = ScanHeads(1, 1, 1, 1)
"""Placeholder heads, until a file gives them."""

StateSpaceT = TypeVar("StateSpaceT", bound="StateSpaceConfig")


@dataclass(frozen=True, slots=True)
class StateSpaceConfig(ModelConfig):
    """Base of the `Config` classes of models with a state space in every layer and no attention."""

    norm_eps: float
    tie_word_embeddings: bool

    @property
    def output_head(self) -> str:
        """Stem of the weight that produces the logits."""
        return "embed_tokens" if self.tie_word_embeddings else "lm_head"

    @classmethod
    def read_gguf(
        cls: type[StateSpaceT],
        reader: ConfigReader,
        shapes: Mapping[str, tuple[int, ...]],
        heads: ScanHeads = NO_HEADS,
        **fields: Any,
    ) -> StateSpaceT:
        """Read the configuration of a GGUF file. Raises ModelLoadError naming the key.

        heads: heads of the state space, in place of attention heads.
        shapes, fields: as in `DecoderConfig`.
        """
        embedding = shapes.get("embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ModelLoadError("the file has no token embedding: tensor token_embd.weight is missing or not a matrix")
        return cls(
            vocab_size=embedding[0],
            num_layers=reader.integer("block_count", high=MAX_LAYERS),
            hidden_size=reader.integer("embedding_length", high=MAX_WIDTH),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_groups,
            head_dim=heads.head_dim,
            max_position_embeddings=reader.integer("context_length", _POSITIONS),
            norm_eps=reader.number("attention.layer_norm_rms_epsilon", high=1.0),
            tie_word_embeddings="lm_head.weight" not in shapes,
            **fields,
        )

    @classmethod
    def read_hf(
        cls: type[StateSpaceT], reader: ConfigReader, *, tied: bool, heads: ScanHeads = NO_HEADS, **fields: Any
    ) -> StateSpaceT:
        """Read the configuration from config.json, with arguments as in `read_gguf`.

        tied: the output head is the embedding, unless config.json states otherwise.
        """
        return cls(
            vocab_size=reader.integer("vocab_size"),
            num_layers=reader.integer("num_hidden_layers", high=MAX_LAYERS),
            hidden_size=reader.integer("hidden_size", high=MAX_WIDTH),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_groups,
            head_dim=heads.head_dim,
            max_position_embeddings=_POSITIONS,
            norm_eps=reader.number("layer_norm_epsilon", 1e-5, high=1.0),
            tie_word_embeddings=reader.flag("tie_word_embeddings", tied),
            **fields,
        )


def mamba_names(stem: str = _STEM) -> dict[str, str]:
    """Map weight names in GGUF files, and in safetensors files under `stem`, to the graph's names."""
    return {
        "blk.*.ssm_in": _STEM + "in_proj",
        "blk.*.ssm_conv1d": _STEM + "conv1d",
        "blk.*.ssm_a": _STEM + "decay.weight",
        "blk.*.ssm_d": _STEM + "skip.weight",
        "blk.*.ssm_dt": _STEM + "dt",
        "blk.*.ssm_norm": _STEM + "norm",
        "blk.*.ssm_out": _STEM + "out_proj",
        stem + "A_log": _STEM + "decay.weight",
        stem + "D": _STEM + "skip.weight",
        stem + "dt_bias": _STEM + "dt.bias",
        **({} if stem == _STEM else {stem + part: _STEM + part for part in ("in_proj", "conv1d", "norm", "out_proj")}),
    }


def mamba_rows(scan: ScanHeads) -> tuple[int, int, int]:
    """Return the numbers of rows of the three projections: the gate; x, b and c together; and the time steps."""
    inner = scan.num_heads * scan.head_dim
    return inner, inner + 2 * scan.num_groups * scan.state_dim, scan.num_heads


def mamba_transforms() -> tuple[Transform, ...]:
    """Return the weight transforms for a configuration with the field `scan`, its state-space heads."""
    parts = tuple(f"{_STEM}{part}_proj" for part in ("z", "xbc", "dt"))

    def heads(cfg: Any) -> int:
        count: int = cfg.scan.num_heads
        return count

    return (
        Split(_STEM + "in_proj", parts, lambda c: mamba_rows(c.scan)),
        NegativeExp(_STEM + "decay", "safetensors"),
        Flatten(_STEM + "conv1d", rows=lambda c: mamba_rows(c.scan)[1]),
        Flatten(_STEM + "decay", rows=heads),
        Flatten(_STEM + "skip", rows=heads),
        Flatten(_STEM + "norm", rows=lambda c: c.scan.num_groups),
    )


def scan_from_gguf(reader: ConfigReader) -> ScanHeads:
    """Read the state-space heads from a GGUF file's keys. Raises ModelLoadError naming the key."""
    inner, heads = reader.integer("ssm.inner_size", high=MAX_WIDTH), reader.integer("ssm.time_step_rank")
    if inner % heads:
        raise reader.error("ssm.inner_size", inner, f"must be a multiple of {heads} heads")
    scan = ScanHeads(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=reader.integer("ssm.group_count"),
        state_dim=reader.integer("ssm.state_size", high=MAX_WIDTH),
    )
    return checked_scan(reader, "ssm.group_count", scan)


def scan_from_hf(reader: ConfigReader) -> ScanHeads:
    """Read the state-space heads from the keys of Granite, Bamba and Falcon H1, which begin with `mamba_`.

    Raises ModelLoadError naming the key.
    """
    check_steps(reader)
    heads = reader.integer("mamba_n_heads", 128)
    inner = reader.integer("mamba_expand", 2) * reader.integer("hidden_size", high=MAX_WIDTH)
    inner = reader.integer("mamba_d_ssm", inner, high=MAX_WIDTH)
    if reader.value("mamba_d_head") == "auto":
        reader = reader.replaced("mamba_d_head", inner // heads)
    scan = ScanHeads(
        num_heads=heads,
        head_dim=reader.integer("mamba_d_head", inner // heads, high=MAX_WIDTH),
        num_groups=reader.integer("mamba_n_groups", 1),
        state_dim=reader.integer("mamba_d_state", 256, high=MAX_WIDTH),
    )
    return checked_scan(reader, "mamba_n_groups", scan)


def check_steps(reader: ConfigReader) -> None:
    """Check that config.json does not limit the time steps. Raises ModelLoadError."""
    limits = reader.value("time_step_limit")
    if limits is not None and limits not in _NO_LIMITS:
        raise reader.error("time_step_limit", limits, "must be [0, infinity]: steps are not limited")


def check_silu(reader: ConfigReader) -> None:
    """Check that the activation in config.json is silu. Raises ModelLoadError."""
    if (kind := reader.text("hidden_act", "silu")) not in ("silu", "swish"):
        raise reader.error("hidden_act", kind, "must be silu")


def checked_scan(reader: ConfigReader, key: str, scan: ScanHeads) -> ScanHeads:
    """Return the heads if they divide into the groups and are not too wide. Raises ModelLoadError.

    key: key of the number of groups.
    """
    if scan.num_heads % scan.num_groups:
        raise reader.error(key, scan.num_groups, f"does not divide {scan.num_heads} heads")
    if scan.num_heads * scan.head_dim > MAX_WIDTH:
        raise reader.error(key, scan.num_groups, f"{scan.num_heads} heads of {scan.head_dim} are too wide")
    return scan


def has_mamba(g: Graph, layer: int) -> bool:
    """Return True if a layer's weights include those of a state space."""
    return f"layers.{layer}.mamba.conv1d.weight" in g.weights


def mamba2(g: Graph, x: Value, scan: ScanHeads, layer: int, eps: float) -> Value:
    """Build a layer's state space, with its convolution, gate and norm: [TOKENS, hidden].

    The norm is applied to each group of heads separately.
    """
    stem = f"layers.{layer}.mamba."
    z, xbc, dt = (g.linear(x, f"{stem}{part}_proj") for part in ("z", "xbc", "dt"))
    out = g.selective_scan(g.short_conv(xbc, stem + "conv1d", "silu"), dt, stem.removesuffix("."), scan)
    out = g.rms_norm(g.add(GatedActivation(z, out, "silu")), stem + "norm", eps, group_cols(scan))
    return g.linear(out, stem + "out_proj")


def group_cols(scan: ScanHeads) -> int:
    """Return the number of columns in a group's heads."""
    return scan.num_heads * scan.head_dim // scan.num_groups
