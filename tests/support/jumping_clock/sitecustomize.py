"""Python loads this automatically when a test puts its directory on the path: the time of day then jumps by two hours.

It alternates between an hour ahead and an hour behind at each reading. Monotonic clocks stay correct.
"""

from __future__ import annotations

import itertools
import time

_time = time.time
_jumps = itertools.cycle((3600.0, -3600.0))

time.time = lambda: _time() + next(_jumps)
