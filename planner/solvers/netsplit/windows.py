"""Bounds that hold in every schedule of NetSplit's full model, beyond `bounds.py`: small parts of
the graph are solved, each on top of the bounds of those before it.

Legend: a_i, b_i ticks of forward and backward of i on its fastest device; h_i the least ticks
before the forward of i, h'_i behind its backward; F, B the lengths of the phases. Read from its
end, the phase of backwards is one of forwards: it takes the same path through the graph, and h' is
its h.

    (w1) the window of j are the few operators with the largest h + h' of all that come before j.
         No schedule of all operators starts j earlier than the best schedule of j and its window
         alone, in which no i starts before h_i: leaving out operators and keeping their heads
         only relaxes the model. The same holds for h'                               `_least`
    (w2) a placement that is good for the forwards of a window may be bad for its backwards:
         J_j is the least sum of the ticks before the forward of j and behind its backward, by one
         placement of the window whose operators respect h, h' and J themselves      `_least`
    (w3) the same behind j, with the graph reversed: tails, and K for J              `_swept`
    (w4) F + B >= J_j + a_j + b_j + K_j                                              `windowed`

(w2) sees what bounds of single phases cannot: the best forwards and the best backwards want
different placements. Operators before and behind are swept at once, by a thread each. All limits
are of deterministic work.

Source: this project's; windows are the subproblem bounds of job-shop scheduling (Carlier and
Pinson, Management Science 35(2), 1989) with placements for sequences.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from planner.artefacts.problem import Status
from planner.solvers.netsplit.bounds import PhaseBounds, SubproblemBounds
from planner.solvers.netsplit.cpsat_call import (
    CONSTRAINTS_PER_S,
    SearchBudget,
    answer_of,
    worker,
)
from planner.solvers.netsplit.cpsat_model import (
    add_apart,
    add_phase,
    model_of,
    num_constraints,
)
from planner.solvers.netsplit.cpsat_ports import add_ports
from planner.solvers.netsplit.jobs import OPERATOR
from planner.solvers.netsplit.model import (
    KnownPlacement,
    NetSplitInstance,
    part,
    ticks_by_way,
)

SIZES = ((18, 0.01), (14, 0.005), (10, 0.002), (7, 0.001), (5, 0.0006))
"""Operators of a window, and units of deterministic work for an operator's three windows of that
size, measured on 4 devices; the first size that the limit allows is taken."""

LINKED_SIZES = ((14, 0.1), (12, 0.04), (10, 0.014), (8, 0.007), (6, 0.003))
"""The same with shared links."""

# Tried and left: windows between the operators before and a limit from the best plan, which raised
# the bounds by less than 0.1 %.
EACH = 2.0
"""A single window gets at most this multiple of the work of three."""

WINDOWS_PER_S = 0.07
"""Units of deterministic work per second of the limit; each of two sweeps did 0.05 to 0.1."""

MAX_BUILD = 2.0
"""Seconds for building the models of all windows, per second of the limit, above which none is
solved."""

RISE = 0.002
"""A window is first asked for a solution within this share of its bound, then twice as far."""


BOTH = 2
"""Row of both phases together."""

Rows = list[list[int]]
"""(3, N) ticks before each operator, or behind it, in the forwards' direction: in the forwards, in
the backwards, and J or K of both."""


def windowed(
    instance: NetSplitInstance, bounds: SubproblemBounds, budget: SearchBudget, share: float
) -> SubproblemBounds:
    """Better bounds.

    Args:
        bounds: those before.
        share: largest share of the budget's rest.
    """
    each = share * budget.left_s * WINDOWS_PER_S / instance.problem.num_operators
    sizes = LINKED_SIZES if instance.problem.shared else SIZES
    size = next((one for one in sizes if one[1] <= each), None)
    return windows_of_size(instance, bounds, budget, share, size) if size else bounds


def windows_of_size(
    instance: NetSplitInstance,
    bounds: SubproblemBounds,
    budget: SearchBudget,
    share: float,
    size: tuple[int, float],
) -> SubproblemBounds:
    """`windowed` with windows of a given size.

    Args:
        bounds: those before.
        share: largest share of the budget's rest.
        size: operators of a window, units of deterministic work for an operator's three windows.
    """
    limit = share * budget.left_s * WINDOWS_PER_S
    operators, work = size
    # Three windows of each operator, whose models together are as many times that of all.
    constraints = 3 * operators * num_constraints(instance, (False, True), channels=False)
    if constraints / CONSTRAINTS_PER_S > MAX_BUILD * share * budget.left_s:
        return bounds
    settings = _WindowSettings(
        instance, bounds, operators, EACH * work, limit, budget.seed, budget.over
    )
    with ThreadPoolExecutor(2) as beside:
        sweeps = [beside.submit(_swept, settings, behind) for behind in (False, True)]
        before, after = budget.watch.run(lambda: [sweep.result() for sweep in sweeps], lambda: None)
    budget.left_s -= max(before.worked, after.worked) / WINDOWS_PER_S
    return bounds_of_rows(instance, bounds, before.rows, after.rows)


@dataclass(frozen=True, slots=True)
class _WindowSettings:
    """How windows are solved.

    Attributes:
        bounds: those before the windows.
        size: operators of a window.
        each: units of work for one window at most; limit: for a sweep.
        seed: seed of the engine.
        over: says before each window whether to end.
    """

    instance: NetSplitInstance
    bounds: SubproblemBounds
    size: int
    each: float
    limit: float
    seed: int
    over: Callable[[], bool]


def rows_of(bounds: SubproblemBounds, *, behind: bool) -> Rows:
    """The bounds of a side, to be raised."""
    forward, backward = bounds.phases
    before = (forward.head, backward.tail, bounds.before)
    after = (forward.tail, backward.head, bounds.behind)
    return [list(row) for row in (after if behind else before)]


def bounds_of_rows(
    instance: NetSplitInstance, known: SubproblemBounds, before: Rows, behind: Rows
) -> SubproblemBounds:
    """The bounds that both sides give together.

    Args:
        known: bounds of the lengths before.
    """
    ticks = _least_ticks(instance)
    phases = []
    for backward, one in enumerate(known.phases):
        through = zip(before[backward], ticks[backward], behind[backward], strict=True)
        first, last = (behind, before) if backward else (before, behind)
        head, tail = tuple(first[backward]), tuple(last[backward])
        phases.append(replace(one, head=head, tail=tail, least=max(one.least, *map(sum, through))))
    whole = zip(before[BOTH], *ticks, behind[BOTH], strict=True)
    least = max(sum(phase.least for phase in phases), *map(sum, whole))
    return SubproblemBounds(tuple(phases), tuple(before[BOTH]), tuple(behind[BOTH]), least)


def _least_ticks(instance: NetSplitInstance) -> tuple[list[int], list[int]]:
    """(N,) a and (N,) b."""
    return instance.forward.min(axis=1).tolist(), instance.backward.min(axis=1).tolist()


@dataclass(slots=True)
class _Sweep:
    """The sweep of a side.

    Attributes:
        behind: whether it is of what lies behind each operator.
        rows: the bounds so far; worked: units of deterministic work so far.
    """

    behind: bool
    rows: Rows
    worked: float = 0.0


def _swept(settings: _WindowSettings, behind: bool) -> _Sweep:
    """The bounds of a side, over all operators in topological order or its reverse: when an
    operator's window is solved, the bounds of those in it are final.
    """
    instance, sweep = settings.instance, _Sweep(behind, rows_of(settings.bounds, behind=behind))
    num, near, rows = instance.problem.num_operators, _near(instance, behind), sweep.rows
    ticks = _least_ticks(instance)
    all_before: list[set[int]] = [set() for _ in range(num)]
    for j in reversed(range(num)) if behind else range(num):
        for i in near[j]:
            all_before[j] |= all_before[i] | {i}
        _pass_on(rows, near[j], ticks, j)
        # Any window gives a bound. The operators with the largest times are ready last.
        ranked = sorted(all_before[j], key=lambda i: (-rows[False][i] - rows[True][i], i))
        for phases in ((False,), (True,), (False, True)):
            if ranked and sweep.worked < settings.limit and not settings.over():
                window = _window(instance, j, ranked[: settings.size], phases)
                best = rows[BOTH if len(phases) == 2 else phases[0]]
                best[j] = max(best[j], _least(settings, sweep, window))
        rows[BOTH][j] = max(rows[BOTH][j], rows[False][j] + rows[True][j])
    return sweep


def pass_on(instance: NetSplitInstance, rows: Rows, *, behind: bool) -> None:
    """Raises the bounds of a side by those of the operators before each one, or behind it."""
    near, ticks = _near(instance, behind), _least_ticks(instance)
    for j in sorted(range(instance.problem.num_operators), reverse=behind):
        _pass_on(rows, near[j], ticks, j)
        rows[BOTH][j] = max(rows[BOTH][j], rows[False][j] + rows[True][j])


def _pass_on(
    rows: Rows, near: Mapping[int, bool], ticks: tuple[list[int], list[int]], j: int
) -> None:
    """The same for operator j.

    Args:
        near: the neighbours of j on that side; ticks: a, b.
    """
    for i, gradient in near.items():
        # Without a gradient, the backward of i does not wait for that of j.
        for backward in (False, True) if gradient else (False,):
            own = rows[backward]
            own[j] = max(own[j], own[i] + ticks[backward][i])
        # The forward of j comes after that of i, its backward before that of i: the sum grows by
        # both durations of i, wherever the two are placed.
        if gradient:
            rows[BOTH][j] = max(rows[BOTH][j], rows[BOTH][i] + ticks[0][i] + ticks[1][i])


def _near(instance: NetSplitInstance, behind: bool) -> list[dict[int, bool]]:
    """The neighbours before each operator, or behind it, and whether a gradient comes back."""
    near: list[dict[int, bool]] = [{} for _ in range(instance.problem.num_operators)]
    for tensor in instance.problem.tensors:
        for j in tensor.consumers:
            here, there = (tensor.producer, j) if behind else (j, tensor.producer)
            near[here][there] = near[here].get(there, False) or tensor.gradient
    return near


@dataclass(frozen=True, slots=True)
class _Window:
    """An operator and its window.

    Attributes:
        j: the operator.
        operators: j and the window, ascending.
        part: the model of these operators alone.
        phases: False for forwards, True for backwards.
    """

    j: int
    operators: tuple[int, ...]
    part: NetSplitInstance
    phases: tuple[bool, ...]


def _window(
    instance: NetSplitInstance, j: int, window: Sequence[int], phases: tuple[bool, ...]
) -> _Window:
    operators = tuple(sorted((*window, j)))
    return _Window(j, operators, part(instance, operators), phases)


def _least(settings: _WindowSettings, sweep: _Sweep, window: _Window) -> int:
    """(w1) or, with both phases, (w2): the least ticks on a side of j that its window allows.

    Mostly that is the bound known before, so solutions near it are asked for first. When the work
    ends, every limit that had no solution is proved.
    """
    least = sum(sweep.rows[backward][window.j] for backward in window.phases)
    if len(window.phases) == 2:
        least = max(least, sweep.rows[BOTH][window.j])
    work, rise = settings.each, RISE
    while work > 0:
        max_ticks = int((1 + rise) * least)
        bound, worked = _within(settings, sweep, window, max_ticks, work)
        sweep.worked += worked
        work -= worked
        if bound is not None:
            return max(least, bound)
        # No solution within `max_ticks`, and ticks are whole.
        least, rise = max_ticks + 1, 2 * rise
    return least


def _within(
    settings: _WindowSettings, sweep: _Sweep, window: _Window, max_ticks: int, work: float
) -> tuple[int | None, float]:
    """A lower bound of the window, None if all its solutions take more than `max_ticks`; and the
    units of work that it took.
    """
    nothing = (0,) * len(window.operators)
    # Without (7) and (8): a model with fewer constraints has no larger optimum, so the bound holds.
    model = model_of(window.part, KnownPlacement(nothing, False, 0), memory=False)
    add_apart(model)
    starts, last = [], window.operators.index(window.j)
    slowest = ticks_by_way(window.part)[1].max(axis=1).tolist()
    tensors = window.part.problem.tensors
    transfers = sum(
        len(tensor.consumers) * ticks for tensor, ticks in zip(tensors, slowest, strict=True)
    )
    for backward in window.phases:
        times = tuple(sweep.rows[backward][i] for i in window.operators)
        ticks = window.part.backward if backward else window.part.forward
        # An operator of the window that sends j no gradient may run after j; then the phase ends up
        # to all work and all transfers later.
        latest = max(max_ticks, *times) + int(ticks.max(axis=1).sum()) + transfers
        # What runs behind j in its phase is counted from the end of the phase: forwards of later
        # operators, backwards of earlier ones.
        bounds, mirrored = PhaseBounds(times, nothing, 0, False), backward != sweep.behind
        phase = add_phase(model, bounds, latest, backward=backward, mirrored=mirrored)
        add_ports(phase)
        starts.append([phase.start[OPERATOR, k] for k in range(len(nothing))])
    if len(window.phases) == 2:
        for there, back, i in zip(*starts, window.operators, strict=True):
            model.cp.add(there + back >= sweep.rows[BOTH][i])
    least = sum(start[last] for start in starts)
    model.cp.add(least <= max_ticks)
    model.cp.minimize(least)
    solver = worker(settings.seed, work)
    parameters = solver.parameters
    parameters.search_branching = parameters.PORTFOLIO_WITH_QUICK_RESTART_SEARCH
    parameters.cp_model_probing_level = parameters.symmetry_level = 0
    answer = answer_of(solver, model.cp, solver.solve(model.cp))
    worked = solver.response_proto.deterministic_time
    return (None if answer.status is Status.INFEASIBLE else int(answer.bound)), worked
