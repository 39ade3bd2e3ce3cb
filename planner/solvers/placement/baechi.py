"""Baechi's three placement algorithms, each with a memory limit: m-TOPO, m-ETF and m-SCT.

**m-TOPO** fills one device after the other, in topological order.

    (1) cap of every device = bytes of all operators / devices + bytes of the largest operator
    (2) operators in breadth-first topological order                              `breadth_first`
    (3) put them on device 0 until the next one would exceed the cap, then on device 1, and so on;
        never go back                                                             `place_m_topo`

A device is left when the next operator exceeds its cap, so each device but the last has more than
an equal share, and the last one always has room. The cap ignores the memory of the devices: the
evaluator checks that.

**m-ETF**, earliest task first, on the devices and channels of `baechi_schedule.py`.

    (4) of all ready operators and devices with enough free memory, take the pair with the earliest
        start = max(device is free, data are there); ties by topological order, then by device
    (5) repeat until all operators are placed, or fail if one fits nowhere

Starts never fall, because an operator becomes ready when another one ends. So `earliest`, which
goes from event to event and asks which pair could start now, takes the pairs in this order.

**m-SCT**, small communication times: m-ETF that keeps a device free for a favourite child.

If transfers are short beside operators, it is enough that at most one child of an operator follows
it at once on its device. Legend: s_i start of operator i, p_i its time, c_ij time of the transfers
from i to j, both mean over devices; x_ij = 0 where j is i's favourite child; w length.

    minimise   w
    subject to (6) s_i + p_i + c_ij x_ij <= s_j   for each edge
               (7) s_i + p_i <= w
               (8) sum over children j of x_ij >= children of i - 1
               (9) sum over parents i of x_ij >= parents of j - 1
               (10) 0 <= x_ij <= 1, s_i >= 0

x_ij up to `ROUNDED` counts as 0. By (8) and (9) no operator then has two favourites or is the
favourite of two. A device that has just run i waits for i's favourite child if that is ready and
could start nowhere earlier:

    (11) meanwhile it takes only urgent operators: those whose data could be on every device with
         room for them by now; ties by topological order
    (12) else it takes the favourite child as soon as that can start

Source: Jeon et al., Baechi, SoCC 2020, sections 3.1 to 3.3; ETF: Hwang et al., SIAM J. Comput.
1989; SCT: Hanen and Munier, Discrete Applied Mathematics 2001.
"""

from collections import deque
from collections.abc import Mapping

from planner.artefacts.problem import Problem, Result, Status
from planner.solvers.fit import placed
from planner.solvers.placement.baechi_schedule import (
    DispatchRule,
    ListSchedule,
    NoRoom,
    earliest,
    list_schedule,
    operator_memory_of,
)
from planner.solvers.placement.problem import (
    Placement,
    PlacementProblem,
    feeds_of,
    placement_problem_of,
)

ROUNDED = 0.1
"""As in Baechi's experiments."""


# ------------------------------------------------------------------------------------------ m-TOPO


def solve_m_topo(problem: Problem, time_limit_s: float) -> Result:
    """m-TOPO's placement, if it fits.

    Args:
        time_limit_s: not needed.
    """
    placement_problem = placement_problem_of(problem)
    return placed(
        problem,
        place_m_topo(placement_problem),
        "devices filled in topological order",
        breadth_first(placement_problem),
    )


def place_m_topo(problem: PlacementProblem) -> Placement:
    """(1) and (3)."""
    size = [memory.bytes for memory in operator_memory_of(problem)]
    cap_bytes = sum(size) // problem.num_devices + max(size)
    device_of, device, used_bytes = [0] * len(size), 0, 0
    for i in breadth_first(problem):
        if used_bytes + size[i] > cap_bytes:
            device, used_bytes = device + 1, 0
        device_of[i] = device
        used_bytes += size[i]
    return tuple(device_of)


def breadth_first(problem: PlacementProblem) -> tuple[int, ...]:
    """(2): the operators in topological order, those that have been ready for longest first."""
    feeds = feeds_of(problem)
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


# ------------------------------------------------------------------------------------------- m-ETF


def solve_m_etf(problem: Problem, time_limit_s: float) -> Result:
    """m-ETF's placement, if the evaluator finds room for it as well.

    Args:
        time_limit_s: not needed.
    """
    schedule = list_schedule(placement_problem_of(problem), earliest)
    return _result(problem, schedule, "the earliest start for each operator")


