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
        kept: those that are not computed again: what they made is held from the forward on.
    """

    first: int
    end: int
    last: int
    kept: tuple[int, ...] = ()

    @property
    def computed(self) -> tuple[int, ...]:
        """The operators that are computed again."""
        return tuple(i for i in range(self.first, self.end) if i not in self.kept)


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
            again = {place[name] for name in some}
            kept = tuple(i for i in range(first, end) if i not in again)
            found.append(Segment(first, end, places[-1], kept))
    return tuple(found)
