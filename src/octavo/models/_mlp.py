"""The MLP, or the experts, of a decoder's layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.graph.ops.moe import Routing
from octavo.models._reading import MAX_WIDTH, ConfigReader

# Experts that every token takes: `mlp.shared_experts` as one MLP, or `mlp.shared_expert` with a gate of its own.
SharedExperts = Literal["plain", "gated"]


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """The MLP of a decoder's layers. A model family overrides the defaults that differ."""

    intermediate_size: int
    experts: Routing | None = None
    first_experts: int | None = None  # first layer with experts; None means all layers whose weights include a router
    shared: SharedExperts | None = None  # in addition to the experts

    @classmethod
    def from_gguf(
        cls,
        reader: ConfigReader,
        experts: Routing | None = None,
        *,
        first_experts: int | None = None,
        shared: SharedExperts | None = None,
    ) -> MLPConfig:
        """Read the MLP of a GGUF file. Raises ModelLoadError naming the key.

        experts: routing of the experts; if None, a file with experts is refused.
        """
        if experts is None and (count := reader.integer("expert_count", 0, low=0)):
            raise reader.error("expert_count", count, "experts are not supported by this architecture")
        return cls(reader.integer("feed_forward_length", high=MAX_WIDTH), experts, first_experts, shared)

    @classmethod
    def from_hf(
        cls,
        reader: ConfigReader,
        experts: Routing | None = None,
        *,
        activation: tuple[str, ...] = ("silu", "swish"),
        first_experts: int | None = None,
        shared: SharedExperts | None = None,
    ) -> MLPConfig:
        """Read the MLP from config.json. Raises ModelLoadError naming the key.

        activation: accepted names; the first is the default.
        """
        for key in ("hidden_act", "hidden_activation"):
            if reader.text(key, activation[0]) not in activation:
                raise reader.error(key, reader.text(key), f"must be {' or '.join(activation)}")
        return cls(reader.integer("intermediate_size", high=MAX_WIDTH), experts, first_experts, shared)


def experts_from_gguf(reader: ConfigReader, *, normalize: bool) -> Routing | None:
    """Read the expert routing of a GGUF file. Returns None if the file has no experts.

    normalize: the weights of the chosen experts sum to 1, unless the file states otherwise.
    """
    count = reader.integer("expert_count", 0, low=0)
    if not count:
        return None
    return Routing(
        reader.integer("expert_used_count", high=count), normalize=reader.flag("expert_weights_norm", normalize)
    )


def experts_from_hf(reader: ConfigReader, *, normalize: bool) -> Routing:
    """Read the expert routing from config.json.

    normalize: the weights of the chosen experts sum to 1.
    """
    count = reader.integer("num_local_experts" if reader.has("num_local_experts") else "num_experts")
    return Routing(reader.integer("num_experts_per_tok", high=count), normalize=normalize)
