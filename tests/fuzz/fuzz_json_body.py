"""Coverage-guided fuzzing of request bodies with atheris; `docs/fuzzing.md` has the command.

An input is a body. Read in pieces, as a large one is, it has the same value as read at once, or both refuse it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import atheris

with atheris.instrument_imports(include=["octavo.server.http"]):
    from octavo.server.http import json_pieces
    from octavo.server.http.json_body import parse_object

from octavo.server.errors import ApiError
from octavo.server.http.body_limits import BodyLimits
from tests.fuzz.target import run

json_pieces.PIECE_BYTES = 16  # so that short bodies have pieces
LIMITS = BodyLimits([{}], {})
SEEDS = {
    "chat": {"messages": [{"role": "user", "content": "a" * 40}], "logit_bias": {str(i): i for i in range(9)}},
    "numbers": {"a": [1, -2.5e3, 0.1, 1e400, True, False, None], "b": [[], [[]], {}]},
    "texts": {'\u00e9\\"': "\U0001f600\n" * 5, "": [" ", "\\", "/"]},
}


def read(content: bytes) -> None:
    whole = outcome(parse_object, content)
    pieces = outcome(lambda body: json_pieces.parse_large_object(body, LIMITS), content)
    if whole != pieces:
        raise AssertionError(f"at once {whole:.500}, in pieces {pieces:.500}")


def outcome(parse: Callable[[bytes], object], content: bytes) -> str:
    try:
        return repr(parse(content))
    except ApiError as error:
        if error.status not in (400, 413):
            raise
        return "refused"


def seeds() -> dict[str, bytes]:
    """Each value of `SEEDS` in a compact form and in a wide one."""
    compact = {name: json.dumps(value).encode() for name, value in SEEDS.items()}
    wide = {
        f"{name}-wide": json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace")
        for name, value in SEEDS.items()
    }
    return compact | wide


if __name__ == "__main__":
    run(read, seeds())
