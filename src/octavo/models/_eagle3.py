"""EAGLE-3: a separate layer that drafts tokens from the hidden states of three layers of another model.

Li et al., arXiv 2503.01840. The file formats of EAGLE, SpecForge and speculators are supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.streams import SideBySide
from octavo.graph.values import TOKENS
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, gated_mlp
from octavo.models._reading import MAX_LAYERS, ConfigReader

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NUM_TAPS = 3
_LAYER_NAMES = ("midlayer.", "layers.0.")


@dataclass(frozen=True, slots=True)
class Eagle3Config(DecoderConfig):
    """Configuration of an EAGLE-3 head.

    layer: number of its layer, one after the model's last.
    taps: layers of the model whose inputs it reads.
    norms_residual: attention's output is added to the normed hidden states instead of the plain ones.
    """

    layer: int = 0
    taps: tuple[int, ...] = ()
    norms_residual: bool = False


def is_eagle3(config_json: Mapping[str, object]) -> bool:
    """Return True if this is a head's config.json: `LlamaForCausalLMEagle3`, `Eagle3Speculator` or
    `Eagle3DraftModel`.
    """
    names = config_json.get("architectures")
    return isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)


def eagle3_config(reader: ConfigReader, num_layers: int) -> Eagle3Config:
    """Read a head's configuration. Raises ModelLoadError naming the key.

    reader: config.json.
    num_layers: number of layers of the model that it drafts for.
    """
    of_speculators = reader.has("transformer_layer_config")
    own = reader.section("transformer_layer_config") if of_speculators else reader
    if (count := own.integer("num_hidden_layers", 1, high=MAX_LAYERS)) != 1:
        raise own.error("num_hidden_layers", count, "must be 1: heads of more layers are not supported")
    if (kind := own.text("model_type", "llama")) != "llama":
        raise own.error("model_type", kind, "must be llama: heads of other layers are not supported")
    if reader.flag("norm_before_fc", False):
        raise reader.error("norm_before_fc", True, "is not supported: take a head without it")
    own = own.with_defaults({"num_hidden_layers": 1})
    read = Eagle3Config.read_hf(own, attention=AttentionConfig(same_windows(own)))
    return replace(
        read,
        attention=replace(read.attention, windows=(None,) * (num_layers + 1)),
        layer=num_layers,
        taps=_taps(reader, num_layers),
        norms_residual=reader.flag("norm_before_residual", of_speculators),
    )


def _taps(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads.

    Speculators files list those layers; SpecForge's `eagle_config` lists the layers whose outputs are read.
    """
    inner = reader.section("eagle_config")
    if reader.has(_LAYERS):
        return tuple(int(layer) for layer in reader.counts(_LAYERS, _NUM_TAPS))
    if inner.has(_LAYERS):
        return tuple(int(layer) + 1 for layer in inner.counts(_LAYERS, _NUM_TAPS))
    return 2, num_layers // 2, num_layers - 3


def eagle3_name(name: str, layer: int) -> str:
    """Return the graph's name for a stored weight: all weights of a head belong to one layer."""
    name = name.removeprefix("model.")
    for prefix in _LAYER_NAMES:
        if name.startswith(prefix):
            return f"layers.{layer}.{name.removeprefix(prefix)}"
    return f"layers.{layer}.{name}"


def eagle3_graph(cfg: Eagle3Config, weights: Mapping[str, tuple[int, ...]], output_head: str) -> Graph:
    """Build the graph of a head: logits [LOGITS, draft vocab], with the hidden states for the next draft as its tap.

    The row of a position holds the token at the next position. One of the two `Batch.inputs` holds hidden states: the
    first holds the model's at this position [TOKENS, 3 * the model's width], or the second holds the head's at the
    position before [TOKENS, hidden]. The other input is zeros.

    output_head: stem of the model's output head, used if the checkpoint has no output head.

    Raises GraphError as `build_graph` does.
    """
    g, p = Graph(weights), f"layers.{cfg.layer}."
    embedding, head = p + "embed_tokens", p + "lm_head"
    tokens = g.embedding(embedding if f"{embedding}.weight" in weights else "embed_tokens")
    fused = weights.get(f"{p}fc.weight", (0, 0))
    hidden = g.linear(g.add(Input(0, TOKENS, fused[-1])), p + "fc") + g.add(Input(1, TOKENS, cfg.hidden_size))
    normed = g.rms_norm(hidden, p + "hidden_norm", cfg.norm_eps)
    x = g.add(SideBySide(g.rms_norm(tokens, p + "input_layernorm", cfg.norm_eps), normed))
    h = (normed if cfg.norms_residual else hidden) + attention(g, x, cfg, cfg.layer)
    h = h + gated_mlp(g, g.rms_norm(h, p + "post_attention_layernorm", cfg.norm_eps), p + "mlp")
    g.tap = g.select_rows(h)
    g.output = g.logits(
        g.rms_norm(g.tap, p + "norm", cfg.norm_eps), head if f"{head}.weight" in weights else output_head
    )
    return g


def check_taps(cfg: Eagle3Config, weights: Mapping[str, tuple[int, ...]], hidden_size: int) -> None:
    """Check that the head was trained for a model of this width. Raises ModelLoadError."""
    found = weights.get(f"layers.{cfg.layer}.fc.weight")
    if found is None or found[-1] != _NUM_TAPS * hidden_size:
        reads = "has no fc.weight" if found is None else f"reads {found[-1]} numbers of a token"
        raise ModelLoadError(
            f"the head {reads}; for this model it must read {_NUM_TAPS * hidden_size}, {_NUM_TAPS} hidden states"
        )
