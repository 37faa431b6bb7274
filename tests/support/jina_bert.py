"""Jina's BERT in torch, by its published formula: transformers supports it only through remote code.

Günther et al., arXiv 2310.19923, and the names of tensors in `jinaai/jina-embeddings-v2-base-en` and, for code,
`jinaai/jina-embeddings-v2-base-code`.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput


class JinaBertConfig(BertConfig):
    """Configuration saved with BERT's model type, like the published files.

    for_code: the variant for code.
    """

    for_code: bool = False
    feed_forward_type: str = "geglu"
    position_embedding_type: str = "alibi"


def slopes(heads: int) -> list[float]:
    """Return Press et al.'s slopes: a geometric sequence, extended by every second element of the longer one if
    necessary.
    """
    if math.log2(heads).is_integer():
        first = 2 ** (-8 / heads)
        return [first ** (head + 1) for head in range(heads)]
    fewer = 2 ** math.floor(math.log2(heads))
    return slopes(fewer) + slopes(2 * fewer)[::2][: heads - fewer]


class _Attention(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        own = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
        if config.for_code:
            own |= {f"layer_norm_{name}": nn.LayerNorm(width, config.layer_norm_eps) for name in "qk"}
        self.self = nn.ModuleDict(own)
        self.output = nn.ModuleDict(
            {"dense": nn.Linear(width, width), "LayerNorm": nn.LayerNorm(width, config.layer_norm_eps)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.self[name](x) for name in ("query", "key", "value"))
        if "layer_norm_q" in self.self:
            q, k = self.self["layer_norm_q"](q), self.self["layer_norm_k"](k)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        place = torch.arange(x.shape[1])
        bias = -torch.tensor(slopes(self.heads))[:, None, None] * (place[:, None] - place).abs()
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + bias
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out: torch.Tensor = self.output["LayerNorm"](x + self.output["dense"](mixed))
        return out


class _Layer(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        norm = (width, config.layer_norm_eps)
        self.attention = _Attention(config)
        self.gate = functional.relu if config.feed_forward_type == "reglu" else functional.gelu
        if config.feed_forward_type == "original":
            self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
            self.output = nn.ModuleDict({"dense": nn.Linear(inner, width), "LayerNorm": nn.LayerNorm(*norm)})
        elif config.for_code:
            up, down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width)
            self.mlp = nn.ModuleDict({"up_gated_layer": up, "down_layer": down})
            self.layer_norm_1, self.layer_norm_2 = nn.LayerNorm(*norm), nn.LayerNorm(*norm)
        else:
            gated, down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width)
            self.mlp = nn.ModuleDict({"gated_layers": gated, "wo": down, "layernorm": nn.LayerNorm(*norm)})

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = self.attention(h)
        out: torch.Tensor
        if hasattr(self, "intermediate"):
            inner = self.gate(self.intermediate["dense"](x))
            out = self.output["LayerNorm"](x + self.output["dense"](inner))
        elif hasattr(self, "layer_norm_1"):
            x = self.layer_norm_1(h + x)
            up, gate = self.mlp["up_gated_layer"](x).chunk(2, dim=-1)
            out = self.layer_norm_2(x + self.mlp["down_layer"](up * self.gate(gate)))
        else:
            gate, up = self.mlp["gated_layers"](x).chunk(2, dim=-1)
            out = self.mlp["layernorm"](x + self.mlp["wo"](self.gate(gate) * up))
        return out


class JinaBert(PreTrainedModel):
    """The encoder or, with labels, a cross-encoder."""

    config_class = JinaBertConfig

    def __init__(self, config: JinaBertConfig, labels: int = 0) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(config.vocab_size, width),
                "token_type_embeddings": nn.Embedding(config.type_vocab_size, width),
                "LayerNorm": nn.LayerNorm(width, config.layer_norm_eps),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))})
        if labels:
            self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)})
            self.classifier = nn.Linear(width, labels)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> BaseModelOutput | SequenceClassifierOutput:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        h = self.embeddings["word_embeddings"](input_ids) + self.embeddings["token_type_embeddings"](types)
        h = self.embeddings["LayerNorm"](h)
        for layer in self.encoder["layer"]:
            h = layer(h)
        if not hasattr(self, "classifier"):
            return BaseModelOutput(h)
        return SequenceClassifierOutput(logits=self.classifier(self.pooler["dense"](h[:, 0]).tanh()))


class JinaBertForSequenceClassification(JinaBert):
    """A JinaBert under the name that config.json uses."""
