"""Blocks of a stage whose forwards may run again in the backward, and when what is held is there.

A block is a layer (`solvers/segments.py`). It is kept, or runs again, whole or but for selected
operators. From that follows the *mode* of each of its operators.

*Moments.* A backward goes from the last block to the first one. At moment t, the backward of block
t begins, which has run again before if it does; moment B, of B blocks, is the end of the forward.
So what the blocks up to t hold from the forward on is there at moment t, and what block t alone has
made again. Of operators in no block all is kept: until the backward of the block before them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from planner.artefacts.graph import Graph, differentiated, producers
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Stage, operator_indices
from planner.solvers.segments import Again, in_order, recompute_choices, segments_by_worth


class Mode(IntEnum):
    """What becomes of an operator in a backward."""

    KEPT = 0
    """What it keeps is there from the forward on."""
    HELD = 1
    """Its block runs again, and reads anew what it converts; what the operator made is held."""
    AGAIN = 2

    @property
    def in_segment(self) -> bool:
        """Whether its block runs again."""
        return self is not Mode.KEPT


@dataclass(frozen=True, slots=True)
class Block:
    """Operators one behind the other.

    Attributes:
        first: the first one, by index in the graph.
        end: the one behind the last.
        segments: per state, the names of the operators that run again; () where it is kept.
    """

    first: int
    end: int
    segments: tuple[tuple[str, ...], ...]

    def modes(self, name: str) -> tuple[Mode, ...]:
        """Per state, what becomes of an operator of the block."""
        return tuple(
            Mode.KEPT if not some else Mode.AGAIN if name in some else Mode.HELD
            for some in self.segments
        )

    @property
    def may_be_kept(self) -> bool:
        """Whether it may be kept."""
        return () in self.segments


def blocks_of(problem: Problem) -> tuple[tuple[Block, ...], ...]:
    """The blocks of all operators as one stage, with two states at most: kept and selected, and
    where that is not enough, selected and whole, as far as the options let them. None if nothing
    may run again.
    """
    choices = recompute_choices(problem)
    states = [one for one in (Again.NOTHING, Again.SELECTED, Again.LAYERS) if one in choices]
    if not any(one.reruns for one in states):
        return ()
    every = [_blocks(problem, some) for some in pairwise(states)]
    return tuple(some for some in every or [_blocks(problem, states)] if some)


def _blocks(problem: Problem, states: Sequence[Again]) -> tuple[Block, ...]:
    """The blocks with some states."""
    graph = problem.profile.graph
    names, place = tuple(one.name for one in graph.operators), operator_indices(graph)
    stage = Stage.whole(names, (0,), warmup=1, recompute=False)
    layers, *others = (
        in_order(stage, segments_by_worth(problem.profile, stage, one) if one.reruns else ())
        for one in (Again.LAYERS, *states)
    )
    found = []
    for k, whole in enumerate(layers):
        first, end = place[whole[0]], place[whole[-1]] + 1
        some = dict.fromkeys(one[k] if one else () for one in others)
        if not differentiated(graph).isdisjoint(range(first, end)):
            found.append(Block(first, end, tuple(some)))
    return tuple(found)


class Blocks:
    """The blocks of a graph.

    Args:
        blocks: one behind the other.

    Attributes:
        last: B, the moment at which a forward ends.
    """

    def __init__(self, graph: Graph, blocks: Sequence[Block]) -> None:
        self.every, self.last = tuple(blocks), len(blocks)
        self._first = [one.first for one in blocks]
        self._graph = graph
        self._names = [one.name for one in graph.operators]

    def of(self, v: int) -> int | None:
        """The block of an operator; None where it is in none."""
        k = bisect_right(self._first, v) - 1
        return k if k >= 0 and v < self.every[k].end else None

    def moment(self, v: int) -> int:
        """The last moment of a backward at which what an operator keeps is there."""
        k = self.of(v)
        return bisect_right(self._first, v) if k is None else k

    def modes(self, v: int) -> tuple[Mode, ...]:
        """Per state of its block, what becomes of an operator."""
        k = self.of(v)
        return (Mode.KEPT,) if k is None else self.every[k].modes(self._names[v])

    def links(self) -> Iterator[tuple[int, int]]:
        """Pairs of operators of a block, through which all of them have one state: of each but the
        first, one before it that makes what it reads, if there is one.
        """
        made_by = producers(self._graph)
        for block in self.every:
            for v in range(block.first + 1, block.end):
                makers = (made_by.get(name, -1) for name in self._graph.operators[v].inputs)
                yield max((u for u in makers if u >= block.first), default=v - 1), v
