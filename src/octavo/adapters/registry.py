"""The adapters of an engine: known by name, held in memory, and placed in slots for steps."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo import env
from octavo.adapters.adapter import Adapter, AdapterBase
from octavo.adapters.read import Stamps, read_adapter, stamps_of
from octavo.backends import AdaptingExecutor
from octavo.errors import UsageError
from octavo.graph.ops.low_rank import AdapterLimits
from octavo.platform.background_work import in_background

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """The location of an adapter.

    scale: multiplies its effect.
    stamps: its files' stamps when it was read (`stamps_of`).
    """

    path: Path
    scale: float
    stamps: Stamps


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """An adapter in memory. A running request keeps it, even if its name is removed or replaced.

    prepared: the factors in the executor's layout.
    slot: the slot that steps read, or -1 for none.
    num_users: the number of groups that run with it.
    """

    adapter: Adapter
    prepared: object
    slot: int = -1
    num_users: int = 0


class AdapterRegistry:
    """Adapters by name. They are read on the callers' threads, so that steps can continue meanwhile.

    Names and held adapters may be used from any thread; the slots belong to the engine's thread.
    """

    def __init__(
        self, base: AdapterBase, executor: AdaptingExecutor, limits: AdapterLimits, max_held: int, max_bytes: int
    ) -> None:
        """max_held, max_bytes: limits for the adapters in memory. The least recently used are dropped first, but
        never one in use.
        """
        self._base, self._executor, self.limits = base, executor, limits
        self._max_held, self._max_bytes = max_held, max_bytes
        self._sources: dict[str, AdapterSource] = {}
        self._held: OrderedDict[str, HeldAdapter] = OrderedDict()  # by name, the last used at the end
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._slots: list[HeldAdapter | None] = [None] * limits.slots
        self._last_use: list[int] = [0] * limits.slots
        self._num_uses = 0
        self.steps_run: Callable[[], bool] = lambda: False  # reading pauses between pieces while steps run
        self.default = ""  # for requests that name none; empty for the base model

    # --- names, from any thread ---

    @property
    def sources(self) -> dict[str, AdapterSource]:
        """The known adapters by name."""
        with self._lock:
            return dict(self._sources)

    def add(self, name: str, path: str | Path, scale: float = 1.0) -> HeldAdapter:
        """Read an adapter and add it, replacing one of the same name. If its files are unchanged, it is not read again.

        Raises ModelLoadError naming the tensor or key, GraphError for a rank above the limit, and UsageError.
        """
        if not name or "/" in name or "\\" in name:
            raise UsageError(f"an adapter's name is {name!r:.80}; it must be a word without slashes", param="adapter")
        path = env.user_path(path)
        with self._reading:
            source = AdapterSource(path, scale, stamps_of(path))
            with self._lock:
                held = self._held.get(name) if self._sources.get(name) == source else None
            if held is None:
                with in_background(self.steps_run):
                    held = self._read(name, source)
            with self._lock:
                self._sources[name] = source
                self._keep(name, held)
        return held

    def remove(self, name: str) -> None:
        """Forget an adapter. Requests that run with it continue unchanged. Raises UsageError for an unknown name."""
        with self._lock:
            if self._sources.pop(name, None) is None:
                raise self._unknown(name)
            self._held.pop(name, None)

    def get(self, name: str) -> HeldAdapter:
        """Return an adapter from memory, reading it first if needed. Raises UsageError, or the errors of `add`."""
        with self._lock:
            source, held = self._sources.get(name), self._held.get(name)
            if source is None:
                raise self._unknown(name)
            if held is not None:
                self._held.move_to_end(name)
                return held
        return self.add(name, source.path, source.scale)

    def _unknown(self, name: str) -> UsageError:
        known = ", ".join(sorted(self._sources)[:10]) or "none"
        return UsageError(
            f"there is no adapter {name!r:.80}; this engine has {known}", param="adapter", code="adapter_not_found"
        )

    def _read(self, name: str, source: AdapterSource) -> HeldAdapter:
        adapter = read_adapter(source.path, self._base, name, source.scale)
        if adapter.rank > self.limits.rank:
            raise UsageError(
                f"{source.path}: rank {adapter.rank} is above max_lora_rank {self.limits.rank}; raise it",
                param="max_lora_rank",
            )
        with self._lock:
            same = next((held for held in self._held.values() if held.adapter.digest == adapter.digest), None)
        if same is not None:
            return same
        return HeldAdapter(adapter, self._executor.prepare_adapter(adapter.parts))

    def _keep(self, name: str, held: HeldAdapter) -> None:
        """Hold an adapter as the most recently used one, and drop those that exceed the limits.

        Call it with the lock held.
        """
        self._held[name] = held
        self._held.move_to_end(name)
        while len(self._held) > 1:
            num_bytes = sum(each.adapter.nbytes for each in set(self._held.values()))
            if len(self._held) <= self._max_held and num_bytes <= self._max_bytes:
                return
            dropped, _ = self._held.popitem(last=False)
            logger.info("adapter %s is removed from memory; its next request reads it again", dropped)

    # --- slots, on the engine's thread ---

    def may_run(self, held: HeldAdapter) -> bool:
        """True if the adapter is in a slot, or if a slot is free or holds an adapter that no running group uses."""
        return held.slot >= 0 or any(each is None or not each.num_users for each in self._slots)

    def enter(self, held: HeldAdapter) -> None:
        """Record that a group begins to run with an adapter, given that `may_run` is true.

        If the adapter is in no slot, it is loaded into the slot that has been unused for longest.
        """
        self._num_uses += 1
        if held.slot < 0:
            free = [i for i, each in enumerate(self._slots) if each is None or not each.num_users]
            slot = min(free, key=self._last_use.__getitem__)
            before = self._slots[slot]
            if before is not None:
                before.slot = -1
            self._slots[slot] = None
            self._executor.load_adapter(slot, held.prepared)
            self._slots[slot], held.slot = held, slot
        self._last_use[held.slot] = self._num_uses
        held.num_users += 1

    def leave(self, held: HeldAdapter) -> None:
        """Record that a group ends or is preempted. The adapter stays in its slot until another one needs it."""
        held.num_users -= 1
