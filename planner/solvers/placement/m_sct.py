"""m-SCT: small communication times, with a limit to memory.

**Favourite children.** If transfers are short beside operators, it is enough that at most one child
of an operator follows it on its device at once. Legend: s_i start of operator i, p_i its time, c_ij
time of what i sends j, both mean over devices; x_ij = 0 where j is i's favourite child; w length.

    minimise   w
    subject to (1) s_i + p_i + c_ij x_ij <= s_j   for each edge
               (2) s_i + p_i <= w
               (3) sum over children j of x_ij >= children of i - 1
               (4) sum over parents i of x_ij >= parents of j - 1
               (5) 0 <= x_ij <= 1, s_i >= 0

x_ij up to `ROUNDED` counts as 0. By (3) and (4) no operator then has two favourites or is that of
two.

**Schedule.** As m-ETF, but a device that has just run i, and whose favourite child is ready and
could start nowhere earlier, waits for it:

    (6) meanwhile it takes only what is urgent: what has been ready for so long that its data could
        be on every device that has room for it; ties by topological order
    (7) else it takes the favourite child as soon as that can start

Source: Jeon et al., Baechi, SoCC 2020, section 3.3; SCT: Hanen and Munier, Discrete Applied
Mathematics 2001.
"""

from collections.abc import Mapping

from planner.problem import Problem, Result, Status
from planner.solvers.fit import placed
from planner.solvers.placement.list_schedule import (
    ListSchedule,
    NoRoom,
    Rule,
    earliest,
    list_schedule,
)
from planner.solvers.placement.problem import Placing, placing_of

ROUNDED = 0.1
"""As in Baechi's experiments."""

_SPACE = "the earliest start for each operator, favourite children first"


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The placement, if the evaluator finds room for it as well.

    Args:
        time_limit_s: not needed.
    """
    placing = placing_of(problem)
    done = list_schedule(placing, rule_of(placing))
    if isinstance(done, NoRoom):
        return Result(Status.UNKNOWN, None, space=_SPACE, reason=done.reason(problem))
    return placed(problem, done.device_of, _SPACE, done.order)


def place(placing: Placing) -> tuple[int, ...] | NoRoom:
    """The device of each operator."""
    done = list_schedule(placing, rule_of(placing))
    return done if isinstance(done, NoRoom) else tuple(done.device_of)


def rule_of(placing: Placing) -> Rule:
    """m-ETF's rule with (6) and (7)."""
    favourite = favourites(placing)

    def rule(schedule: ListSchedule, p: int) -> int | None:
        child = favourite.get(schedule.last[p])
        if child is None or child not in schedule.ready:
            return earliest(schedule, p)
        starts = schedule.starts_s(child)
        if p not in starts or starts[p] > min(starts.values()):
            return earliest(schedule, p)
        urgent = _most_urgent(schedule, p)
        if urgent is not None:
            return urgent
        return child if starts[p] <= schedule.now_s else None

    return rule


def _most_urgent(schedule: ListSchedule, p: int) -> int | None:
    """(6)."""
    for i in schedule.ready:
        if schedule.fits(i, p) and all(
            schedule.data_s(i, q) <= schedule.now_s for q in schedule.starts_s(i)
        ):
            return i
    return None


def edges_s(placing: Placing) -> Mapping[tuple[int, int], float]:
    """c: by (i, j), time of all that operator i sends j, mean over pairs of devices, in s."""
    devices = placing.num_devices
    pairs = max(1, devices * (devices - 1))
    latency_s = float(placing.latency_s.sum()) / pairs
    seconds_per_byte = float(placing.seconds_per_byte.sum()) / pairs
    found: dict[tuple[int, int], float] = {}
    for flow in placing.tensors:
        for j in flow.consumers:
            edge = flow.producer, j
            found[edge] = found.get(edge, 0.0) + latency_s + flow.bytes * seconds_per_byte
    return found


def favourites(placing: Placing) -> Mapping[int, int]:
    """The favourite child of each operator that has one."""
    edges = edges_s(placing)
    x = relaxed(placing.forward_s.mean(axis=1).tolist(), edges)
    return {i: j for (i, j), share in x.items() if share <= ROUNDED}


def relaxed(
    time_s: list[float], edges: Mapping[tuple[int, int], float]
) -> Mapping[tuple[int, int], float]:
    """Solves the relaxed program (1) to (5): x by edge.

    Args:
        time_s: p of each operator.
        edges: c, by edge.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    scale = 1.0 / max(*time_s, *edges.values(), 1e-30)
    length = solver.NumVar(0, solver.infinity(), "w")
    start = [solver.NumVar(0, solver.infinity(), "") for _ in time_s]
    x = {edge: solver.NumVar(0, 1, "") for edge in edges}
    for (i, j), way_s in edges.items():  # (1)
        solver.Add(start[i] + time_s[i] * scale + way_s * scale * x[i, j] <= start[j])
    for begin, lasts_s in zip(start, time_s, strict=True):  # (2)
        solver.Add(begin + lasts_s * scale <= length)
    for end in (0, 1):  # (3), (4)
        groups: dict[int, list[tuple[int, int]]] = {}
        for edge in edges:
            groups.setdefault(edge[end], []).append(edge)
        for some in groups.values():
            solver.Add(sum(x[edge] for edge in some) >= len(some) - 1)
    solver.Minimize(length)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise ValueError("the program of favourite children has no solution")
    return {edge: float(one.solution_value()) for edge, one in x.items()}
