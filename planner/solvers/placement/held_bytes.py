"""Bytes that a device holds once for all items on it that need them, counted while items move.

An entry is a number of bytes and the items that need them: the parameters of one operator, or a
tensor that several operators read. Items are operators, or groups of operators that move together.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from planner.support.arrays import Csr, Floats, Ints, csr, transposed
from planner.support.jit import inlined, njit


class HeldBytes(NamedTuple):
    """What items need.

    Attributes:
        items: by entry, those that need it, each once.
        entries: by item, what it needs.
        bytes: (E,) of each entry.
    """

    items: Csr
    entries: Csr
    bytes: Ints | Floats


class HeldState(NamedTuple):
    """What the devices of a placement hold.

    Attributes:
        needs: (E, D) number of items on a device that need an entry.
        used: (D,) bytes.
    """

    needs: Ints
    used: Ints | Floats


def held_bytes(
    kept: Iterable[tuple[tuple[int, ...], float]], num_items: int, *, whole: bool = True
) -> HeldBytes:
    """The entries of some items.

    Args:
        kept: by entry, its items and bytes.
        whole: whether all bytes are whole numbers.
    """
    kept = list(kept)
    rows = [items for items, _ in kept]
    sizes = [size for _, size in kept]
    as_bytes: Ints | Floats = np.array(sizes, np.int64) if whole else np.array(sizes, np.float64)
    return HeldBytes(csr(rows), csr(transposed(rows, num_items)), as_bytes)


def nothing_held(held: HeldBytes, num_devices: int) -> HeldState:
    """Devices that hold nothing."""
    return HeldState(
        np.zeros((len(held.bytes), num_devices), np.int64),
        np.zeros(num_devices, np.result_type(held.bytes)),
    )


@njit
def hold(held: HeldBytes, state: HeldState, where: Ints) -> None:
    """Sets a state to that of a placement.

    Args:
        where: (items,) device of each.
    """
    state.needs[:] = 0
    state.used[:] = 0
    for e in range(len(held.bytes)):
        for x in range(held.items.start[e], held.items.start[e + 1]):
            p = where[held.items.values[x]]
            if state.needs[e, p] == 0:
                state.used[p] += held.bytes[e]
            state.needs[e, p] += 1


@inlined
def move_item(held: HeldBytes, state: HeldState, item: int, p: int, q: int) -> None:
    """Moves an item from p to q; applied in reverse, it undoes itself."""
    for x in range(held.entries.start[item], held.entries.start[item + 1]):
        e = held.entries.values[x]
        state.needs[e, p] -= 1
        if state.needs[e, p] == 0:
            state.used[p] -= held.bytes[e]
        if state.needs[e, q] == 0:
            state.used[q] += held.bytes[e]
        state.needs[e, q] += 1


@inlined
def excess_bytes(state: HeldState, room: Ints) -> int:
    """Bytes that exceed the memory of their devices.

    Args:
        room: (D,) memory.
    """
    over = 0
    for p in range(len(room)):
        over += max(0, state.used[p] - room[p])
    return over
