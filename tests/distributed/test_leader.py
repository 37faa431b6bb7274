"""The leader's end of a rank: why it ended, and a leader that was stopped itself."""

from __future__ import annotations

import socket
import subprocess
import sys

from octavo.distributed.connection import Connection
from octavo.distributed.leader import Leader
from octavo.distributed.rank_messages import Joining, RankFailed
from octavo.errors import InsufficientMemoryError
from tests.support.waiting import wait_until


def test_the_reason_of_a_rank_comes_after_other_messages() -> None:
    """A rank that fails while the leader is busy, with a message that nobody has read yet."""
    ours, theirs = (Connection(sock) for sock in socket.socketpair())
    theirs.send(Joining())
    theirs.send(RankFailed("InsufficientMemoryError", "no room"))
    theirs.close()
    leader = Leader()
    leader.admit(1, ours)
    assert isinstance(wait_until(lambda: leader.failure), InsufficientMemoryError)
    assert str(leader.failure) == "no room"
    leader.close()


STOPPED = """
import os, signal, socket, subprocess, time
from octavo.distributed import leader as module
from octavo.distributed.connection import Connection
from octavo.distributed.rank_messages import Alive
module.SILENCE_S = 0.8
leaders = []
for _ in range(20):  # each with threads of its own, which wake up in any order
    ours, theirs = (Connection(sock) for sock in socket.socketpair())
    leader = module.Leader()
    leader.admit(1, ours)
    leader.watch()
    leaders.append((leader, theirs))
child = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {os.getpid()}; sleep 1.5; kill -CONT {os.getpid()}"])
end = time.monotonic() + 2.1
while time.monotonic() < end:
    for _, theirs in leaders:
        theirs.send(Alive())
    time.sleep(0.1)  # timed: signs of life at intervals, as ranks give them
child.wait()
print([str(leader.failure) for leader, _ in leaders if leader.failure])
"""


def test_a_leader_that_was_stopped_blames_no_rank() -> None:
    """Ctrl-Z and `fg`: its ranks, in a session of their own, have lived on."""
    found = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout == "[]\n"
