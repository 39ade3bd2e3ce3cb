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
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id

NAME = "gloo_tcp_loop"
"""What gloo calls these threads."""

NAMING_S = 1.0
"""Threads that have no name of their own by then never get one."""

_THREADS = Path("/proc/self/task")


@contextmanager
def patient_sockets() -> Iterator[None]:
    """A context in which groups are made whose threads for sockets take no core from others. Where
    there is no such policy, or no right to choose it, groups are as usual.
    """
    before = thread_names()
    yield
    for thread, name in _made_since(before).items():
        # A system may forbid it; a thread may have ended with its group.
        with suppress(PermissionError, ProcessLookupError):
            if name == NAME and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _made_since(before: Mapping[int, str]) -> Mapping[int, str]:
    """Names of the threads that were made since, by number. A thread begins with the name of the
    one that made it, and names itself when it first runs.
    """
    end_s, inherited = time.monotonic() + NAMING_S, thread_names().get(get_native_id())
    while True:
        made = {one: name for one, name in thread_names().items() if one not in before}
        if inherited not in made.values() or time.monotonic() > end_s:
            return made
        time.sleep(1e-3)


def thread_names() -> Mapping[int, str]:
    """The names of the threads of this process, by number; none where the system does not tell."""
    found = {}
    if hasattr(os, "SCHED_BATCH") and _THREADS.is_dir():
        for thread in _THREADS.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[int(thread.name)] = (thread / "comm").read_text().strip()
    return found
