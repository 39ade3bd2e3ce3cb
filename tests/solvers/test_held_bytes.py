"""Bytes that devices hold once for all items that need them (`solvers/placement/held_bytes.py`)."""

from random import Random

import numpy as np
import pytest

from planner.solvers.placement import held_bytes as held


def by_hand(kept, where, num_devices):
    used = [0] * num_devices
    for items, size in kept:
        for p in {where[v] for v in items}:
            used[p] += size
    return used


@pytest.mark.parametrize("seed", range(20))
def test_a_device_holds_an_entry_once_for_all_of_its_items(seed):
    draw = Random(seed)
    num, devices = draw.randint(1, 6), draw.randint(1, 4)
    kept = [
        (tuple(sorted(draw.sample(range(num), draw.randint(1, num)))), draw.randint(0, 9))
        for _ in range(draw.randint(0, 8))
    ]
    one, where = held.held_bytes(kept, num), np.array([draw.randrange(devices) for _ in range(num)])
    state = held.nothing_held(one, devices)
    held.hold(one, state, where)
    assert state.used.tolist() == by_hand(kept, where, devices)
    for _ in range(20):
        v, q = draw.randrange(num), draw.randrange(devices)
        held.move_item.py_func(one, state, v, where[v], q)
        where[v] = q
        assert state.used.tolist() == by_hand(kept, where, devices)
    room = np.array([draw.randint(0, 20) for _ in range(devices)])
    over = sum(max(0, n - r) for n, r in zip(state.used, room, strict=True))
    assert held.excess_bytes.py_func(state, room) == over
    held.hold(one, state, where)
    assert state.used.tolist() == by_hand(kept, where, devices)


def test_bytes_need_not_be_whole():
    one = held.held_bytes([((0,), 0.5), ((0, 1), 0.25)], 2, whole=False)
    state = held.nothing_held(one, 2)
    held.hold(one, state, np.array([0, 1]))
    assert state.used.tolist() == [0.75, 0.25]
