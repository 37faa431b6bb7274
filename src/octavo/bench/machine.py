"""Describes the machine that a measurement ran on."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

from octavo import __version__
from octavo.engine.loading.devices import backend_name
from octavo.engine.session import Session
from octavo.platform import processors


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that decide whether two measurements are comparable."""

    octavo: str
    python: str
    system: str
    processor: str
    num_cpus: int
    backend: str
    isa: str | None  # instruction set of the kernels; None if the backend has only one
    num_threads: int | None
    model: str
    architecture: str
    weight_bytes: int


def describe_machine(session: Session) -> Machine:
    """Describe the machine and the model of a session."""
    model = session.model()
    # Not every executor has instruction sets and threads of its own.
    executor: Any = model.executor
    isa = getattr(executor, "isa", None)
    return Machine(
        octavo=__version__,
        python=platform.python_version(),
        system=system(),
        processor=processor().get("model name", platform.machine()),
        num_cpus=len(processors.allowed_cpus()),
        backend=backend_name(session.config),
        isa=isa,
        num_threads=None if isa is None else executor.num_threads,
        model=model.name,
        architecture=model.architecture,
        weight_bytes=model.executor.weight_bytes,
    )


def system() -> str:
    """Return the operating system, such as `Linux 6.8.0 x86_64`."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def processor() -> dict[str, str]:
    """Return the system's description of the first processor, at least its name."""
    return processors.description() or {"model name": platform.processor() or platform.machine()}
