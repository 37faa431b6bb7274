"""Changes of JSON texts that stay JSON, for fuzzers whose readers refuse all else at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import atheris

_MAX_NAMES = 8  # of one container, so that long vocabularies do not hide what is around them


def json_mutator(values: Sequence[object]) -> Callable[[bytes, int, int], bytes]:
    """A mutator for `atheris.Setup`: half of the time libFuzzer's own changes, else one or two places of the value get
    one of `values` or what another place holds."""

    def mutate(content: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        try:
            whole = json.loads(content)
        except (ValueError, RecursionError):
            whole = None
        if seed % 2 or not whole or not isinstance(whole, (dict, list)):
            return bytes(atheris.Mutate(content, max_size))
        places = _places(whole, rng)
        for _ in range(rng.choice((1, 1, 2))):
            item, name = rng.choice(places)
            other, place = rng.choice(places)
            item[name] = rng.choice(values) if rng.random() < 0.7 else json.loads(json.dumps(other[place]))
        return json.dumps(whole).encode()[:max_size]

    return mutate


def _places(whole: Any, rng: random.Random) -> list[tuple[Any, Any]]:
    """(container, name or index) of values everywhere in it."""
    places: list[tuple[Any, Any]] = []
    stack = [whole]
    while stack:
        item = stack.pop()
        if isinstance(item, (dict, list)) and item:
            names: list[Any] = list(item) if isinstance(item, dict) else list(range(len(item)))
            stack += [item[name] for name in names]
            places += [(item, name) for name in rng.sample(names, min(len(names), _MAX_NAMES))]
    return places
