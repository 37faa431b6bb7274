"""Gemma 4's assistant: a few layers that predict further tokens, with the keys and values of the model beside them.

As transformers has it (`Gemma4AssistantForCausalLM`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import GraphError
from octavo.graph.builder import Graph
from octavo.graph.cache import CacheLayout
from octavo.graph.ops.attention import AttentionParams, RopeParams
from octavo.graph.ops.linear import Input
from octavo.graph.ops.streams import SideBySide
from octavo.graph.values import TOKENS
from octavo.models import gemma4
from octavo.models._reading import ConfigReader

_KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
PREFIX = "assistant."


@dataclass(frozen=True, slots=True)
class AssistantConfig(gemma4.Config):
    """Rows rotate with the second component of their positions; the first is the last position that they see."""

    def rope_params(self, layer: int) -> RopeParams | None:
        params = gemma4.Config.rope_params(self, layer)
        return None if params is None else replace(params, axes=(1,) * len(params.frequencies))


def is_assistant(config_json: Mapping[str, object]) -> bool:
    """True for the config.json of an assistant."""
    return config_json.get("model_type") in _KINDS


def assistant_config(reader: ConfigReader, model: gemma4.Config) -> AssistantConfig:
    """reader: config.json.
    model: the one that it drafts for.
    Raises ModelLoadError naming the key.
    """
    width = reader.integer("backbone_hidden_size", 1536)
    if width != model.hidden_size:
        raise reader.error("backbone_hidden_size", width, f"must be {model.hidden_size}, the hidden size of the model")
    own = reader.section("text_config").with_defaults({"hidden_size_per_layer_input": 0})
    config = AssistantConfig.from_hf(own.replaced("num_kv_shared_layers", 0))  # all are, with another model
    assert isinstance(config, AssistantConfig)
    if config.vocab_size != model.vocab_size:
        raise own.error("vocab_size", config.vocab_size, f"must be {model.vocab_size}, that of the model")
    if config.input_width or config.mlp.experts is not None:
        key = "hidden_size_per_layer_input" if config.input_width else "enable_moe_block"
        raise own.error(key, own.value(key), "is not supported in an assistant")
    return config


def assistant_graph(
    cfg: AssistantConfig, model: gemma4.Config, weights: Mapping[str, tuple[int, ...]], layout: CacheLayout
) -> Graph:
    """The graph of an assistant: logits [LOGITS, vocab], and hidden states that continue it as its tap.

    A row has the last token of a sequence and, as `Batch.inputs[0]` [TOKENS, model's hidden], the hidden state from
    which the model has made that token; for a further guess the guess before, and the row of the tap that has made it.
    It rotates with the position of the sequence's last token and sees the tokens before that one, whose keys and values
    the model has computed.
    layout: of the model's cache.
    Raises GraphError as other graphs.
    """
    g, reads = Graph(weights), _reads(cfg, model)
    g.borrow([params.cache for params in reads], layout)
    token = g.embedding("embed_tokens") * model.hidden_size**0.5
    h = g.linear(g.add(SideBySide(token, g.add(Input(0, TOKENS, model.hidden_size)))), PREFIX + "pre_projection")
    for number, params in enumerate(reads):
        h = gemma4.layer(g, h, cfg, number, PREFIX, params)
        if f"{PREFIX}layers.{number}.layer_scalar.weight" in g.weights:
            h = g.scale_columns(h, f"{PREFIX}layers.{number}.layer_scalar")
    h = g.rms_norm(g.select_rows(h), PREFIX + "norm", cfg.norm_eps)
    g.tap = g.linear(h, PREFIX + "post_projection")
    g.output = g.logits(h, PREFIX + cfg.output_head)
    return g


def _reads(cfg: AssistantConfig, model: gemma4.Config) -> list[AttentionParams]:
    """The attention of each layer, over the cache of the model's last layer of the same kind.

    A row sees what the last token sees in the model but for itself: one token less than a window has.
    """
    found = []
    for layer, window in enumerate(cfg.attention.windows):
        alike = [i for i, other in enumerate(model.attention.windows) if (other is None) == (window is None)]
        if not alike:
            kind = "without" if window is None else "with"
            raise GraphError(f"layer {layer} reads a layer {kind} a window; the model has none")
        params = model.attention_params(alike[-1])
        window = None if params.window is None else max(params.window - 1, 1)
        found.append(replace(params, num_heads=cfg.num_heads, window=window))
    return found
