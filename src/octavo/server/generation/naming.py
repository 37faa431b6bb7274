"""Renames fields in errors to the names that the request uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.errors import UsageError


@contextmanager
def constraint_named(field: str) -> Iterator[None]:
    """Makes UsageErrors about `structured_outputs` name the request's own field for the constraint."""
    try:
        yield
    except UsageError as error:
        param = error.param or ""
        if field == "structured_outputs" or param.partition(".")[0] != "structured_outputs":
            raise
        code = "invalid_json_schema" if param == "structured_outputs.json" else error.code
        raise UsageError(str(error).replace(param, field, 1), param=field, code=code) from None
