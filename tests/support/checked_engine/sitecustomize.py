"""Python loads this automatically when a test puts its directory on the path: the engine then checks itself at each
step.

A step that loses blocks, sequences or rows fails, and the engine with it, which a `Witness` sees as a restart.
"""

from __future__ import annotations

import sys
from pathlib import Path

if any("octavo.core.main" in argument for argument in sys.orig_argv):
    sys.path.append(str(Path(__file__).parents[3]))
    from octavo.engine.engine import Engine
    from tests.support.integrity import check_integrity

    _finish = Engine.finish

    def _checked_finish(self: Engine) -> float:
        seconds = _finish(self)
        check_integrity(self.scheduler)
        return seconds

    Engine.finish = _checked_finish  # type: ignore[method-assign]
    sys.stderr.write("this engine checks its integrity\n")
