"""Capacity that the server's API keys share. Half is reserved in equal parts, so that no key can take everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Shares:
    """Places, such as queue slots or bytes, and the tenants that hold them.

    limit: total number of places
    num_tenants: number of tenants with a reserved share, 0 for none
    """

    limit: int
    num_tenants: int
    taken: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.taken.total()

    def add(self, tenant: str, count: int) -> None:
        """Take places, or return them if `count` is negative."""
        self.taken[tenant] += count
        if not self.taken[tenant]:
            del self.taken[tenant]

    def open_to(self, tenant: str) -> int:
        """Return the number of free places that this tenant may take. Places reserved for other tenants are not
        included.
        """
        share = self.limit // (2 * self.num_tenants) if self.num_tenants > 1 else 0
        used = sum(min(count, share) for name, count in self.taken.items() if name != tenant)
        return self.limit - self.total - max(0, share * (self.num_tenants - 1) - used)
