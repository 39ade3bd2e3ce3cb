"""What operators hold for the backward, by their strategies, and from when to when (`blocks.py`).

A tensor that is kept is held until the backward of the first operator that stashes it: of a block
that runs again, what it reads takes the place of what it stashes. So the following hold a tensor:

- operators outside its block that stash it, whatever becomes of their blocks;
- those of its own block, from the forward on if that is kept, else while it runs again;
- blocks that run again and read it, though they do not stash it. Whether they do is a strategy of
  theirs: such a tensor is a node of its own (`Waiting`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from planner.artefacts.graph import ITEM_BYTES, parameters_by_name, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, storage_owner
from planner.artefacts.sharding import Rule, local_shape
from planner.costs.casts import held_private_bytes
from planner.solvers.intra.blocks import Blocks, Mode
from planner.support.arrays import Floats
from planner.support.memo import remembered


class Span(NamedTuple):
    """Bytes that are held from one moment to another.

    Attributes:
        first, last: the moments, both included.
        bytes: (k,) by strategy.
    """

    first: int
    last: int
    bytes: Floats


class Waiting(NamedTuple):
    """A tensor that some blocks need if they run again.

    Attributes:
        bytes: (k,) by the strategies of its operator, of what they hold; 0 where that is held
            anyway.
        blocks: descending; none is behind `until`.
        until: the moment before which it is not held otherwise.
    """

    bytes: Floats
    blocks: tuple[int, ...]
    until: int


class _Users(NamedTuple):
    """Of the tensor of a storage.

    Attributes:
        stash: the operators that stash it, itself or a view.
        read: those that read it.
    """

    stash: tuple[int, ...]
    read: tuple[int, ...]


class Stash:
    """What the operators of a problem hold.

    Args:
        mesh: that they are split over.
        rules: per operator, on the mesh.
        class_of: per operator, one that has the same rules and costs the same by them.
        table: gives a table that was made before for the same key.
    """

    def __init__(
        self, problem: Problem, mesh: tuple[int, ...], blocks: Blocks,
        rules: Sequence[Sequence[Rule]], class_of: Sequence[int],
        table: Callable[[object, Callable[[], Any]], Any],
    ) -> None:  # fmt: skip
        self._profile, self._graph = problem.profile, problem.profile.graph
        self._mesh, self._blocks, self._rules = mesh, blocks, rules
        self._class_of, self._table = class_of, table
        self._users = _users(self._profile)

    def of(self, v: int) -> tuple[tuple[Span, ...], tuple[Waiting, ...]]:
        """What an operator makes and holds, by its modes and, in each, its rules."""
        modes, at, last = self._blocks.modes(v), self._blocks.moment(v), self._blocks.last
        made, kept = self._table(("bytes", self._class_of[v]), partial(self._bytes, v))
        private, held_private = kept
        rows = {
            Mode.KEPT: (private, 0.0 * private),
            Mode.HELD: (held_private, private - held_private),
            Mode.AGAIN: (0.0 * private, private),
        }
        spans, waiting = [*_spans(at, last, [rows[mode] for mode in modes])], []
        for size, name in zip(made, self._graph.operators[v].outputs, strict=True):
            if name not in self._users:  # a view
                continue
            always, own, blocks = self._when(v, self._users[name])
            rows = {
                Mode.KEPT: (own * size, 0.0 * size),
                Mode.HELD: (size, 0.0 * size),
                Mode.AGAIN: (0.0 * size, own * size),
            }
            spans += _spans(at, last, [rows[mode] for mode in modes])
            late = np.concatenate([(0.0 if _is_held(mode, own=own) else 1.0) * size
                                   for mode in modes])  # fmt: skip
            if always <= last:
                spans += [Span(always, last, late)] if late.any() else []
            if blocks and late.any():
                waiting.append(Waiting(late, blocks, always))
        return tuple(spans), tuple(waiting)

    def _when(self, v: int, users: _Users) -> tuple[int, bool, tuple[int, ...]]:
        """From which moment on a tensor of an operator is held in any case, behind the last one if
        it need not be; whether its own block stashes it; and the blocks before that moment that
        need it if they run again, descending.
        """
        blocks, mine = self._blocks, self._blocks.of(v)
        inside = [mine is not None and blocks.of(u) == mine for u in users.stash]
        always = min(
            (blocks.moment(u) for u, own in zip(users.stash, inside, strict=True) if not own),
            default=blocks.last + 1,
        )
        readers = {blocks.of(u) for u in users.read} - {None, mine}
        must = [k for k in readers if k is not None and not blocks.every[k].may_be_kept]
        always = min([always, *must])
        may = sorted((k for k in readers if k is not None and k < always), reverse=True)
        return always, any(inside), tuple(may)

    def _bytes(self, v: int) -> tuple[Floats, tuple[Floats, Floats]]:
        """(o, k) bytes of its outputs by its rules; and (k,) of what it keeps for itself, which is
        in proportion to what it makes, and of that what is held where it is not run again.
        """
        tensors, operator = tensors_by_name(self._graph), self._graph.operators[v]
        every = [tensors[name] for name in operator.outputs]
        made = np.array([
            [prod(local_shape(one.shape, rule.outputs[o], self._mesh)) * ITEM_BYTES[one.dtype]
             for rule in self._rules[v]]
            for o, one in enumerate(every)
        ])  # fmt: skip
        share = made.sum(axis=0) / max(1, sum(one.bytes for one in every))
        own = self._profile.operators[v].stash_private_bytes - casts_bytes(self._profile, v)
        held = min(own, held_private_bytes(self._profile, v))
        return made, (own * share, held * share)


def _is_held(mode: Mode, *, own: bool) -> bool:
    """Whether a tensor is held from the moment of its operator on."""
    return mode is Mode.HELD or (mode is Mode.KEPT and own)


def _spans(at: int, last: int, rows: Sequence[tuple[Floats, Floats]]) -> list[Span]:
    """What is held from a moment on, and at that moment alone.

    Args:
        rows: per mode, both.
    """
    both = [np.concatenate(some) for some in zip(*rows, strict=True)]
    return [Span(at, end, size) for end, size in zip((last, at), both, strict=True) if size.any()]


def casts_bytes(profile: Profile, v: int) -> int:
    """Of what an operator keeps for itself, copies of its weights in a shorter type, which are not
    kept where weights are gathered.
    """
    operator, known = profile.graph.operators[v], parameters_by_name(profile.graph)
    made = tensors_by_name(profile.graph)[operator.outputs[0]].dtype
    if made == "float32":
        return 0
    copies = sum(prod(known[n].shape) for n in operator.parameters) * ITEM_BYTES[made]
    return min(round(copies), profile.operators[v].stash_private_bytes)


@remembered
def _users(profile: Profile) -> dict[str, _Users]:
    """By owner of a storage, its users."""
    graph, inside = profile.graph, set(range(len(profile.graph.operators)))
    read, stash = dict[str, set[int]](), dict[str, set[int]]()
    for v, operator in enumerate(graph.operators):
        for name in operator.outputs:
            read.setdefault(storage_owner(profile, name, inside), set())
        for name in operator.inputs:
            read.setdefault(storage_owner(profile, name, inside), set()).add(v)
        for name in profile.operators[v].stash_tensors:
            stash.setdefault(storage_owner(profile, name, inside), set()).add(v)
    return {
        name: _Users(tuple(sorted(stash.get(name, ()))), tuple(sorted(read.get(name, ()))))
        for name in {**read, **stash}
    }
