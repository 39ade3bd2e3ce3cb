"""How operators read what others make, or what lies on the devices: each for itself, or a copy that
several share.

A shared copy is a tensor in a spec that several readers want, which is converted once for all of
them: a node of its own, made or not.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from planner.artefacts.sharding import Spec
from planner.solvers.intra.built import Parts
from planner.support.arrays import Floats


class Ends(NamedTuple):
    """A tensor as one of its ends has it.

    Attributes:
        spec: of itself.
        gradient: of its gradient; None where none flows.
        segment: of the reader, where that runs again; -1 elsewhere.
    """

    spec: Spec
    gradient: Spec | None
    segment: int = -1

    @property
    def forwards(self) -> float:
        """How often a reader converts it in a microbatch."""
        return 1.0 if self.segment < 0 else 2.0


class Reader(NamedTuple):
    """A reader of a tensor.

    Attributes:
        operator: one of the same class.
        place: at which it reads.
        flows: whether a gradient flows back.
        segment: number of its block among those of all readers.
        runs: by its strategies, how often it is computed in a microbatch.
    """

    operator: int
    place: int
    flows: bool
    segment: int
    runs: tuple[float, ...]


Asked = tuple[Reader, ...]
"""The readers of a tensor."""


class Read(NamedTuple):
    """Seconds of an iteration to read a tensor.

    Attributes:
        copies: per shared copy, (k, 1 + n) not to make it, and to make it in each of n ways.
        direct: per reader, (k, l) of what it costs for this reader alone.
        needs: per reader, shared copies by index, with (1 + n, l) whether they have to be made.
    """

    copies: list[Floats]
    direct: list[Parts]
    needs: list[list[tuple[int, Floats]]]


Copies = dict[tuple[Ends, ...], Floats]
"""Shared copies by what they are made as: one that all readers have in a block is made for a block
that is kept, or for one that runs again."""


def shared_wants(wants: Sequence[Sequence[Ends]]) -> list[Ends]:
    """What several readers may want."""
    number = Counter(want for some in wants for want in dict.fromkeys(some))
    return [want for want, count in number.items() if count > 1]


def copies_of(shared: Sequence[Ends], table: Floats, *, together: bool) -> Copies:
    """The shared copies that cost anything, with `Read.copies`.

    Args:
        table: (k, shared) what they cost.
        together: whether all readers are in one block.
    """
    column = {want: one for want, one in zip(shared, table.T, strict=True) if one.any()}
    ways: dict[object, list[Ends]] = {}
    for want in column:
        ways.setdefault(want[:2] if together else want, []).append(want)
    return {
        tuple(some): np.stack([np.zeros(len(table)), *(column[want] for want in some)], axis=1)
        for some in ways.values()
    }


def needs_of(copies: Copies, some: Sequence[Ends]) -> list[tuple[int, Floats]]:
    """The copies that a reader may want, as in `Read.needs`."""
    needs = []
    for at, made in enumerate(copies):
        if not set(made).isdisjoint(some):
            needed = np.array([[one in made and one != way for one in some]
                               for way in (None, *made)])  # fmt: skip
            needs.append((at, np.where(needed, inf, 0.0)))
    return needs
