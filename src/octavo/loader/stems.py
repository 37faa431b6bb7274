"""Parses names of tensors into a stem with `*` for every number, the numbers, and the kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

_KIND = re.compile(r"\.(?:weight|bias)\Z")
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,5})(?![^.])")


@dataclass(frozen=True, slots=True)
class TensorName:
    """`layers.3.mlp.experts.7.up_proj.weight` is `layers.*.mlp.experts.*.up_proj`, (3, 7), `.weight`.

    kind: `.weight`, `.bias` or nothing.
    """

    stem: str
    numbers: tuple[int, ...]
    kind: str

    @classmethod
    def parse(cls, name: str) -> TensorName:
        found = _KIND.search(name)
        kind = found[0] if found else ""
        stem = name.removesuffix(kind).replace("*", "?")  # a name that looks like a pattern is none
        numbers = tuple(int(number) for number in _NUMBER.findall(stem))
        return cls(_NUMBER.sub("*", stem), numbers, kind)

    def __str__(self) -> str:
        parts = self.stem.split("*")
        return parts[0] + "".join(f"{n}{part}" for n, part in zip(self.numbers, parts[1:], strict=True)) + self.kind


def renamed(name: str, stems: Mapping[str, str]) -> str | None:
    """The name of a weight or bias by a table of stems; None if the table lacks it."""
    parsed = TensorName.parse(name)
    if parsed.stem not in stems or not parsed.kind:
        return None
    return str(replace(parsed, stem=stems[parsed.stem]))
