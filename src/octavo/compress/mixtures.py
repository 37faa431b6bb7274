"""The well-known mixtures of types, and the type of each tensor in them.

Source: the rules of llama.cpp's `llama-quantize` (`src/llama-quant.cpp`), so that a name means the same in Octavo and
    llama.cpp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import DENSE_TYPES


@dataclass(frozen=True, slots=True)
class Mixture:
    """A named mixture of types.

    base: the type of most tensors.
    file_type: `general.file_type` of llama.cpp.
    """

    name: str
    base: str
    file_type: int


_TABLE = (
    ("f32", "F32", 0),
    ("f16", "F16", 1),
    ("bf16", "BF16", 32),
    ("q4_0", "Q4_0", 2),
    ("q4_1", "Q4_1", 3),
    ("q5_0", "Q5_0", 8),
    ("q5_1", "Q5_1", 9),
    ("q8_0", "Q8_0", 7),
    ("q2_k_s", "Q2_K", 21),
    ("q2_k", "Q2_K", 10),
    ("q3_k_s", "Q3_K", 11),
    ("q3_k_m", "Q3_K", 12),
    ("q3_k_l", "Q3_K", 13),
    ("q4_k_s", "Q4_K", 14),
    ("q4_k_m", "Q4_K", 15),
    ("q5_k_s", "Q5_K", 16),
    ("q5_k_m", "Q5_K", 17),
    ("q6_k", "Q6_K", 18),
    ("iq2_xxs", "IQ2_XXS", 19),
    ("iq2_xs", "IQ2_XS", 20),
    ("iq2_s", "IQ2_XS", 28),
    ("iq2_m", "IQ2_S", 29),
    ("iq3_xxs", "IQ3_XXS", 23),
    ("iq3_xs", "IQ3_S", 22),
    ("iq3_s", "IQ3_S", 26),
    ("iq3_m", "IQ3_S", 27),
    ("iq4_xs", "IQ4_XS", 30),
    ("iq4_nl", "IQ4_NL", 25),
    ("tq1_0", "TQ1_0", 36),
    ("tq2_0", "TQ2_0", 37),
    ("mxfp4_moe", "MXFP4", 38),
)
MIXTURES: Mapping[str, Mixture] = MappingProxyType({row[0]: Mixture(*row) for row in _TABLE})
_OTHER_NAMES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "mxfp4": "mxfp4_moe"}

_FALLBACKS = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
# Matrices that are small or sensitive: norms, routers, convolutions, positions, token types.
_PLAIN = re.compile(
    r"_norm\.weight$|ffn_gate_inp|ffn_gate_tid2eid|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv"
    r"|^position_embd\.|^token_types\.|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\."
    r"|attn_rel_b|\.position_embd|indexer\.[kq]_proj"
)
_KINDS = {
    "attn_qkv.weight": "qkv",
    "attn_kv_b.weight": "kv_b",
    "attn_v.weight": "v",
    "attn_k.weight": "k",
    "attn_q.weight": "q",
    "attn_output.weight": "attn_output",
    "ffn_up": "up",
    "ffn_gate": "gate",
    "ffn_down": "down",
}
_BLOCK = re.compile(r"blk\.(\d+)\.")


def find_mixture(name: str) -> Mixture | None:
    """Find a mixture by name, ignoring case. Returns None if there is none."""
    key = name.lower()
    return MIXTURES.get(_OTHER_NAMES.get(key, key))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that the rules need.

    gqa: number of query heads per kv head.
    is_tied: the model has no separate output matrix.
    """

    architecture: str
    num_layers: int
    gqa: int
    num_experts: int
    is_tied: bool
    num_values: int  # value matrices, fused ones included
    has_importance: bool