def _result(problem: Problem, schedule: ListSchedule | NoRoom, space: str) -> Result:
    """The result of a list schedule."""
    if isinstance(schedule, NoRoom):
        reason = schedule.reason(problem)
        return Result(Status.UNKNOWN, None, space=space, reason=reason, short_of_memory=True)
    return placed(problem, schedule.device_of, space, schedule.order)


# ------------------------------------------------------------------------------------------- m-SCT


class NoFavouritesError(Exception):
    """The engine has given up on the linear program, for numbers that it cannot handle."""


def solve_m_sct(problem: Problem, time_limit_s: float) -> Result:
    """m-SCT's placement, if the evaluator finds room for it as well.

    Args:
        time_limit_s: not needed.
    """
    placement_problem = placement_problem_of(problem)
    space = "the earliest start for each operator, favourite children first"
    try:
        rule = m_sct_rule(placement_problem)
    except NoFavouritesError as error:
        return Result(Status.UNKNOWN, None, space=space, reason=str(error))
    schedule = list_schedule(placement_problem, rule)
    return _result(problem, schedule, space)


def m_sct_rule(problem: PlacementProblem) -> DispatchRule:
    """m-ETF's rule with (11) and (12).

    Raises:
        NoFavouritesError: if there are none to be had.
    """
    favourite = favourites(problem)

    def rule(schedule: ListSchedule, p: int) -> int | None:
        child = favourite.get(schedule.last[p])
        if child is None or child not in schedule.ready:
            return earliest(schedule, p)
        starts = schedule.starts_s(child)
        if p not in starts or starts[p] > min(starts.values()):
            return earliest(schedule, p)
        urgent = _first_urgent(schedule, p)
        if urgent is not None:
            return urgent
        return child if starts[p] <= schedule.now_s else None

    return rule


def _first_urgent(schedule: ListSchedule, p: int) -> int | None:
    """(11)."""
    for i in schedule.ready:
        if schedule.fits(i, p) and all(
            schedule.data_s(i, q) <= schedule.now_s for q in schedule.starts_s(i)
        ):
            return i
    return None


def favourites(problem: PlacementProblem) -> Mapping[int, int]:
    """The favourite child of each operator that has one."""
    edges = edges_s(problem)
    x = relaxed(problem.forward_s.mean(axis=1).tolist(), edges)
    return {i: j for (i, j), share in x.items() if share <= ROUNDED}


def edges_s(problem: PlacementProblem) -> Mapping[tuple[int, int], float]:
    """c: by (i, j), time of all transfers from i to j, mean over pairs of devices, in s."""
    devices = problem.num_devices
    pairs = max(1, devices * (devices - 1))
    latency_s = float(problem.latency_s.sum()) / pairs
    seconds_per_byte = float(problem.seconds_per_byte.sum()) / pairs
    edges: dict[tuple[int, int], float] = {}
    for tensor in problem.tensors:
        for j in tensor.consumers:
            edge = tensor.producer, j
            edges[edge] = edges.get(edge, 0.0) + latency_s + tensor.bytes * seconds_per_byte
    return edges


def relaxed(
    time_s: list[float], edges: Mapping[tuple[int, int], float]
) -> Mapping[tuple[int, int], float]:
    """Solves the linear program (6) to (10): x by edge.

    Args:
        time_s: p of each operator.
        edges: c, by edge.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    # Times near 1, so that the engine's tolerances mean the same for every model.
    scale = 1.0 / max(*time_s, *edges.values(), 1e-30)
    length = solver.NumVar(0, solver.infinity(), "w")
    start = [solver.NumVar(0, solver.infinity(), "") for _ in time_s]
    x = {edge: solver.NumVar(0, 1, "") for edge in edges}
    for (i, j), way_s in edges.items():  # (6)
        solver.Add(start[i] + time_s[i] * scale + way_s * scale * x[i, j] <= start[j])
    for begin, lasts_s in zip(start, time_s, strict=True):  # (7)
        solver.Add(begin + lasts_s * scale <= length)
    for end in (0, 1):  # (8), (9)
        groups: dict[int, list[tuple[int, int]]] = {}
        for edge in edges:
            groups.setdefault(edge[end], []).append(edge)
        for group in groups.values():
            solver.Add(sum(x[edge] for edge in group) >= len(group) - 1)
    solver.Minimize(length)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise NoFavouritesError("GLOP has not solved the program that chooses favourite children")
    return {edge: float(variable.solution_value()) for edge, variable in x.items()}
