"""Vectors and scores of texts, computed by a loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from octavo.batch import Array, Float32
from octavo.errors import UsageError
from octavo.generation_request import Pooling, PoolingParams
from octavo.graph.builder import Graph
from octavo.graph.ops.encoder import MeanPool, TokenTypeEmbedding
from octavo.graph.ops.linear import Logits
from octavo.graph.ops.rowwise import softcap
from octavo.loader.pooling_config import PoolingConfig

if TYPE_CHECKING:
    from octavo.loader.checkpoint import Checkpoint
    from octavo.tokenizer.tokenizer import Tokenizer

# Models with this token use ChatML, like Qwen3-Reranker, whose prompt asks for yes or no.
CHAT_TOKEN = "<|im_start|>"
_REMEDY = "use /v1/embeddings, /v1/rerank or /v1/score, LLM.embed or LLM.score, or a model that generates"

Scoring = Literal["none", "label", "yes_no", "cosine", "dot", "late"]


@dataclass(frozen=True, slots=True)
class TextModel:
    """The tasks that a model can perform on texts.

    generates: it answers prompts.
    takes_whole_texts: it sees all tokens of a text at once.
    pooling, normalize: how its vectors are made.
    scoring: pairs are scored by a head (label), by the next token (yes_no), by the cosine or dot product of two
    vectors (cosine, dot), or by comparing the tokens' vectors (late).
    num_labels: number of the head's labels.
    activation: applied to the head's label.
    num_token_types: number of token types; 0 if the model does not distinguish any.
    width: length of its vectors.
    """

    generates: bool = True
    takes_whole_texts: bool = False
    pooling: Pooling = "mean"
    normalize: bool = False
    scoring: Scoring = "none"
    num_labels: int = 0
    activation: Literal["sigmoid", "identity"] = "sigmoid"
    num_token_types: int = 0
    width: int = 0

    def check(self, params: object, num_tokens: int) -> None:
        """Raise UsageError if the model cannot do what a request asks for.

        num_tokens: number of tokens in its prompt.
        """
        if not isinstance(params, PoolingParams):
            if not self.generates:
                kind = "a cross-encoder" if self.num_labels else "an encoder"
                message = f"this model is {kind}: it generates no text; {_REMEDY}"
                raise UsageError(message, param="model", code="unsupported_model")
            return
        if params.task == "score" and self.scoring not in ("label", "yes_no"):
            raise UsageError("this model has no head that scores pairs", param="model", code="unsupported_model")
        if params.task == "embed" and self.num_labels:
            message = "this model is a cross-encoder: it scores pairs of texts and has no vectors; use /v1/score"
            raise UsageError(message, param="model", code="unsupported_model")
        self._check_tokens(params.task)
        self._check_pooling(params.pooling)
        if params.second_start and not (self.num_token_types > 1 and 0 < params.second_start <= num_tokens):
            message = (
                f"second_start is {params.second_start}, but the text has {num_tokens} tokens or only one token type"
            )
            raise UsageError(message, param="second_start", code="invalid_value")

    def _check_tokens(self, task: str) -> None:
        """Raise UsageError if a request wants one vector per text but the model has one per token, or vice versa."""
        message = None
        if task == "embed" and self.pooling == "all":
            message = "this model makes a vector for each token, not one for a text; use LLM.token_embed or /pooling"
        elif task == "token_embed" and self.takes_whole_texts and (self.num_labels or self.pooling in ("mean", "max")):
            message = "this model pools its texts and makes no token vectors; use a ColBERT model or a decoder"
        if message is not None:
            raise UsageError(message, param="task", code="unsupported_model")

    def _check_pooling(self, pooling: Pooling | None) -> None:
        if pooling is None:
            return
        if (self.takes_whole_texts or not self.generates) and pooling != self.pooling:
            message = f"pooling is {pooling!r}, but this model uses {self.pooling!r}; leave it out"
            raise UsageError(message, param="pooling", code="unsupported_parameter")
        if not self.takes_whole_texts and pooling not in ("mean", "last"):
            why = "its first token sees no other token" if pooling == "cls" else "this model is a decoder"
            message = f"pooling is {pooling!r}, but {why}; use 'mean' or 'last'"
            raise UsageError(message, param="pooling", code="unsupported_parameter")


ANSWERS_ONLY = TextModel()  # vectors are the mean of the hidden states; no scores


@dataclass(frozen=True, slots=True, eq=False)
class YesNoHead:
    """The output head's rows for "yes" and "no", [2, hidden], and the bias, scale and cap of its logits."""

    weight: Float32
    bias: Float32
    scale: float
    cap: float | None

    def score(self, hidden_state: Float32) -> Float32:
        """Return the probability of "yes" rather than "no": [1]."""
        logits = (self.weight.astype(np.float64) @ hidden_state + self.bias) * self.scale
        capped = logits if self.cap is None else softcap(logits, self.cap)
        return sigmoid(np.asarray([capped[0] - capped[1]]))


