"""The rules of action lists, for lists of any kind (`event_loop.py` says them)."""

from itertools import pairwise

import numpy as np

from planner.schedules.actions import ActionKind
from planner.schedules.tasks import ContentionGroups, Paths, RunResult, Tasks

_MEETINGS = (ActionKind.SEND, ActionKind.RECEIVE, ActionKind.ALL_REDUCE)


def run(tasks: Tasks, paths: Paths, contention: ContentionGroups) -> RunResult:
    """Runs lists until nothing more happens.

    On devices that never meet, the times are sums. This is so for every plan on one device, and
    spares it numba: a second for loading the compiled rules.
    """
    if not np.isin(tasks.kind, _MEETINGS).any() and (contention.group < 0).all():
        return _one_after_the_other(tasks)
    from planner.schedules import event_loop as kernels

    return kernels.run(tasks, paths, contention)


def _one_after_the_other(tasks: Tasks) -> RunResult:
    """The result for lists of computations and steps alone."""
    start_s, end_s = np.zeros(len(tasks.kind)), np.zeros(len(tasks.kind))
    for begin, end in pairwise(tasks.start.tolist()):
        end_s[begin:end] = np.cumsum(tasks.duration_s[begin:end])
        start_s[begin + 1 : end] = end_s[begin : end - 1]
    none, never = np.zeros(len(tasks.known.source), np.int64), np.zeros(len(tasks.kind))
    return RunResult(True, tasks.start[1:], none, none, none, start_s, end_s, never, never)
