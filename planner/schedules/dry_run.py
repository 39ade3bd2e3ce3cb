"""Whether action lists run to their end: a run in which nothing takes time."""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from planner.schedules.actions import Code, Kind, Program, decode, text
from planner.schedules.dependencies import Dependencies, dependencies, tasks
from planner.schedules.tasks import Crowds, Paths, RunResult


def dry_run(lists: Program) -> str | None:
    """Runs the lists without times: None if every action is reached, every transfer has both its
    ends, in the same order, and every all-reduce all its members; else the reason for the block.
    """
    from planner.schedules import rules_kernels as kernels

    code = lists.code
    known, nothing = dependencies(code), np.zeros(len(code))
    job = tasks(code, known, lists.members, nothing, nothing)
    apart = Crowds(np.full(len(code.devices), -1), np.zeros((0, 1)))
    result = kernels.run(job, _free_paths(len(known.source)), apart)
    return None if result.ended else "; ".join(_what_blocks(code, known, result))


def _free_paths(num_pairs: int) -> Paths:
    """Ways on which transfers take no time."""
    none, no_bounds = np.zeros(0, dtype=np.int64), np.zeros(num_pairs + 1, dtype=np.int64)
    return Paths(
        latency_s=np.zeros(num_pairs), bytes_per_s=np.full(num_pairs, np.inf),
        first_place=no_bounds, place_gate=none, num_gates=0,
        first_hop=no_bounds, hop_link=none, link_bytes_per_s=np.zeros(0),
    )  # fmt: skip


def _what_blocks(code: Code, known: Dependencies, result: RunResult) -> Iterator[str]:
    """What is left over where a run has stopped. If a device sends something else than another one
    expects, only that, because all the rest may follow from it.
    """
    unmet = {
        kind: [
            np.flatnonzero((code.kind == kind) & (known.pair == pair))[done:posted].tolist()
            if posted > done
            else []
            for pair, (done, posted) in enumerate(zip(result.done, count, strict=True))
        ]
        for kind, count in ((Kind.SEND, result.sent), (Kind.RECEIVE, result.posted))
    }
    owner = code.devices[code.owner()]

    def word(i: int) -> str:
        return text(decode(code, [i])[0])

    for sends, receives in zip(unmet[Kind.SEND], unmet[Kind.RECEIVE], strict=True):
        if sends and receives:
            a, b = sends[0], receives[0]
            yield f"device {owner[a]} sends {word(a)}, device {owner[b]} expects {word(b)}"
            return
    for d in np.flatnonzero(result.at < code.start[1:]):
        yield f"device {code.devices[d]} waits at {word(result.at[d])}"
    for i in chain.from_iterable(unmet[Kind.SEND]):
        yield f"device {owner[i]} sends {word(i)}, which device {code.peer[i]} never receives"
    for i in chain.from_iterable(unmet[Kind.RECEIVE]):
        yield f"device {owner[i]} expects {word(i)}, which device {code.peer[i]} never sends"
