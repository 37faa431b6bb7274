"""Python loads this automatically when a test puts its directory on the path: ranks then see the test's NUMA nodes.

OCTAVO_TEST_NODES is a directory like /sys/devices/system/node.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if "OCTAVO_TEST_NODES" in os.environ and any("octavo.engine.ranks.rank_process" in each for each in sys.orig_argv):
    from octavo.platform import numa

    numa.NODES = Path(os.environ["OCTAVO_TEST_NODES"])
