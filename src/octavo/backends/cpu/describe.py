"""A description of the machine for the CPU backend: kernels and threads, with the reasons."""

from __future__ import annotations

from octavo import env
from octavo.backends import BackendDescription
from octavo.backends.cpu import _native
from octavo.backends.cpu.compile import choose_isa
from octavo.backends.cpu.threads import plan_threads
from octavo.errors import OctavoError


def describe() -> BackendDescription:
    """See `octavo.backends.Backend`."""
    threads = plan_threads()
    try:
        kernels, detected = choose_isa(), _native.detected_isa()
    except OctavoError as error:
        return BackendDescription("none", str(error), threads.count, threads.reasons, (str(error),))
    if kernels == detected:
        reason = f"the widest that processor, system and this build support (of {', '.join(_native.known_isas())})"
    else:
        cap = env.max_instruction_set()
        reason = f"limited by OCTAVO_ISA={cap}; processor, system and this build support {detected}"
    return BackendDescription(kernels, reason, threads.count, threads.reasons)
