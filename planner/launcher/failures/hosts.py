"""The hosts of a launch watch each other through the store.

Ranks of one host are ended by their parent. If a whole host is lost, or the network to it, no
connection is closed and nobody is told: gloo and nccl wait for half an hour. So the first rank of
each host counts up a number in the store, and looks at those of the others. A rank that fails
writes there why, for hosts that have no connection to it yet.

    beat/r    a number, or "ended" after the work is done, by the first rank r of a host
    failed    the message of the first rank that has failed
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from planner.launcher.failures.rank import report_and_exit
from planner.launcher.rendezvous import Store, common_store, generation
from planner.support.errors import PlannerError, Stopped

BEAT_S = 2.0
"""Interval of the numbers, in s."""
LOST_S = 22.0
"""Time without a new number after which a host is lost, in s."""
ENDED = "ended"


@dataclass(slots=True)
class HostHeartbeats:
    """What one host knows of the others.

    Attributes:
        store: with the numbers.
        prefix: of its keys.
        own: first rank of this host.
        others: names of the other hosts by their first rank.
    """

    store: Store
    prefix: str
    own: int
    others: Mapping[int, str]
    _beats: int = 0
    _seen: dict[int, str] = field(default_factory=dict)
    _silent_s: dict[int, float] = field(default_factory=dict)

    def exchange(self, passed_s: float) -> str | None:
        """Writes the own number and reads those of the others.

        Args:
            passed_s: since the last time, at most what this process itself was awake.

        Returns:
            Why the launch is over, if it is.

        Raises:
            RuntimeError: if the store cannot be reached.
        """
        self._beats += 1
        self.store.set(self._key(self.own), str(self._beats))
        failed = f"{self.prefix}/failed"
        if self.store.check([failed]):
            return self.store.get(failed).decode()
        for rank, name in self.others.items():
            key = self._key(rank)
            beat = self.store.get(key).decode() if self.store.check([key]) else ""
            fresh = beat != self._seen.get(rank, "")
            self._seen[rank] = beat
            # A host that has not begun yet is looked for by the handshake.
            quiet = not fresh and beat not in ("", ENDED)
            self._silent_s[rank] = self._silent_s.get(rank, 0.0) + passed_s if quiet else 0.0
            if self._silent_s[rank] > LOST_S:
                return lost(name, rank)
        return None

    def end(self) -> None:
        """Says that this host has done its work."""
        self.store.set(self._key(self.own), ENDED)

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/beat/{rank}"


def lost(name: str, rank: int) -> str:
    """The message where a host gives no sign of life.

    >>> lost("node2", 8)
    'host node2 (ranks from 8 on) no longer answers: it is down, or the network to it'
    """
    return f"host {name} (ranks from {rank} on) no longer answers: it is down, or the network to it"


@contextmanager
def hosts_watched(hosts: Mapping[int, str], rank: int) -> Iterator[None]:
    """Watches the other hosts meanwhile, on the first rank of each host; on all ranks, tells the
    other hosts of an error.

    Args:
        hosts: names of all hosts by their first rank.
        rank: of this process.
    """
    if len(hosts) < 2:
        yield
        return
    heartbeats = None
    if rank in hosts:
        heartbeats = HostHeartbeats(_own_connection(), generation(), rank, {
            first: name for first, name in hosts.items() if first != rank
        })  # fmt: skip
        threading.Thread(target=_watch, args=(heartbeats,), daemon=True).start()
    try:
        yield
    except PlannerError as error:
        if not isinstance(error, Stopped):
            _report_failure(rank, str(error))
        raise
    if heartbeats is not None:
        heartbeats.end()


def _report_failure(rank: int, message: str) -> None:
    """Tells the other hosts why this rank ends."""
    common_store().set(f"{generation()}/failed", f"rank {rank} has failed: {message}")


def _own_connection() -> Store:
    """A connection to the store for the thread: another one's calls may wait."""
    made = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
        timeout=timedelta(seconds=LOST_S), wait_for_workers=False,
    )  # fmt: skip
    return cast(Store, made)


def _watch(heartbeats: HostHeartbeats) -> None:
    """Exchanges numbers until this process ends. A second thread looks whether the store answers
    at all: a call to a host that is down waits for the system's own limits.
    """
    awake = [0.0]

    def judge() -> None:
        while awake[0] <= LOST_S:
            time.sleep(BEAT_S)
            awake[0] += BEAT_S
        report_and_exit("the host of rank 0 no longer answers: it is down, or the network to it")

    threading.Thread(target=judge, daemon=True).start()
    while True:
        time.sleep(BEAT_S)
        try:
            over = heartbeats.exchange(BEAT_S)
        except RuntimeError:  # its process has ended, and with it the launch
            over = "the host of rank 0 has ended"
        if over is not None:
            report_and_exit(over)
        awake[0] = 0.0
