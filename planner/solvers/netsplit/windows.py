"""What is known of every schedule of NetSplit's full model, beyond `netsplit_bounds`: small parts
of the graph are solved, each on top of what is known of those before it.

Legend: a_i, b_i ticks of forward and backward of i on its fastest device; h_i, h'_i what no
schedule has less of before the forward of i and behind its backward; F, B the phases' lengths.
Read from its end, the phase of backwards is one of forwards: it takes the same way through the
graph, and h' is what h is.

    (w1) the window of j are the operators that come before it, of these the few with the largest
         h + h'. No schedule of all operators starts j earlier than the best one of j and its
         window, where no i starts before h_i; likewise for h'                       `_least`
    (w2) a placement that is good for the forwards of a window may be bad for its backwards:
         J_j is the least sum of what is before the forward of j and behind its backward, by one
         placement of the window whose operators have h, h' and J themselves         `_least`
    (w3) behind j it is the same, with the graph reversed: tails, and K for J        `_swept`
    (w4) F + B >= J_j + a_j + b_j + K_j                                              `windowed`

(w2) is what the phases alone do not tell: the best forwards and the best backwards want different
placements. Operators before and behind are swept at once, by a thread each. Everything is limited
by deterministic work.

Source: this project's; windows are the subproblem bounds of job-shop scheduling (Carlier and
Pinson, Management Science 35(2), 1989) with placements for sequences.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from planner.solvers.netsplit.bounds import Joint, Limits, joint_of
from planner.solvers.netsplit.cpsat_model import add_apart, phase_of, placement_of
from planner.solvers.netsplit.cpsat_run import Run, least_of, worker
from planner.solvers.netsplit.model import Instance, Known, messages_of, part

SIZES = ((18, 0.01), (14, 0.005), (10, 0.002), (7, 0.001), (5, 0.0006))
"""Operators of a window, and units of deterministic work that an operator's three windows take of
that size, on 4 devices; the first is taken that the limit allows."""

EACH = 2.0
"""A single window gets at most so many times what three take."""

WINDOWS_PER_S = 0.07
"""Units of deterministic work per second of the limit: each of two sweeps did 0.05 to 0.1."""

RISE = 0.002
"""A window is asked for what is so far above the least that is known first, then twice as far."""

SLOW = 2.0
"""A machine that needs so many times longer is cut by the clock."""


def windowed(
    instance: Instance, limits: Sequence[Limits], run: Run, share: float
) -> tuple[list[Limits], Joint]:
    """Better limits of forwards and of backwards, and of both.

    Args:
        share: of what is left, the most that this takes.
    """
    limit = share * run.left_s * WINDOWS_PER_S
    each = limit / instance.placing.num_operators
    size, work = next(((size, work) for size, work in SIZES if work <= each), (0, 0.0))
    if not size:
        return list(limits), joint_of(limits)
    until_s = run.seconds() - SLOW * share * run.seconds()

    def over() -> bool:
        if run.seconds() < until_s:
            run.in_time = False
        return run.over()

    plan = _Plan(instance, limits, size, EACH * work, limit, run.seed, over)
    with ThreadPoolExecutor(2) as beside:
        sweeps = [beside.submit(_swept, plan, behind) for behind in (False, True)]
        before, after = run.watch.run(lambda: [one.result() for one in sweeps], lambda: None)
    run.left_s -= max(before.worked, after.worked) / WINDOWS_PER_S
    return _limits(plan, before, after)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How windows are solved.

    Attributes:
        limits: what is known before.
        size: operators of a window.
        each: the most units of work for one; limit: for a sweep.
        seed: of the engine; over: whether to end before the next window.
    """

    instance: Instance
    limits: Sequence[Limits]
    size: int
    each: float
    limit: float
    seed: int
    over: Callable[[], bool]


@dataclass(slots=True)
class _Side:
    """What lies before all operators, or behind them.

    Attributes:
        behind: which.
        times: (2, N) ticks in the phase of forwards, h or a tail, and in that of backwards.
        both: (N,) J or K.
        worked: units of deterministic work.
    """

    behind: bool
    times: list[list[int]]
    both: list[int]
    worked: float = 0.0


def _side(plan: _Plan, behind: bool) -> _Side:
    """What is known of a side before."""
    forward, backward = plan.limits
    times = (forward.tail, backward.head) if behind else (forward.head, backward.tail)
    return _Side(
        behind, [list(one) for one in times], [sum(two) for two in zip(*times, strict=True)]
    )


def _limits(plan: _Plan, before: _Side, behind: _Side) -> tuple[list[Limits], Joint]:
    """What both sides say together."""
    ticks = _least_ticks(plan.instance)
    found = []
    for backward, limits in enumerate(plan.limits):
        through = zip(before.times[backward], ticks[backward], behind.times[backward], strict=True)
        least = max(limits.least, *map(sum, through))
        head, tail = (behind, before) if backward else (before, behind)
        own = tuple(head.times[backward]), tuple(tail.times[backward])
        found.append(replace(limits, head=own[0], tail=own[1], least=least))
    whole = zip(before.both, *ticks, behind.both, strict=True)
    least = max(sum(one.least for one in found), *map(sum, whole))
    return found, Joint(tuple(before.both), tuple(behind.both), least)


