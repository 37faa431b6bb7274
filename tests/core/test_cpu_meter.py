"""The CPU meter: a sleeping process does not count as computing."""

from __future__ import annotations

import time

from octavo.core.liveness import cpu_meter


def test_only_what_uses_the_processor_computes() -> None:
    meter = cpu_meter()
    meter.sample()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert meter.sample()
    for _ in range(6):  # until the window holds nothing but sleep
        time.sleep(0.05)
        is_computing = meter.sample()
    assert not is_computing
