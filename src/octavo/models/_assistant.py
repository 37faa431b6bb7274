"""Gemma 4's assistant: a few layers that draft tokens, reading the model's own keys and values.

It follows transformers' `Gemma4AssistantForCausalLM`.
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
    """Configuration of an assistant.

    The position of a row has two components: the last position it sees, and the position it rotates with.
    """

    def rope_params(self, layer: int) -> RopeParams | None:
        params = gemma4.Config.rope_params(self, layer)
        return None if params is None else replace(params, axes=(1,) * len(params.frequencies))


def is_assistant(config_json: Mapping[str, object]) -> bool:
    """Return True if this is the config.json of an assistant."""
    return config_json.get("model_type") in _KINDS


def assistant_config(reader: ConfigReader, model: gemma4.Config) -> AssistantConfig:
    """Read an assistant's configuration. Raises ModelLoadError naming the key.

    reader: config.json.
    model: configuration of the model that it drafts for.
    """
    width = reader.integer("backbone_hidden_size", 1536)
    if width != model.hidden_size:
        raise reader.error("backbone_hidden_size", width, f"must be {model.hidden_size}, the hidden size of the model")
    own = reader.section("text_config").with_defaults({"hidden_size_per_layer_input": 0})
    config = AssistantConfig.from_hf(own.replaced("num_kv_shared_layers", 0))  # all are, with another model
    assert isinstance(config, AssistantConfig)
    if config.vocab_size != model.vocab_size:
        raise own.error(
            "vocab_size", config.vocab_size, f"must be {model.vocab_size}, the vocabulary size of the model"
        )
    if config.input_width or config.mlp.experts is not None:
        key = "hidden_size_per_layer_input" if config.input_width else "enable_moe_block"
        raise own.error(key, own.value(key), "is not supported in an assistant")
    return config


def assistant_graph(
    cfg: AssistantConfig, model: gemma4.Config, weights: Mapping[str, tuple[int, ...]], layout: CacheLayout
) -> Graph:
    """Build the graph of an assistant: logits [LOGITS, vocab], with the hidden states for the next draft as its tap.

    A row holds the last token of a sequence and, as `Batch.inputs[0]` [TOKENS, model's hidden], the hidden state from
    which the model predicted this token. For a further draft, it holds the previous draft and the tap's row that
    predicted it. The row rotates with the position of the sequence's last token. It sees the tokens before that one;
    the model has computed their keys and values.

    layout: layout of the model's cache.

    Raises GraphError as `build_graph` does.
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
    """Return the attention of each layer over the cache of the model's last layer of the same kind.

    A row sees what the sequence's last token sees in the model, except that token itself. A window therefore holds one
    token fewer.
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
