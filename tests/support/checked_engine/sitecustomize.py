"""Python loads this by itself where a test puts its directory on the path: the engine then checks itself at each step.

A step that loses blocks, seats or rows fails, and the engine with it, which a `Witness` sees as a restart.
"""

from __future__ import annotations

import sys

if any("octavo.core.main" in argument for argument in sys.orig_argv):
    from octavo.engine.engine import Engine

    _step = Engine.step

    def _checked_step(self: Engine) -> list:  # type: ignore[type-arg]
        outputs = _step(self)
        if not self._pooling:  # whose blocks the scheduler does not know
            self.scheduler.check_integrity()
        return outputs

    Engine.step = _checked_step  # type: ignore[method-assign]
    sys.stderr.write("this engine checks its integrity\n")