def _least_ticks(instance: Instance) -> tuple[list[int], list[int]]:
    """(N,) a and (N,) b."""
    return instance.forward.min(axis=1).tolist(), instance.backward.min(axis=1).tolist()


def _swept(plan: _Plan, behind: bool) -> _Side:
    """One operator after the other, those first that the others come after, or before."""
    side = _side(plan, behind)
    num, ticks = plan.instance.placing.num_operators, _least_ticks(plan.instance)
    near, times = _near(plan.instance, behind), side.times
    all_before: list[set[int]] = [set() for _ in range(num)]
    for j in reversed(range(num)) if behind else range(num):
        for i, gradient in near[j].items():
            all_before[j] |= all_before[i] | {i}
            for phase in (0, 1) if gradient else (0,):
                own = times[phase]
                own[j] = max(own[j], own[i] + ticks[phase][i])
            if gradient:
                side.both[j] = max(side.both[j], side.both[i] + ticks[0][i] + ticks[1][i])
        ranked = sorted(all_before[j], key=lambda i: (-times[0][i] - times[1][i], i))
        for phases in ((False,), (True,), (False, True)):
            if ranked and side.worked < plan.limit and not plan.over():
                least = _least(plan, side, j, ranked[: plan.size], phases)
                best = side.both if len(phases) == 2 else times[phases[0]]
                best[j] = max(best[j], least)
        side.both[j] = max(side.both[j], times[0][j] + times[1][j])
    return side


def _near(instance: Instance, behind: bool) -> list[dict[int, bool]]:
    """The operators right before each, or right behind it, with whether a gradient comes back."""
    near: list[dict[int, bool]] = [{} for _ in range(instance.placing.num_operators)]
    for flow in instance.placing.tensors:
        for j in flow.consumers:
            here, there = (flow.producer, j) if behind else (j, flow.producer)
            near[here][there] = near[here].get(there, False) or flow.gradient
    return near


def _least(plan: _Plan, side: _Side, j: int, window: Sequence[int], phases: Sequence[bool]) -> int:
    """(w1) or, with both phases, (w2): the least ticks on a side of j that its window allows.

    Mostly that is what is known already; so what is near it is asked for first.
    """
    operators = sorted((*window, j))
    inside = part(plan.instance, operators)
    least = sum(side.times[phase][j] for phase in phases)
    if len(phases) == 2:
        least = max(least, side.both[j])
    work, rise = plan.each, RISE
    while work > 0:
        most = int((1 + rise) * least)
        found, worked = _within(plan, side, operators, inside, phases, j, most, work)
        side.worked += worked
        work -= worked
        if found is not None:
            return max(least, found)
        least, rise = most + 1, 2 * rise
    return least


def _within(
    plan: _Plan, side: _Side, operators: Sequence[int], inside: Instance, phases: Sequence[bool],
    j: int, most: int, work: float,
) -> tuple[int | None, float]:  # fmt: skip
    """The same if it is no more than some ticks; None if it is; with the work that it took."""
    from ortools.sat.python import cp_model

    nothing = (0,) * len(operators)
    nowhere = Known(nothing, False, 0)
    model = placement_of(inside, cp_model.CpModel(), nothing, memory=False)
    add_apart(model, nothing)
    ways, last = [], operators.index(j)
    messages = sum(int(ticks.max()) for ticks in messages_of(inside))
    for backward in phases:
        times = tuple(side.times[backward][i] for i in operators)
        ticks = inside.backward if backward else inside.forward
        # Without a gradient between them, an operator of the window may run after j as well.
        latest = max(most, *times) + int(ticks.max(axis=1).sum()) + messages
        limits, mirrored = Limits(times, nothing, 0, False), backward != side.behind
        phase = phase_of(model, limits, nowhere, latest, backward=backward, mirrored=mirrored)
        ways.append(phase.start)
    if len(phases) == 2:
        for there, back, i in zip(*ways, operators, strict=True):
            model.cp.add(there + back >= side.both[i])
    least = sum(way[last] for way in ways)
    model.cp.add(least <= most)
    model.cp.minimize(least)
    solver = worker(plan.seed, work)
    parameters = solver.parameters
    parameters.search_branching = parameters.PORTFOLIO_WITH_QUICK_RESTART_SEARCH
    parameters.cp_model_probing_level = parameters.symmetry_level = 0
    status = solver.status_name(solver.solve(model.cp))
    worked = solver.response_proto.deterministic_time
    return (None if status == "INFEASIBLE" else least_of(solver)), worked
