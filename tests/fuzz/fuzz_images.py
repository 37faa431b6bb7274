"""Coverage-guided fuzzing of the reader of image headers with atheris; `docs/fuzzing.md` has the command.

An input is a whole file. Its header must give a size, or end in a UsageError with its code; anything else is a finding.
"""

from __future__ import annotations

import atheris

with atheris.instrument_imports(include=["octavo.media.headers"]):
    from octavo.media import headers  # noqa: F401  (the import that is instrumented)

from tests.fuzz.target import run
from tests.support.pictures import check_header, files

if __name__ == "__main__":
    run(check_header, {name.replace(" ", "-"): content for name, content in files().items()})
