"""An adapter as an engine uses it, and what must be known of a model to read one for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from octavo.errors import ModelLoadError
from octavo.graph.adapters import adaptable_weights
from octavo.graph.builder import Graph
from octavo.graph.ops.low_rank import LowRank
from octavo.models import load_architecture, weight_table
from octavo.models._decoder import ModelConfig
from octavo.models._weights import WeightTable

MAX_INVOCATION_TOKENS = 1 << 10  # every prompt is searched for them


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """A model that adapters may be for.

    places: the weights of its graph that take a low-rank product, by name, with their shapes.
    """

    architecture: str  # module under `octavo.models`
    config: ModelConfig
    places: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, architecture: str, config: ModelConfig, graph: Graph) -> AdapterBase:
        """The model that a graph computes, which has to be whole."""
        return cls(architecture, config, adaptable_weights(graph))

    @property
    def table(self) -> WeightTable:
        """The table from stored tensors to the graph's weights."""
        return weight_table(load_architecture(self.architecture))


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank products by the names of the graph's weights beside which they lie.

    digest: of all numbers and scales, 16 bytes; empty if the adapter changes nothing. So it names the content.
    invocation_tokens: of an activated adapter, which acts from their last occurrence in the prompt on, and not at all
    without one; empty: it always acts.
    """

    name: str
    digest: bytes
    parts: Mapping[str, LowRank] = field(hash=False)
    invocation_tokens: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, name: str, parts: Mapping[str, LowRank], scale: float = 1.0, invocation_tokens: tuple[int, ...] = ()
    ) -> Adapter:
        """An adapter of these parts, whose effect is multiplied by `scale`. Parts without effect are left out."""
        scaled = {key: part.scaled(scale) for key, part in parts.items() if part.scale * scale != 0}
        return cls(name, _digest(scaled, invocation_tokens) if scaled else b"", scaled, invocation_tokens)

    def start_in(self, token_ids: Sequence[int]) -> int | None:
        """The first token of a prompt that it acts on; None: on none."""
        wanted = list(self.invocation_tokens)
        if not wanted:
            return 0
        for start in range(len(token_ids) - len(wanted), -1, -1):
            if token_ids[start] == wanted[0] and list(token_ids[start : start + len(wanted)]) == wanted:
                return start
        return None

    @property
    def rank(self) -> int:
        """The highest rank of a part."""
        return max((part.rank for part in self.parts.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in 16-bit numbers."""
        return sum(2 * (part.a.size + part.b.size) for part in self.parts.values())


def checked_invocation(where: str, found: object) -> tuple[int, ...]:
    """The tokens that activate an adapter, as a file has them. where: file and key. Raises ModelLoadError."""
    tokens = found if isinstance(found, list) else [None]
    if len(tokens) > MAX_INVOCATION_TOKENS or not all(type(token) is int and token >= 0 for token in tokens):
        raise ModelLoadError(
            f"{where} is {found!r:.80}; it must be a list of at most {MAX_INVOCATION_TOKENS} token ids"
        )
    return tuple(tokens)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as a file has it: its parts by checkpoint names, and the tokens that activate it (`Adapter`)."""

    parts: Mapping[str, StoredPart]
    invocation_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part as a file has it. tensor: the name of one of its tensors, for errors."""

    tensor: str
    low_rank: LowRank

    def refuse(self, reason: str) -> ModelLoadError:
        """The error that names the tensor."""
        return ModelLoadError(f"tensor {self.tensor!r:.120} {reason}")


def _digest(parts: Mapping[str, LowRank], invocation_tokens: tuple[int, ...]) -> bytes:
    found = blake2b(repr(invocation_tokens).encode(), digest_size=16)
    for name, part in sorted(parts.items()):
        found.update(repr((name, part.a.shape, part.b.shape, float(part.scale))).encode())
        found.update(np.ascontiguousarray(part.a).data)
        found.update(np.ascontiguousarray(part.b).data)
    return found.digest()
