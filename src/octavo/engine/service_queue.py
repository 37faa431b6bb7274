"""Waiting and running groups of sequences in their order of service."""

from __future__ import annotations

import heapq
from bisect import insort

from octavo.engine.request import RequestStatus, Sequence, SequenceGroup


class ServiceQueue:
    """The waiting and running groups of one kind of step, with the number of occupied seats."""

    def __init__(self) -> None:
        self.running: list[SequenceGroup] = []  # in order of service
        self.num_seats_taken = 0
        self._heap: list[tuple[tuple[int, int, int], SequenceGroup]] = []  # those not in _waiting are skipped
        self._waiting: set[SequenceGroup] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def sequences(self) -> list[Sequence]:
        """The running sequences, in order of service."""
        return [member for group in self.running for member in group.members]

    def first_waiting(self) -> SequenceGroup | None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def wait(self, group: SequenceGroup) -> None:
        heapq.heappush(self._heap, (group.key, group))
        self._waiting.add(group)

    def enter(self, group: SequenceGroup) -> None:
        """Moves a group to the running ones."""
        self._waiting.discard(group)
        self.num_seats_taken += group.request.num_seats
        insort(self.running, group, key=_key)
        for member in group.members:
            member.status = RequestStatus.RUNNING

    def leave(self, group: SequenceGroup, status: RequestStatus) -> None:
        """Removes a group."""
        if group.status is RequestStatus.RUNNING:
            self.running.remove(group)
            self.num_seats_taken -= group.request.num_seats
        self._waiting.discard(group)
        for member in group.members:
            member.status = status

    def check_integrity(self) -> None:
        """Raises AssertionError if seats are lost or the order is wrong."""
        if self.num_seats_taken != sum(group.request.num_seats for group in self.running):
            raise AssertionError(f"{self.num_seats_taken} seats are taken by {len(self.running)} groups")
        if self.running != sorted(self.running, key=_key):
            raise AssertionError("running groups are out of order")


def _key(group: SequenceGroup) -> tuple[int, int, int]:
    return group.key
