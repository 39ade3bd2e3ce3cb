"""m-TOPO: fills one device after the other, in topological order.

    (1) cap of every device = bytes of all operators / devices + bytes of the largest one
    (2) operators in breadth-first topological order
    (3) put them on device 0 until the next would go over the cap, then on device 1, and so on;
        never go back

What goes to the next device does not fit below the cap, so that each device but the last has more
than an equal share, and the last always has room. The cap knows nothing of a device's own memory,
which is for the evaluator to say.

Source: Jeon et al., Baechi, SoCC 2020, section 3.1.
"""

from collections import deque

from planner.problem import Problem, Result
from planner.solvers.fit import placed
from planner.solvers.placement.list_schedule import needs_of
from planner.solvers.placement.problem import Placing, feeds_of, placing_of

_SPACE = "devices filled in topological order"


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The placement, if it fits.

    Args:
        time_limit_s: not needed.
    """
    placing = placing_of(problem)
    return placed(problem, place(placing), _SPACE, breadth_first(placing))


def place(placing: Placing) -> tuple[int, ...]:
    """The device of each operator."""
    size = [need.bytes for need in needs_of(placing)]
    cap_bytes = sum(size) // placing.num_devices + max(size)
    device_of, device, used_bytes = [0] * len(size), 0, 0
    for i in breadth_first(placing):
        if used_bytes + size[i] > cap_bytes:
            device, used_bytes = device + 1, 0
        device_of[i] = device
        used_bytes += size[i]
    return tuple(device_of)


def breadth_first(placing: Placing) -> tuple[int, ...]:
    """The operators in topological order, first those that have been ready for longest."""
    feeds = feeds_of(placing)
    read_by: list[list[int]] = [[] for _ in feeds]
    for j, before in enumerate(feeds):
        for i in before:
            read_by[i].append(j)
    waits_for = [len(before) for before in feeds]
    ready = deque(i for i, count in enumerate(waits_for) if count == 0)
    order = []
    while ready:
        i = ready.popleft()
        order.append(i)
        for j in read_by[i]:
            waits_for[j] -= 1
            if waits_for[j] == 0:
                ready.append(j)
    return tuple(order)
