"""Whether action lists run to their end: a run in which nothing takes time."""

from collections.abc import Iterator

import numpy as np

from planner.schedules.actions import Code, Kind, Program, decode, text
from planner.schedules.dependencies import Dependencies, Outcome, Paths, dependencies, tasks


def dry_run(lists: Program) -> str | None:
    """Runs the lists without times: None if every action is reached, every transfer has both its
    ends, in the same order, and every all-reduce all its members; else what blocks.
    """
    from planner.schedules import rules_kernels as kernels

    code = lists.code
    known, nothing = dependencies(code), np.zeros(len(code))
    job = tasks(code, known, lists.members, nothing, nothing)
    outcome = kernels.run(job, _free_paths(len(known.source)))
    return None if outcome.ended else "; ".join(_what_blocks(code, known, outcome))


def _free_paths(num_pairs: int) -> Paths:
    """Ways on which transfers take no time."""
    none, no_bounds = np.zeros(0, dtype=np.int64), np.zeros(num_pairs + 1, dtype=np.int64)
    return Paths(
        latency_s=np.zeros(num_pairs), bytes_per_s=np.full(num_pairs, np.inf),
        first_place=no_bounds, place_gate=none, num_gates=0,
        first_hop=no_bounds, hop_link=none, link_bytes_per_s=np.zeros(0),
    )  # fmt: skip


def _what_blocks(code: Code, known: Dependencies, outcome: Outcome) -> Iterator[str]:
    """What is left over where a run has stopped; if devices disagree on a transfer, only that."""
    sends, receives = (
        [
            np.flatnonzero((code.kind == kind) & (known.pair == pair))[done:posted]
            for pair, (done, posted) in enumerate(
                zip(outcome.done.tolist(), count.tolist(), strict=True)
            )
        ]
        for kind, count in ((Kind.SEND, outcome.sent), (Kind.RECEIVE, outcome.posted))
    )
    owner = code.devices[code.owner()]
    for sent, posted in zip(sends, receives, strict=True):
        if len(sent) and len(posted):
            a, b = sent[0], posted[0]
            yield (
                f"device {owner[a]} sends {_word(code, a)},"
                f" device {owner[b]} expects {_word(code, b)}"
            )
            return
    for d in np.flatnonzero(outcome.at < code.start[1:]).tolist():
        yield f"device {code.devices[d]} waits at {_word(code, outcome.at[d])}"
    for i in (i for sent in sends for i in sent.tolist()):
        yield f"device {owner[i]} sends {_word(code, i)}, which device {code.peer[i]} never receives"
    for i in (i for posted in receives for i in posted.tolist()):
        yield f"device {owner[i]} expects {_word(code, i)}, which device {code.peer[i]} never sends"


def _word(code: Code, i: int) -> str:
    """An action in text form."""
    return text(decode(code, [i])[0])
