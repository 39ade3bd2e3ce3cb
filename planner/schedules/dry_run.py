"""Whether action lists run to their end: a run in which nothing takes time.

The devices of a mesh compute together: none ends a computation before all of them have begun it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from planner.artefacts.strategy import Strategy
from planner.schedules.actions import (
    ActionKind,
    Code,
    Compute,
    Direction,
    Program,
    decode,
    text,
)
from planner.schedules.dependencies import dependencies, tasks
from planner.schedules.rules import run
from planner.schedules.tasks import ContentionGroups, Dependencies, Paths, RunResult
from planner.support.arrays import Ints


def dry_run(lists: Program, meshes: Mapping[int, int] = {}) -> str | None:
    """Runs the lists without times: None if every action is reached, every transfer has both its
    ends, in the same order, and every all-reduce and every computation of a mesh all its members;
    else the reason for the block.

    Args:
        meshes: by stage, how many devices compute together; stages of one device are left out.
    """
    code, members = _with_meetings(lists.code, lists.members, meshes)
    known, nothing = dependencies(code), np.zeros(len(code))
    job = tasks(code, known, members, nothing, nothing)
    apart = ContentionGroups(np.full(len(code.devices), -1), np.zeros((0, 1)))
    result = run(job, _free_paths(len(known.source)), apart)
    if result.ended:
        return None
    return "; ".join(_what_blocks(code, known, result, len(lists.sums)))


def meshes_of(strategy: Strategy) -> Mapping[int, int]:
    """By stage, how many devices compute together, where these are several."""
    return {
        s: len(stage.groups[0])
        for s, stage in enumerate(strategy.stages)
        if stage.sharding is not None
    }


def _with_meetings(
    code: Code, members: Ints, meshes: Mapping[int, int]
) -> tuple[Code, Ints]:  # fmt: skip
    """The lists with a meeting behind each computation of a mesh, numbered as all-reduces behind
    those that there are, and how many devices come to each all-reduce and meeting. A meeting keeps
    the stage, microbatch and direction of its computation.
    """
    if not meshes:
        return code, members
    at = np.flatnonzero((code.kind == ActionKind.COMPUTE) & np.isin(code.stage, [*meshes]))
    turns = int(code.microbatch.max(initial=0)) + 1
    names = (code.stage[at] * turns + code.microbatch[at]) * 2 + code.backward[at]
    known, number = np.unique(names, return_inverse=True)
    sizes = np.array([meshes[name // 2 // turns] for name in known.tolist()], dtype=np.int64)

    def woven(column: Any, new: Any) -> Any:
        return np.insert(column, at + 1, new)

    with_meetings = replace(
        code,
        start=code.start + np.searchsorted(at, code.start),
        kind=woven(code.kind, ActionKind.ALL_REDUCE),
        backward=woven(code.backward, code.backward[at]),
        stage=woven(code.stage, code.stage[at]),
        microbatch=woven(code.microbatch, code.microbatch[at]),
        piece=woven(code.piece, len(members) + number),
        peer=woven(code.peer, 0),
    )
    return with_meetings, np.concatenate([members, sizes])


def _free_paths(num_pairs: int) -> Paths:
    """Ways on which transfers take no time."""
    none, no_bounds = np.zeros(0, dtype=np.int64), np.zeros(num_pairs + 1, dtype=np.int64)
    return Paths(
        latency_s=np.zeros(num_pairs), bytes_per_s=np.full(num_pairs, np.inf),
        first_place=no_bounds, place_gate=none, num_gates=0,
        first_hop=no_bounds, hop_link=none, link_bytes_per_s=np.zeros(0),
    )  # fmt: skip


def _what_blocks(
    code: Code, known: Dependencies, result: RunResult, num_sums: int
) -> Iterator[str]:
    """What is left over where a run has stopped. If a device sends something else than another one
    expects, only that, because all the rest may follow from it.

    Args:
        num_sums: all-reduces of that number and above are meetings.
    """
    unmet = {
        kind: [
            np.flatnonzero((code.kind == kind) & (known.pair == pair))[done:posted].tolist()
            if posted > done
            else []
            for pair, (done, posted) in enumerate(zip(result.done, count, strict=True))
        ]
        for kind, count in ((ActionKind.SEND, result.sent), (ActionKind.RECEIVE, result.posted))
    }
    owner = code.devices[code.owner()]

    def word(i: int) -> str:
        if code.kind[i] == ActionKind.ALL_REDUCE and code.piece[i] >= num_sums:
            direction = Direction.BACKWARD if code.backward[i] else Direction.FORWARD
            compute = Compute(direction, int(code.stage[i]), int(code.microbatch[i]))
            return f"{text(compute)} for other devices of its mesh"
        return text(decode(code, [i])[0])

    for sends, receives in zip(unmet[ActionKind.SEND], unmet[ActionKind.RECEIVE], strict=True):
        if sends and receives:
            a, b = sends[0], receives[0]
            yield f"device {owner[a]} sends {word(a)}, device {owner[b]} expects {word(b)}"
            return
    for d in np.flatnonzero(result.at < code.start[1:]):
        yield f"device {code.devices[d]} waits at {word(result.at[d])}"
    for i in chain.from_iterable(unmet[ActionKind.SEND]):
        yield f"device {owner[i]} sends {word(i)}, which device {code.peer[i]} never receives"
    for i in chain.from_iterable(unmet[ActionKind.RECEIVE]):
        yield f"device {owner[i]} expects {word(i)}, which device {code.peer[i]} never sends"
