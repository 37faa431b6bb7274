"""The choice of the kernels' instruction set among those that this machine and this build support."""

from __future__ import annotations

import octavo.backends.cpu._native as _native
from octavo import env
from octavo.errors import UsageError


def choose_isa(isa: str | None = None) -> str:
    """Choose the kernels' instruction set: `isa`, else OCTAVO_ISA, but never more than the machine supports.

    Raises UsageError for an unknown one.
    """
    known = _native.known_isas()
    cap = isa or env.max_instruction_set() or known[-1]
    if cap not in known:
        raise UsageError(f"instruction set {cap!r} is unknown; use one of {', '.join(known)}")
    return min(cap, _native.detected_isa(), key=known.index)
