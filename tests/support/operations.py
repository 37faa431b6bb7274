"""All operations of `octavo.graph.ops`, discovered automatically."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import octavo.graph.ops
from octavo.graph.ops.base import Op


def operations() -> list[type[Op]]:
    """Return every operation that a graph can have, in the order of modules and lines."""
    found: list[type[Op]] = []
    for each in pkgutil.iter_modules(octavo.graph.ops.__path__):
        module = importlib.import_module(f"octavo.graph.ops.{each.name}")
        own = (cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__)
        found += [cls for cls in own if issubclass(cls, Op) and not inspect.isabstract(cls)]
    return found
