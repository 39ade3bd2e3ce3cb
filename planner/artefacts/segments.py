"""The segments of a stage that are run again in its backward (`Stage.recomputed`)."""

from typing import NamedTuple

from planner.artefacts.graph import Graph, differentiated
from planner.artefacts.strategy import Stage, indices_of
from planner.support.memo import remembered


class Segment(NamedTuple):
    """A segment that is run again, by places of operators in its stage.

    Attributes:
        first: its first operator.
        end: the operator behind its last one.
        last: the last one with a backward, before which the segment is run again.
    """

    first: int
    end: int
    last: int


@remembered
def segments_of(stage: Stage, graph: Graph) -> tuple[Segment, ...]:
    """The segments of a stage, in their order, without those that have no backward."""
    if not stage.recomputed:
        return ()
    place = {name: i for i, name in enumerate(stage.operators)}
    with_backward = differentiated(graph)
    backward = [v in with_backward for v in indices_of(stage, graph)]
    found = []
    for some in stage.recomputed:
        first, end = place[some[0]], place[some[-1]] + 1
        places = [i for i in range(first, end) if backward[i]]
        if places:
            found.append(Segment(first, end, places[-1]))
    return tuple(found)
