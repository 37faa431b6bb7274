"""A tiny real model on the torch executor, which replaces the hash of `tests.support.fake_executor`.

This runs engine tests that were written for the hash with the paged attention, samplers and caches of torch. It uses
float64, where products depend so little on their shape that no token changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from octavo.backends import Executor, ExecutorLimits
from octavo.backends.torch import eager
from octavo.backends.torch.compile import TorchBackend
from octavo.graph.builder import Graph
from octavo.quantization.packed import Weight
from tests.support.tiny_models import tiny_graph

_LIMITS = ExecutorLimits(1024, 64, 256, 4096)
_SPREAD = 3.0  # of the logits, as those of the hash


@cache
def _model(vocab_size: int) -> tuple[Graph, Mapping[str, Weight]]:
    return tiny_graph("llama", vocab_size=vocab_size, num_hidden_layers=1, max_position_embeddings=4096)


@cache
def _logits(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    graph, weights = _model(vocab_size)
    source = eager.dequantized(weights, dtype=torch.float64)
    texts = eager.Texts.of([token_ids])
    with torch.no_grad():
        return eager.logits_of(graph, source, texts)[-1].float().numpy()


class TorchModel:
    """A `tests.support.fake_executor.RealModel` on torch."""

    def logits(self, token_ids: list[int], vocab_size: int) -> np.ndarray:
        return _logits(tuple(token_ids), vocab_size).copy()

    def executor(self, vocab_size: int) -> Executor:
        return TorchBackend(torch.device("cpu"), torch.float64, torch.float64).compile(*_model(vocab_size), _LIMITS)
