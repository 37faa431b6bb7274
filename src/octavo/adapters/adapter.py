"""An adapter in the engine's form, and the facts about a model that are needed to read one for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from octavo.errors import ModelLoadError
from octavo.graph.adapters import adaptable_weights, embedding_tables
from octavo.graph.builder import Graph
from octavo.graph.ops.low_rank import LowRank
from octavo.loader.checkpoint import open_checkpoint
from octavo.models import load_architecture, weight_table
from octavo.models._decoder import ModelConfig
from octavo.models._weights import WeightTable
from octavo.platform.background_work import give_way
from octavo.quantization.packed import Weight

EMBEDDING = "embed_tokens.weight"  # the table that a tied head is
MAX_INVOCATION_TOKENS = 1 << 10  # every prompt is searched for them


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that adapters are made for.

    places: the weights of the model's graph that adapters may change, by name, with their shapes (tables transposed).
    weights: the model's weights. Magnitudes are relative to them.
    tables: the names of the model's embeddings.
    path: the checkpoint to open for the weights, or None if `weights` can be read at any time.
    """

    architecture: str  # module under `octavo.models`
    config: ModelConfig
    places: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, Weight]
    tables: frozenset[str] = frozenset()
    path: Path | None = None

    @classmethod
    def of(cls, architecture: str, config: ModelConfig, graph: Graph, weights: Mapping[str, Weight]) -> AdapterBase:
        """Describe the model that a graph computes. The graph must be the whole model's."""
        return cls(architecture, config, adaptable_weights(graph), weights, embedding_tables(graph))

    @contextmanager
    def opened(self) -> Iterator[Mapping[str, Weight]]:
        """Yield the model's weights, even if the loaded model's files are closed. Raises ModelLoadError."""
        if self.path is None:
            yield self.weights
            return
        with closing(open_checkpoint(self.path)) as checkpoint:
            yield checkpoint.weights

    @property
    def table(self) -> WeightTable:
        """The table from stored tensors to the graph's weights."""
        return weight_table(load_architecture(self.architecture))


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank products, by the name of the graph's weight that each is added to.

    digest: 16 bytes over all numbers and scales, which identify the content; empty if the adapter changes nothing.
    invocation_tokens: tokens that activate the adapter. It acts from their last occurrence in the prompt on, and not at
    all if they do not occur. Empty if it always acts.
    """

    name: str
    digest: bytes
    parts: Mapping[str, LowRank] = field(hash=False)
    invocation_tokens: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, name: str, parts: Mapping[str, LowRank], scale: float = 1.0, invocation_tokens: tuple[int, ...] = ()
    ) -> Adapter:
        """Return an adapter with these parts, its effect multiplied by `scale`. Parts without effect are left out."""
        scaled = {key: part.scaled(scale) for key, part in parts.items() if _acts(part, scale)}
        return cls(name, _digest(scaled, invocation_tokens) if scaled else b"", scaled, invocation_tokens)

    def start_in(self, token_ids: Sequence[int]) -> int | None:
        """Return the index of the first prompt token that the adapter acts on, or None if it acts on none."""
        wanted = list(self.invocation_tokens)
        if not wanted:
            return 0
        for start in range(len(token_ids) - len(wanted), -1, -1):
            if token_ids[start] == wanted[0] and list(token_ids[start : start + len(wanted)]) == wanted:
                return start
        return None

    @property
    def rank(self) -> int:
        """The highest rank of any part."""
        return max((part.rank for part in self.parts.values() if part.a is not None), default=0)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts, both as read (float32) and as prepared (16-bit numbers)."""
        return sum(6 * part.size for part in self.parts.values())


def _acts(part: LowRank, scale: float) -> bool:
    return scale != 0 and (part.scale != 0 or part.gain is not None)


def checked_invocation(where: str, found: object) -> tuple[int, ...]:
    """Check the tokens that activate an adapter, as read from a file, and return them.

    where: file and key, for errors.
    Raises ModelLoadError.
    """
    tokens = found if isinstance(found, list) else [None]
    if len(tokens) > MAX_INVOCATION_TOKENS or not all(type(token) is int and token >= 0 for token in tokens):
        raise ModelLoadError(
            f"{where} is {found!r:.80}; it must be a list of at most {MAX_INVOCATION_TOKENS} token ids"
        )
    return tuple(tokens)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as stored in a file: its parts by checkpoint names, and the tokens that activate it (`Adapter`)."""

    parts: Mapping[str, StoredPart]
    invocation_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part as stored in a file.

    tensor: the name of one of its tensors, for errors.
    """

    tensor: str
    low_rank: LowRank

    def refuse(self, reason: str) -> ModelLoadError:
        """Return an error that names the tensor."""
        return ModelLoadError(f"tensor {self.tensor!r:.120} {reason}")


def _digest(parts: Mapping[str, LowRank], invocation_tokens: tuple[int, ...]) -> bytes:
    found = blake2b(repr(invocation_tokens).encode(), digest_size=16)
    for name, part in sorted(parts.items()):
        arrays = [each for each in (part.a, part.b, part.gain) if each is not None]
        found.update(repr((name, [each.shape for each in arrays], float(part.scale))).encode())
        for each in arrays:
            give_way()
            found.update(np.ascontiguousarray(each).data)
    return found.digest()
