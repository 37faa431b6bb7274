"""Environment variables that Octavo reads; no other module uses `os.environ`.

| variable             | meaning                                                                                  |
|----------------------|------------------------------------------------------------------------------------------|
| `OCTAVO_CACHE`       | folder of models and packed weights; default `$XDG_CACHE_HOME/octavo`, `~/.cache/octavo` |
| `OCTAVO_OFFLINE`     | 1: never touch the network (`HF_HUB_OFFLINE=1` means the same)                           |
| `OCTAVO_ISA`         | widest instruction set to use: `scalar`; on x86 `avx2`, `avx512`, `avx512vnni`, `amx`;   |
|                      | on ARM `neon`, `dotprod`, `i8mm`                                                         |
| `OCTAVO_NUM_THREADS` | compute threads; default: one per core available to this process                         |
| `OCTAVO_CLUSTER_TOKEN` | secret shared by the machines of `--nnodes`; with it, `octavo serve` reads variables of  |
|                      | launchers: `LWS_*`, `RANK` and `WORLD_SIZE`, `SLURM_*`, `MASTER_ADDR`, `MASTER_PORT`     |
| `NO_COLOR`           | set: no colours at the terminal                                                          |
| `OPENAI_API_KEY`     | key for the servers of `octavo compare --engine NAME=URL`                                |
"""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import UsageError

COMPLETION_VARIABLE = "_OCTAVO_COMPLETE"  # set by the script of `octavo --install-completion`
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_MAX_THREADS = 1024
_LEAST_TOKEN = 16
_MASTER_PORT = "29500"  # torch's
# Variables of launchers with one process per machine: number of machines, this one's index, the first one's address.
_LAUNCHERS = (
    ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"),
    ("WORLD_SIZE", "RANK", "MASTER_ADDR"),
    ("SLURM_NNODES", "SLURM_NODEID", "MASTER_ADDR"),
)
_INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "avx512vnni", "amx", "neon", "dotprod", "i8mm")


def user_path(path: str | os.PathLike[str]) -> Path:
    """Expand `~` or `~name` in a path. An unknown name is left as it is."""
    return Path(os.path.expanduser(path))


def cache_dir() -> Path:
    """Return the folder for downloaded models, which may not exist yet. An empty variable counts as unset."""
    if chosen := os.environ.get("OCTAVO_CACHE"):
        return user_path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def config_file() -> Path:
    """Return the user's own file of default options, which may not exist."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "octavo" / "config.toml"


def completion_instruction() -> str | None:
    """Return the instruction from a shell that is asking for completions, or None."""
    return os.environ.get(COMPLETION_VARIABLE)


def shell() -> str:
    """Return the name of the user's shell, or an empty string if unknown."""
    return Path(os.environ.get("SHELL", "")).name


def pack_cache_dir() -> Path:
    """Return the folder for packed weights, which may not exist yet."""
    return cache_dir() / "packed"


def wants_colour() -> bool:
    """Return False if `NO_COLOR` is set (https://no-color.org) or the terminal cannot display styles."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def is_offline() -> bool:
    """Return True if `OCTAVO_OFFLINE`, or the hub's own `HF_HUB_OFFLINE`, forbids network access."""
    return _flag("OCTAVO_OFFLINE") or _flag("HF_HUB_OFFLINE")


def keep_nccl_on_loopback() -> None:
    """Make NCCL listen only on loopback, unless the user has chosen a network for it."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def quiet_idle_blas_threads() -> None:
    """Make numpy's threads sleep soon after their work, unless the user chose otherwise. Call before importing numpy.

    By default they spin for 2^26 cycles, which slows down startup and native kernels on the same cores.
    """
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")  # 2^16 cycles


def keep_tokenizers_on_one_thread() -> None:
    """Make the tokenizers library encode on the calling thread, unless the user has chosen otherwise.

    Octavo gives it one text at a time. A panic on one of the library's own threads would print its message on the
    terminal.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def max_instruction_set() -> str | None:
    """Return the widest instruction set for native kernels, or None for no limit. Raises UsageError."""
    value = os.environ.get("OCTAVO_ISA", "").strip().lower()
    if not value:
        return None
    if value not in _INSTRUCTION_SETS:
        raise UsageError(f"OCTAVO_ISA is {value!r}; it must be one of {', '.join(_INSTRUCTION_SETS)}")
    return value


def num_threads() -> int:
    """Return the number of compute threads; 0 means one per core available to this process. Raises UsageError."""
    value = os.environ.get("OCTAVO_NUM_THREADS", "").strip()
    if not value:
        return 0
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= _MAX_THREADS:
        raise UsageError(f"OCTAVO_NUM_THREADS is {value!r}; it must be a number from 1 to {_MAX_THREADS}")
    return int(value)


def openai_api_key() -> str | None:
    """Return the API key for other servers, or None."""
    return os.environ.get("OPENAI_API_KEY") or None


def cluster_token() -> str:
    """Return the secret shared by the machines that run one engine. Raises UsageError if it is missing or too short."""
    token = os.environ.get("OCTAVO_CLUSTER_TOKEN", "")
    if len(token) < _LEAST_TOKEN:
        raise UsageError(
            f"nnodes needs OCTAVO_CLUSTER_TOKEN, the same secret of at least {_LEAST_TOKEN} characters on all "
            "machines; make one with: openssl rand -hex 16"
        )
    return token


def cluster_of_launcher() -> dict[str, int | str]:
    """Read nnodes, node_rank and master from the variables of LeaderWorkerSet, torch's launchers or Slurm, in that
    order.

    Returns an empty dict without OCTAVO_CLUSTER_TOKEN, because a job on several machines may run a separate engine on
    each. Raises UsageError.
    """
    found: dict[str, int | str] = {}
    launcher = next((names for names in _LAUNCHERS if os.environ.get(names[0])), None)
    if launcher is None or not os.environ.get("OCTAVO_CLUSTER_TOKEN"):
        return found
    for option, name in zip(("nnodes", "node_rank"), launcher[:2], strict=True):
        value = os.environ.get(name, "")
        if not value.isascii() or not value.isdigit():
            raise UsageError(
                f"{name} is {value!r} although {launcher[0]} is set; it must be a number: set it, or unset both"
            )
        found[option] = int(value)
    if host := os.environ.get(launcher[2]):
        port = os.environ.get("MASTER_PORT") or _MASTER_PORT
        found["master"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return found if found["nnodes"] != 1 else {}


def subprocess_environment(**changes: str) -> dict[str, str]:
    """Return a copy of this process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise UsageError(f"{name} is {value!r}; it must be 1 or 0")