def sigmoid(x: Array) -> Float32:
    """Compute 1 / (1 + e^-x) in float32, without overflow."""
    out: Float32 = (0.5 * (1.0 + np.tanh(0.5 * x.astype(np.float64)))).astype(np.float32)
    return out


def text_model(graph: Graph, pooling: PoolingConfig, tokenizer: Tokenizer, width: int) -> TextModel:
    """Return what a model can do with texts, according to its graph and its checkpoint.

    width: length of its vectors.
    """
    types = [node.op.weight.shape[0] for node in graph.nodes if isinstance(node.op, TokenTypeEmbedding)]
    num_labels = graph.output.cols if pooling.is_classifier else 0
    scoring: Scoring = "none"
    if pooling.is_classifier:
        scoring = "label" if num_labels == 1 else "none"
    elif pooling.is_embedder or not graph.generates:
        scoring = "late" if pooling.pooling == "all" else "dot" if pooling.pooling == "max" else "cosine"
    elif yes_no_ids(pooling, tokenizer) is not None:
        scoring = "yes_no"
    return TextModel(
        generates=graph.generates,
        takes_whole_texts=graph.takes_whole_texts,
        pooling=_pooling(graph, pooling),
        normalize=pooling.normalize,
        scoring=scoring,
        num_labels=num_labels,
        activation=pooling.activation,
        num_token_types=min(types, default=0),
        width=width,
    )


def _pooling(graph: Graph, pooling: PoolingConfig) -> Pooling:
    """Return the graph's pooling if it pools by itself, otherwise the checkpoint's pooling.

    A classification head reads the hidden state of the token that attends to all others.
    """
    if not graph.takes_whole_texts:
        return "last" if pooling.is_classifier else pooling.pooling
    if any(isinstance(node.op, MeanPool) for node in graph.nodes):
        return "mean"
    is_kept = pooling.pooling in ("last", "max", "all") and not pooling.is_classifier
    return pooling.pooling if is_kept else "cls"


def yes_no_ids(pooling: PoolingConfig, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the token ids of a causal reranker's two answers, or None for any other model.

    They come from the checkpoint, or are `yes` and `no` for a ChatML model.
    """
    if pooling.yes_no is not None:
        return pooling.yes_no if max(pooling.yes_no) < tokenizer.vocab_size else None
    if CHAT_TOKEN not in {tokenizer.tokens[i] for i in tokenizer.special_token_ids}:
        return None
    yes, no = (tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no"))
    return (yes[0], no[0]) if len(yes) == len(no) == 1 else None


def yes_no_head(graph: Graph, checkpoint: Checkpoint, tokenizer: Tokenizer) -> YesNoHead | None:
    """Return the head of a causal reranker, read from the checkpoint, or None for any other model."""
    ids = yes_no_ids(checkpoint.pooling, tokenizer)
    head = next((node.op for node in graph.nodes if isinstance(node.op, Logits)), None)
    if ids is None or head is None:
        return None
    rows = np.array(ids, np.intp)
    bias = np.zeros(2, np.float32) if head.bias is None else checkpoint.weights[head.bias.name].dequantize()[rows]
    weight = checkpoint.weights[head.weight.name].rows(rows).dequantize().astype(np.float32)
    return YesNoHead(weight, bias, head.scale, head.softcap)
