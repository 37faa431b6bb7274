"""Coverage-guided fuzzing of the reader of image headers with atheris; `docs/fuzzing.md` has the command.

An input is a whole file. Its header must give a size, or end in a UsageError with its code; anything else is a finding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["octavo.media.headers"]):
    from octavo.media import headers  # noqa: F401  (the import that is instrumented)

from tests.support.pictures import check_header, files


def main() -> None:
    """`--seeds DIR` writes the first corpus; else the arguments are libFuzzer's."""
    if sys.argv[1:2] == ["--seeds"]:
        directory = Path(sys.argv[2])
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files().items():
            (directory / name.replace(" ", "-")).write_bytes(content)
        return
    atheris.Setup(sys.argv, check_header)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
