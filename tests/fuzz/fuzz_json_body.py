"""Coverage-guided fuzzing of request bodies with atheris; `docs/fuzzing.md` has the command.

An input is a body. Read in pieces, as a large one is, it has the same value as read at once, or both refuse it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["octavo.server.http"]):
    from octavo.server.http import json_pieces
    from octavo.server.http.json_body import parse_object

from octavo.server.errors import ApiError
from octavo.server.http.body_limits import BodyLimits

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


def main() -> None:
    """`--seeds DIR` writes the first corpus; else the arguments are libFuzzer's."""
    if sys.argv[1:2] == ["--seeds"]:
        directory = Path(sys.argv[2])
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in SEEDS.items():
            (directory / name).write_text(json.dumps(value))
            (directory / f"{name}-wide").write_bytes(
                json.dumps(value, indent=1, ensure_ascii=False).encode("utf-8", "replace")
            )
        return
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
