"""The backend's public functions, and a description of the kernels and threads it uses on this machine."""

from __future__ import annotations

import octavo.backends.cpu._native as _native
from octavo import env
from octavo.backends import BackendDescription
from octavo.backends.cpu.ceilings import rates as kernel_rates
from octavo.backends.cpu.compiler import (
    CompileOptions,
    compile,  # noqa: A004 - the backend protocol's name
    expected_paging,
    sizes,
)
from octavo.backends.cpu.executor import CpuExecutor
from octavo.backends.cpu.instruction_set import choose_isa
from octavo.backends.cpu.rank_group import join_group
from octavo.backends.cpu.threads import plan_threads
from octavo.backends.memory import host_memory as memory
from octavo.backends.rates import Rates
from octavo.errors import OctavoError

PAGES_WEIGHTS = True

__all__ = [
    "PAGES_WEIGHTS",
    "CompileOptions",
    "CpuExecutor",
    "choose_isa",
    "compile",
    "describe",
    "expected_paging",
    "join_group",
    "memory",
    "rates",
    "sizes",
]


def rates() -> Rates:
    """See `octavo.backends.split.Device`."""
    return kernel_rates(choose_isa(), plan_threads().count)


def describe() -> BackendDescription:
    """See `octavo.backends.Backend`."""
    threads = plan_threads()
    try:
        kernels, detected = choose_isa(), _native.detected_isa()
    except OctavoError as error:
        return BackendDescription("none", str(error), threads.count, threads.reasons, (str(error),))
    if kernels == detected:
        known = ", ".join(_native.known_isas())
        reason = f"the widest that the processor, the system and this build support (of {known})"
    else:
        cap = env.max_instruction_set()
        reason = f"limited by OCTAVO_ISA={cap}; the processor, the system and this build support {detected}"
    products = "bfloat16" if kernels == "amx" else "int8"
    return BackendDescription(kernels, reason, threads.count, threads.reasons, products=products)
