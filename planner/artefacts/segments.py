"""The segments of a stage that are run again in its backward (`Stage.recomputed`), and those whose
activations wait in the host's memory (`Stage.offloaded`).
"""

from collections.abc import Iterable
from typing import NamedTuple

from planner.artefacts.graph import Graph, differentiated
from planner.artefacts.strategy import Stage, indices_of
from planner.support.memo import remembered

LEAST_OFFLOADED_BYTES = 2**16
"""Smaller activations stay on the device: a copy takes some 15 us besides its bytes, over ten times
as long as these (34 us for 1 MiB, 91 us for 4 MiB, pinned, of an H100 SXM over PCIe 5, 2026-11).
"""


class Segment(NamedTuple):
    """A segment, by places of operators in its stage.

    Attributes:
        first: its first operator.
        end: the operator behind its last one.
        last: the last one with a backward, before which the segment is run again, or its
            activations have to be back.
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
    """The segments that a backward runs again, in their order, without those that have no backward
    themselves.
    """
    return _placed(stage, graph, stage.recomputed)


@remembered
def offloaded_of(stage: Stage, graph: Graph) -> tuple[Segment, ...]:
    """The segments whose activations wait in the host's memory, in the same way."""
    return _placed(stage, graph, stage.offloaded)


def _placed(stage: Stage, graph: Graph, segments: Iterable[tuple[str, ...]]) -> tuple[Segment, ...]:
    if not segments:
        return ()
    place = {name: i for i, name in enumerate(stage.operators)}
    with_backward = differentiated(graph)
    backward = [v in with_backward for v in indices_of(stage, graph)]
    found = []
    for some in segments:
        first, end = place[some[0]], place[some[-1]] + 1
        places = [i for i in range(first, end) if backward[i]]
        if places:
            again = {place[name] for name in some}
            kept = tuple(i for i in range(first, end) if i not in again)
            found.append(Segment(first, end, places[-1], kept))
    return tuple(found)
