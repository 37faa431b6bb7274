"""The steps from a pooled vector to the text's vector or score: dense layers, scaling to unit length, yes or no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.batch import Float32
from octavo.engine.consumers.pooling import Finish, normalized
from octavo.engine.texts.text_model import TextModel, YesNoHead, yes_no_head
from octavo.generation_request import PoolingParams
from octavo.graph.builder import Graph
from octavo.graph.ops.rowwise import ACTIVATIONS
from octavo.loader.dense_module import DenseModule

if TYPE_CHECKING:
    from octavo.loader.checkpoint import Checkpoint
    from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer:
    """A `DenseModule` with its weight [out_features, in_features] and its bias [out_features]."""

    weight: Float32
    bias: Float32
    activation: str | None

    @classmethod
    def load(cls, module: DenseModule) -> DenseLayer:
        """Load the layer's weight and bias. Raise ModelLoadError naming the file."""
        return cls(*module.load(), module.activation)

    def __call__(self, vector: Float32) -> Float32:
        """Apply the layer: [..., in_features] -> [..., out_features]."""
        out: Float32 = vector @ self.weight.T + self.bias
        if self.activation is not None:
            out = ACTIVATIONS[self.activation](out)
        return out.astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class TextHeads:
    """The steps after pooling.

    yes_no: the head of a causal reranker.
    dense: layers applied to vectors of texts, in this order.
    num_logs: how many times log(1 + relu(x)) is applied before the dense layers.
    """

    yes_no: YesNoHead | None = None
    dense: tuple[DenseLayer, ...] = ()
    num_logs: int = 0

    def finish(self, params: PoolingParams, texts: TextModel) -> Finish | None:
        """Return the function that turns a pooled vector, or token vectors, into the result.

        Return None if nothing is left to do.
        """
        if params.task == "score":
            return None if self.yes_no is None else self.yes_no.score
        logs: tuple[Finish, ...] = (saturated,) * self.num_logs
        steps: tuple[Finish, ...] = (*logs, *self.dense, *((normalized,) if texts.normalize else ()))
        return (lambda vector: _through(steps, vector)) if steps else None


NO_HEADS = TextHeads()


def text_heads(graph: Graph, checkpoint: Checkpoint, texts: TextModel, tokenizer: Tokenizer) -> TextHeads:
    """Return the heads of a model, read from its checkpoint. Raises ModelLoadError naming the file."""
    yes_no = yes_no_head(graph, checkpoint, tokenizer) if texts.scoring == "yes_no" else None
    dense = tuple(DenseLayer.load(module) for module in checkpoint.pooling.dense)
    return TextHeads(yes_no, dense, checkpoint.pooling.num_logs)


def saturated(vector: Float32) -> Float32:
    """Return log(1 + relu(x)), SPLADE's weights for the tokens of the vocabulary. Formal et al., arXiv 2109.10086."""
    logs: Float32 = np.log1p(np.maximum(vector, np.float32(0))).astype(np.float32)
    return logs


def _through(steps: tuple[Finish, ...], vector: Float32) -> Float32:
    for step in steps:
        vector = step(vector)
    return vector
