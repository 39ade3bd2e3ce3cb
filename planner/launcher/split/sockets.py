"""Threads of gloo that watch sockets, kept from taking the core of a thread that they wait for.

Each group of gloo has such a thread. When something has come while another thread of the group has
the lock of the connection, it does not wait: it asks the kernel again at once, and again, until the
lock is free (`Pair::handleEvents`). Where a process has a core of its own, as ranks on CPUs have,
it does so on the core that the owner of the lock needs. Having just been woken, it may take the
core from the owner, and the kernel gives it back at the end of a time slice: after 3 to 4 ms, in a
collective that takes 0.2 ms. On two cores Megatron-LM's split of a small GPT-2 ran 1.6 times as
fast without that, ZeRO-3 2.4 times (November 2026).

A thread of the policy SCHED_BATCH takes no core when it is woken. But what it does beside a
computation may begin some milliseconds later, so the group of pipelines, whose transfers go on
meanwhile, keeps the usual policy.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "gloo_tcp_loop"
"""What gloo calls these threads."""

_THREADS = Path("/proc/self/task")


@contextmanager
def patient_sockets() -> Iterator[None]:
    """A context in which groups are made whose threads for sockets take no core from others. Where
    there is no such policy, or no right to choose it, groups are as usual.
    """
    before = socket_threads()
    yield
    for thread in socket_threads() - before:
        # A system may forbid it; a thread may have ended with its group.
        with suppress(PermissionError, ProcessLookupError):
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def socket_threads() -> frozenset[int]:
    """The numbers of the threads of this process that watch gloo's sockets; none where the system
    does not tell.
    """
    found = set()
    if hasattr(os, "SCHED_BATCH") and _THREADS.is_dir():
        for thread in _THREADS.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                if (thread / "comm").read_text().strip() == NAME:
                    found.add(int(thread.name))
    return frozenset(found)
