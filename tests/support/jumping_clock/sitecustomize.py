"""Python loads this by itself where a test puts its directory on the path: the time of day then jumps by two hours.

One hour ahead, one hour behind, and so on with each look; the clocks that only run forward stay right.
"""

from __future__ import annotations

import itertools
import time

_time = time.time
_jumps = itertools.cycle((3600.0, -3600.0))

time.time = lambda: _time() + next(_jumps)
