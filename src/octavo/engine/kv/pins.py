"""Blocks that are evicted last, until a given time. Each owner may pin a limited share."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterable

from octavo.engine.kv.block_pool import BlockPool

_OWNERS_SHARE, _SHARE = 4, 2  # a quarter of the blocks for one salt, half for all together


class Pins:
    """A pool's pinned keys by owner (salt). If an owner exceeds its share, its oldest pins are removed.

    Pinning changes only the order of eviction.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._keys: dict[str, OrderedDict[bytes, float]] = {}  # by owner, with end times
        self._count = 0
        self._next_end = math.inf  # no pin ends before

    def pin(self, owner: str, keys: Iterable[bytes], seconds: float) -> None:
        """Pin these keys, whether or not their blocks exist yet."""
        self.expire()
        now = time.monotonic()
        self._next_end = min(self._next_end, now + seconds)
        own = self._keys.setdefault(owner, OrderedDict())
        for key in keys:
            until = max(own.pop(key, 0.0), now + seconds)
            self._count += key not in self._pool.pinned
            own[key] = until
            self._pool.pin(key)
        size = self._pool.num_blocks
        while own and (len(own) > size // _OWNERS_SHARE or self._count > size // _SHARE):
            self._end(own, next(iter(own)))

    def expire(self) -> None:
        """Remove the pins that have expired."""
        now = time.monotonic()
        if now < self._next_end:
            return
        for owner, own in list(self._keys.items()):
            for key in [key for key, until in own.items() if until <= now]:
                self._end(own, key)
            if not own:
                del self._keys[owner]
        self._next_end = min((until for own in self._keys.values() for until in own.values()), default=math.inf)

    def _end(self, own: OrderedDict[bytes, float], key: bytes) -> None:
        del own[key]
        self._count -= 1
        self._pool.unpin(key)