def can_be_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for matrices that the mixtures quantize."""
    return len(shape) > 1 and name.endswith("weight") and not _PLAIN.search(name)


def fallback(type_name: str, width: int) -> str:
    """Return `type_name` if its blocks fit rows of this width, else its substitute with smaller blocks, else F16."""
    if width % BLOCK_SIZES[type_name][0] == 0:
        return type_name
    substitute = _FALLBACKS.get(type_name, "F16")
    return substitute if width % BLOCK_SIZES[substitute][0] == 0 else "F16"


def kind_of(name: str) -> str:
    """Return the part of the model that a tensor belongs to: `v`, `down`, `output`, `embedding`, ..., or `other`."""
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "embedding"
    return next((kind for text, kind in _KINDS.items() if text in name), "other")


def layer_order(name: str) -> tuple[int, str]:
    """Return the sort key by which llama.cpp orders tensors: by layer, then by name."""
    found = _BLOCK.match(name)
    return (int(found[1]) if found else -1, name)


class Rules:
    """Chooses the type of every tensor of a model. It counts the layers of a kind, so call it in `layer_order`."""

    def __init__(self, mixture: Mixture, facts: ModelFacts) -> None:
        self.mixture = mixture
        self.facts = facts
        self._seen: Counter[str] = Counter()

    def choose(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type according to the rules. Its blocks may not fit the rows; pass the result to `fallback`."""
        m, kind = self.mixture.name, kind_of(name)
        if self.mixture.base in DENSE_TYPES:
            return self.mixture.base
        if kind == "output" or (kind == "embedding" and self.facts.is_tied):
            return self._output(shape[-1])
        if m == "mxfp4_moe":
            return "MXFP4" if len(shape) > 2 and shape[0] > 1 else "Q8_0"
        if kind == "embedding":
            return _EMBEDDING.get(m, self.mixture.base)
        counted = "v" if kind in ("v", "qkv", "kv_b") else kind
        index = self._seen[counted]
        self._seen[counted] += 1
        if self.facts.num_experts > 1 and counted in ("down", "gate", "up"):
            index = max(layer_order(name)[0], 0)
        chosen = self._low(kind, index) if m.startswith("iq2") else self._usual(kind, counted, index)
        return chosen or self.mixture.base

    def _output(self, width: int) -> str:
        base, m = self.mixture.base, self.mixture.name
        if m == "mxfp4_moe" or self.facts.architecture == "falcon" or width % BLOCK_SIZES[base][0]:
            return "Q8_0"
        if m in ("iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs"):
            return "Q5_K"
        return base if base == "Q8_0" else "Q6_K"

    def _low(self, kind: str, index: int) -> str | None:
        """Apply the rules of the mixtures with about two bits."""
        facts, is_larger = self.facts, self.mixture.name in ("iq2_s", "iq2_m")
        better = "IQ3_S" if is_larger else "Q2_K"
        if kind in ("v", "qkv", "kv_b"):
            return "Q4_K" if facts.gqa >= 4 or facts.num_experts >= 4 else better
        if kind == "k":
            return "Q4_K" if facts.num_experts == 8 else None
        if kind == "down":
            return better if index < facts.num_layers // 8 else None
        if kind == "attn_output":
            return "Q5_K" if facts.num_experts == 8 else "IQ3_S" if is_larger else None
        return None

    def _usual(self, kind: str, counted: str, index: int) -> str | None:
        if counted == "v":
            return self._value(index)
        if kind in ("k", "q"):
            if kind == "k" and self.facts.num_experts == 8:
                return "Q8_0"
            return {"iq3_xs": "IQ3_XXS", "iq3_xxs": "IQ2_S"}.get(self.mixture.name)
        if kind == "down":
            return self._down(index)
        if kind == "attn_output":
            return self._attention_output()
        if kind in ("gate", "up") and self.mixture.name == "iq3_xs":
            layers = self.facts.num_layers
            return "IQ3_XXS" if layers // 8 <= index < 7 * layers // 8 else None
        return None

    def _value(self, index: int) -> str | None:
        m, facts = self.mixture.name, self.facts
        shared = facts.gqa >= 4
        chosen = {
            "q2_k": "Q4_K" if shared else "Q3_K",
            "q2_k_s": "Q4_K" if shared else None,
            "iq3_xxs": "Q4_K" if shared else "IQ3_XXS" if facts.has_importance else "IQ3_S",
            "iq3_xs": "Q4_K" if shared else None,
            "iq3_s": "Q4_K" if shared else None,
            "iq3_m": "Q4_K",
            "q3_k_m": "Q5_K" if index < 2 else "Q4_K",
            "q3_k_l": "Q5_K",
            "iq4_nl": "Q5_K" if shared else None,
            "iq4_xs": "Q5_K" if shared else None,
            "q4_k_m": "Q6_K" if _has_more_bits(index, facts.num_values) else None,
            "q5_k_m": "Q6_K" if _has_more_bits(index, facts.num_values) else None,
            "q4_k_s": "Q5_K" if index < 4 else None,
        }.get(m)
        if facts.num_experts == 8:
            return "Q8_0"
        is_70b = facts.architecture == "llama" and facts.num_layers == 80 and facts.gqa > 1
        if is_70b and (chosen or self.mixture.base) in ("Q3_K", "Q4_K"):
            return "Q5_K"
        return chosen

    def _down(self, index: int) -> str | None:
        m, facts = self.mixture.name, self.facts
        layers, is_falcon = facts.num_layers, facts.architecture == "falcon"
        is_early, has_more = index < layers // 8, _has_more_bits(index, layers)
        if m == "iq3_xxs" and not facts.has_importance:
            return "Q4_K" if is_early else "Q3_K"
        if m in ("iq4_nl", "iq4_xs"):
            return "Q5_K" if is_early and not facts.has_importance else None
        if m in ("q4_0", "q5_0"):
            return {"q4_0": "Q4_1", "q5_0": "Q5_1"}[m] if is_early and facts.has_importance else None
        if m == "q4_k_m" and is_falcon:
            return "Q6_K" if index < layers // 16 else "Q5_K" if has_more else "Q4_K"
        return {
            "q2_k": "Q3_K",
            "q2_k_s": "Q4_K" if is_early else None,
            "q3_k_m": "Q5_K" if index < layers // 16 else "Q4_K" if not is_falcon or has_more else "Q3_K",
            "iq3_m": "Q4_K" if is_early or (facts.num_experts == 8 and has_more) else None,
            "q3_k_l": "Q4_K" if is_falcon else "Q5_K",
            "q4_k_m": "Q6_K" if has_more else None,
            "q5_k_m": "Q6_K" if has_more else None,
            "q4_k_s": "Q5_K" if is_early and not is_falcon else None,
        }.get(m)

    def _attention_output(self) -> str | None:
        m = self.mixture.name
        if self.facts.architecture == "falcon":
            return "Q4_K" if m == "q3_k_l" else None
        if self.facts.num_experts == 8:
            return (
                "Q5_K" if m.startswith(("q2_k", "q3_k_s", "q3_k_m", "q4_k", "iq3", "iq4")) and m != "q2_k_s" else None
            )
        return {"q2_k": "Q3_K", "iq3_xxs": "IQ3_S", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K", "iq3_m": "Q4_K"}.get(m)


_EMBEDDING = {
    "iq2_xxs": "Q2_K",
    "iq2_xs": "Q2_K",
    "iq2_s": "IQ3_S",
    "iq2_m": "IQ3_S",
    "iq3_xxs": "IQ3_S",
    "tq1_0": "Q4_K",
    "tq2_0": "Q4_K",
}


def _has_more_bits(index: int, count: int) -> bool:
    """Return True for the first and last eighth of the layers, and every third layer in between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
