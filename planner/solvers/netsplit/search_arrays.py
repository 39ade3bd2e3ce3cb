"""The arrays of NetSplit's annealing: its model, and a schedule while it is changed. `kernels.py`,
whose letters these are, times schedules; `moves.py` changes them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.solvers.placement.held_bytes import HeldBytes, HeldState, nothing_held
from planner.support.arrays import Bools, Csr, Ints
from planner.support.jit import njit

FORWARD, BACKWARD = 0, 1
"""The phases: rows of the arrays that have one per phase."""

NEVER = 2**62
"""More ticks than any schedule has."""


class ModelArrays(NamedTuple):
    """The model as arrays.

    Attributes:
        ticks: (2, N, D) of operators, by phase.
        tail: (2, N) least ticks behind each operator, by phase.
        least: (2,) lower bounds of F and B.
        way: (D, D) the column of the way from p to q; away: (T, C) ticks of the transfer of a
            tensor on a way, or for which it occupies a link of a width.
        route: resources by channel p D + q, the channel first; column: of each of its values.
        free: (R,) scratch: when a resource is free.
        maker: (T,) the operator that makes a tensor; gradient: (T,) whether one comes back.
        readers: operators by tensor; makes: tensors that an operator makes; reads: those it reads.
        before: operators that feed each operator; after: operators that it feeds.
        group_of: (N,) group of each operator; members: operators by group.
        blocks: groups that may move together.
        held: memory that groups need.
        room: (D,) memory in bytes.
    """

    ticks: Ints
    tail: Ints
    least: Ints
    way: Ints
    away: Ints
    route: Csr
    column: Ints
    free: Ints
    maker: Ints
    gradient: Bools
    readers: Csr
    makes: Csr
    reads: Csr
    before: Csr
    after: Csr
    group_of: Ints
    members: Csr
    blocks: Csr
    held: HeldBytes
    room: Ints


class Timing(NamedTuple):
    """When the operators of a schedule end, by phase, and the states of devices on the way.

    Attributes:
        end: (2, N) when operators end; done: (2, N) operators as they end; turn: (2, N) place of
            each operator among these, `NEVER` if it has not ended.
        previous: (2, N) the operator that ran before on the same device, -1 for none.
        there: (2, T, D) when a tensor has arrived on a device that reads it, or the gradient from
            there.
        lists: (2, N) operators by device, in order; first: (2, D + 1) where each device's begin.
        marks: (2, N / stride + 1, 4 D + R + 1) states of devices and links, one in front of every
            operator of a number that `stride` divides: see `kernels._mark`.
    """

    end: Ints
    done: Ints
    turn: Ints
    previous: Ints
    there: Ints
    lists: Ints
    first: Ints
    marks: Ints


class SearchState(NamedTuple):
    """A schedule while it is changed, and scratch arrays.

    Invariants between moves: `turns`, `ends` and `held` follow from `where` and `orders`.
    `kept` is of this schedule, and `tried` equals it but for lists and marks.

    Attributes:
        where: (N,) device of each operator.
        orders: (2, N) operators in the order of their devices, by phase.
        turns: (2, N) place of each operator in its order, the inverse of `orders`.
        ends: (2,) ticks F and B.
        held: memory of the devices.
        placed: (N,) the placement of `kept`.
        kept: of the schedule; tried: of the schedule after a move.
        begun: (2,) the first operator, as they end, that is timed after a move; reached: (2,) the
            first one that no longer is.
        head: (D,) scratch: the next operator of each device in its list.
        newest: (D,) scratch: the last operator that each device has run, -1 for none.
        free: (D,) scratch: when a device is free; rest: (D,) ticks of the operators that it has
            yet to run; next_end: (D,) when the next one ends, `NEVER` if that is not known yet.
        total: (2, D) ticks of all operators of a device after a move, by phase.
        awaits: (D,) scratch: an operator that the next one of a device waits for, -1 for none.
        unchanged: (D,) scratch: whether the list of a device is as before up to its `head`.
        critical: (2, N) operators of a chain that is as long as the phase, by phase, as long as
            `num_critical`, (2,), says: each waits for the next one, or for a transfer from it.
        moved: (G,) scratch: groups of a move; source: (G,) their devices before.
        best: (1,) ticks F + B of the best schedule that fits, `NEVER` without one; best_where,
            best_orders: its placement and orders.
        timed: (1,) the work so far: operators timed, and a share of those listed for it.
    """

    where: Ints
    orders: Ints
    turns: Ints
    ends: Ints
    held: HeldState
    placed: Ints
    kept: Timing
    tried: Timing
    begun: Ints
    reached: Ints
    head: Ints
    newest: Ints
    free: Ints
    rest: Ints
    next_end: Ints
    total: Ints
    awaits: Ints
    unchanged: Bools
    critical: Ints
    num_critical: Ints
    moved: Ints
    source: Ints
    best: Ints
    best_where: Ints
    best_orders: Ints
    timed: Ints


MIN_STRIDE, COLUMNS = 8, 8
"""Operators between two marks: at least so many, and one for so many columns of a mark."""


def blank_state(
    model: ModelArrays, where: Sequence[int], orders: Sequence[Sequence[int]]
) -> SearchState:
    """The state of a placement and orders, not timed yet."""
    num, (devices,), (tensors,) = len(where), model.room.shape, model.maker.shape
    groups = len(model.members.start) - 1
    columns = 4 * devices + len(model.free) + 1
    rows = num // stride_of(columns) + 1

    def timing() -> Timing:
        marks = np.zeros((2, rows, columns), np.int64)
        marks[:, 0, 2 * devices : 3 * devices] = -1  # nothing has run yet
        return Timing(
            end=np.zeros((2, num), np.int64),
            done=np.tile(np.arange(num), (2, 1)),
            turn=np.full((2, num), NEVER),
            previous=np.zeros((2, num), np.int64),
            there=np.full((2, tensors, devices), -1),
            lists=np.zeros((2, num), np.int64),
            first=np.zeros((2, devices + 1), np.int64),
            marks=marks,
        )

    def of_devices() -> Ints:
        return np.zeros(devices, np.int64)

    return SearchState(
        where=np.array(where, dtype=np.int64),
        orders=np.array(orders, dtype=np.int64),
        turns=np.argsort(np.array(orders, dtype=np.int64), axis=1),
        ends=np.zeros(2, np.int64),
        held=nothing_held(model.held, devices),
        placed=np.array(where, dtype=np.int64),
        kept=timing(),
        tried=timing(),
        begun=np.zeros(2, np.int64),
        reached=np.zeros(2, np.int64),
        head=of_devices(),
        newest=of_devices(),
        free=of_devices(),
        rest=of_devices(),
        next_end=of_devices(),
        total=np.zeros((2, devices), np.int64),
        awaits=of_devices(),
        unchanged=np.zeros(devices, np.bool_),
        critical=np.zeros((2, num), np.int64),
        num_critical=np.zeros(2, np.int64),
        moved=np.zeros(groups, np.int64),
        source=np.zeros(groups, np.int64),
        best=np.full(1, NEVER),
        best_where=np.zeros(num, np.int64),
        best_orders=np.zeros((2, num), np.int64),
        timed=np.zeros(1, np.int64),
    )


@njit
def stride_of(columns: int) -> int:
    """The number of operators between two marks.

    Args:
        columns: of a mark.
    """
    return max(MIN_STRIDE, columns // COLUMNS)
