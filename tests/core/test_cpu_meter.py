"""The CPU meter: a sleeping process does not count as computing."""

from __future__ import annotations

import time

from octavo.core.liveness import cpu_meter
from tests.support.waiting import wait_until


def test_only_what_uses_the_processor_computes() -> None:
    meter = cpu_meter()
    meter.sample()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert meter.sample()
    wait_until(lambda: not meter.sample())  # when the window holds nothing but sleep
