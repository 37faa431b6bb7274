"""Parses tensor names into stems, and translates GGUF names to checkpoint names.

Source: the tensor naming convention of the GGUF specification. A checkpoint name is the transformers library's name
without its leading `model.`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

_KIND = re.compile(r"\.(?:weight|bias)\Z")
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,5})(?![^.])")

# Stems (octavo.models.WeightTable). An architecture that differs lists its names in the `names` of its table.
GGUF_STEMS: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "output": "lm_head",
        "blk.*.attn_norm": "layers.*.input_layernorm",
        "blk.*.attn_q": "layers.*.self_attn.q_proj",
        "blk.*.attn_k": "layers.*.self_attn.k_proj",
        "blk.*.attn_v": "layers.*.self_attn.v_proj",
        "blk.*.attn_qkv": "layers.*.self_attn.qkv_proj",
        "blk.*.attn_output": "layers.*.self_attn.o_proj",
        "blk.*.attn_q_norm": "layers.*.self_attn.q_norm",
        "blk.*.attn_k_norm": "layers.*.self_attn.k_norm",
        "blk.*.attn_sinks.weight": "layers.*.self_attn.sinks",
        "blk.*.ffn_norm": "layers.*.post_attention_layernorm",
        "blk.*.ffn_gate": "layers.*.mlp.gate_proj",
        "blk.*.ffn_up": "layers.*.mlp.up_proj",
        "blk.*.ffn_down": "layers.*.mlp.down_proj",
        "blk.*.ffn_gate_inp": "layers.*.mlp.gate",
        "blk.*.ffn_gate_exps": "layers.*.mlp.experts.gate_proj",
        "blk.*.ffn_up_exps": "layers.*.mlp.experts.up_proj",
        "blk.*.ffn_down_exps": "layers.*.mlp.experts.down_proj",
        # The head after the last layer that predicts a further token.
        "blk.*.nextn.eh_proj": "layers.*.eh_proj",
        "blk.*.nextn.enorm": "layers.*.enorm",
        "blk.*.nextn.hnorm": "layers.*.hnorm",
        "blk.*.nextn.embed_tokens": "layers.*.embed_tokens",
        "blk.*.nextn.shared_head_norm": "layers.*.shared_head.norm",
        "blk.*.nextn.shared_head_head": "layers.*.shared_head.head",
        # Mixtral's files from before April 2024.
        "blk.*.ffn_gate.*": "layers.*.mlp.experts.*.gate_proj",
        "blk.*.ffn_up.*": "layers.*.mlp.experts.*.up_proj",
        "blk.*.ffn_down.*": "layers.*.mlp.experts.*.down_proj",
    }
)

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that configure the rotary embedding; they are part of the configuration, not weights."""


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor name, split into stem, numbers and kind.

    For example, `layers.3.mlp.experts.7.up_proj.weight` has the stem `layers.*.mlp.experts.*.up_proj`, the numbers (3,
    7) and the kind `.weight`.

    kind: `.weight`, `.bias` or empty.
    """

    stem: str
    numbers: tuple[int, ...]
    kind: str

    @classmethod
    def parse(cls, name: str) -> TensorName:
        found = _KIND.search(name)
        kind = found[0] if found else ""
        stem = name.removesuffix(kind).replace("*", "?")  # a name that looks like a pattern is not one
        numbers = tuple(int(number) for number in _NUMBER.findall(stem))
        return cls(_NUMBER.sub("*", stem), numbers, kind)

    def with_stars(self, count: int) -> TensorName:
        """Return the same name with only the first `count` numbers replaced by stars."""
        if count == len(self.numbers):
            return self
        first, *parts = self.stem.split("*")
        marks = ["*" if i < count else str(number) for i, number in enumerate(self.numbers)]
        stem = first + "".join(mark + part for mark, part in zip(marks, parts, strict=True))
        return TensorName(stem, self.numbers[:count], self.kind)

    def __str__(self) -> str:
        parts = self.stem.split("*")
        return parts[0] + "".join(f"{n}{part}" for n, part in zip(self.numbers, parts[1:], strict=True)) + self.kind


def renamed(name: str, stems: Mapping[str, str]) -> str | None:
    """Translate the name of a weight or bias with a table of stems or whole names. Return None if it is not there.

    In the names of a table, stars stand for numbers. The last numbers of a name, or all of them, may be written out.
    """
    parsed = TensorName.parse(name)
    for count in range(len(parsed.numbers), -1, -1):
        if (found := _target(parsed.with_stars(count), stems)) is not None:
            return found
    return None


def _target(parsed: TensorName, stems: Mapping[str, str]) -> str | None:
    whole = stems.get(parsed.stem + parsed.kind)
    if parsed.kind and whole is not None:
        return str(replace(parsed, stem=whole, kind=""))
    target = stems.get(parsed.stem)
    if target is None or bool(_KIND.search(target)) == bool(parsed.kind):  # a name without a kind gets a whole name
        return None
    return str(replace(parsed, stem=target))
