"""Errors by the names that a request has for things."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.errors import UsageError


@contextmanager
def constraint_named(field: str) -> Iterator[None]:
    """UsageErrors about `structured_outputs` name the field of the request that the constraint came from."""
    try:
        yield
    except UsageError as error:
        param = error.param or ""
        if field == "structured_outputs" or param.partition(".")[0] != "structured_outputs":
            raise
        code = "invalid_json_schema" if param == "structured_outputs.json" else error.code
        raise UsageError(str(error).replace(param, field, 1), param=field, code=code) from None
