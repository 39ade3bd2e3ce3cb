"""The portfolio: its solvers are asked, every answer is priced by the one evaluator and run by
the one simulator, and the best that fits is the plan. So no plan is worse than plain data
parallelism or any other row of the table.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.costs.bounds import lower_bound_s, memory_shortage, unreplicated_s
from planner.costs.pins import broken, separated
from planner.errors import OptionError
from planner.judging.interpolate import interpolated
from planner.judging.judge import comparable_s, exactly, judge, objective_s, samples_of
from planner.plan import Plan
from planner.problem import Objective, Problem, Result, Status
from planner.profiles import Profile, Source
from planner.solvers.registry import SOLVERS, portfolio
from planner.support.jit import compile_clock
from planner.units import format_seconds

# The search ends when a plan is this close to the lower bound.
GOOD_ENOUGH = 0.01
# Of microbatches between those profiled, so many sizes are planned for.
MOST_BETWEEN = 4
# Of a solver whose turn did not come.
OUT_OF_TIME = "not asked: the time limit was reached"


@dataclass(frozen=True, slots=True)
class Row:
    """What one solver came up with.

    Attributes:
        solver: its name.
        status: of its own space.
        plan: judged; None if it has none that fits.
        reason: why there is none.
        solve_s: how long it took.
        microbatch_size: samples in a microbatch.
        source: how the profile of that size was obtained.
    """

    solver: str
    status: Status
    plan: Plan | None
    reason: str | None
    solve_s: float
    microbatch_size: int
    source: Source


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of all solvers that were asked.

    Attributes:
        rows: in the order of the asking.
        lower_bound_s: for the objective, over all strategies.
        proved_infeasible: whether no strategy can fit, whoever looks for it.
        notes: what was not asked, and why.
    """

    rows: tuple[Row, ...]
    lower_bound_s: float
    proved_infeasible: bool
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Row | None:
        """The row with the best plan; of equals the one with the shorter iteration, then one that
        is optimal in its space, then the earlier one.
        """
        planned = [row for row in self.rows if row.plan is not None]
        return min(
            planned,
            key=_rank,
            default=None,
        )

    @property
    def status(self) -> Status:
        """Of the whole comparison: the best row's, or why there is none."""
        if self.best is not None:
            return self.best.status
        return Status.INFEASIBLE if self.proved_infeasible else Status.UNKNOWN


def _rank(row: Row) -> tuple[float, float, bool]:
    if row.plan is None:
        raise ValueError(f"{row.solver} has no plan")
    optimal = row.status is Status.OPTIMAL
    return comparable_s(row.plan), row.plan.prediction.iteration_s, not optimal


def compare(
    problem: Problem,
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
    *,
    thorough: bool = False,
) -> Comparison:
    """Asks the solvers, the portfolio unless named, and judges their strategies.

    Args:
        names: keys of `SOLVERS`.
        time_limit_s: for all together, compiling left out; what is not begun by then is left out.
        progress: called with each solver's name before it starts.
        thorough: each has the time to itself, and none is left out because a good plan is there.

    Raises:
        OptionError: if a name is unknown.
    """
    unknown = [name for name in names or () if name not in SOLVERS]
    if unknown:
        raise OptionError(f"unknown solver {unknown[0]!r}; known: {', '.join(SOLVERS)}")
    asked = separated(problem)
    problem = replace(problem, options=replace(problem.options, pins=()))
    bound = lower_bound_s(problem)
    shortage, profile = memory_shortage(problem), problem.profile
    size, source = profile.microbatch_size, profile.source
    rows: list[Row] = []
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        for name in names or portfolio():
            left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
            share = SOLVERS[name].time_share
            share_s = share * time_limit_s
            allowed_s = time_limit_s if thorough else min(left_s, share_s)
            reason = None if thorough else _not_asked(problem, name, rows, left_s)
            if shortage is not None:
                rows.append(Row(name, Status.INFEASIBLE, None, shortage, 0.0, size, source))
            elif reason is not None:
                rows.append(Row(name, Status.UNKNOWN, None, reason, 0.0, size, source))
            else:
                progress(name)
                known = tuple(row.plan.strategy for row in rows if row.plan is not None)
                row = _row(problem, replace(asked, known=known), name, allowed_s, bound)
                cut = not thorough and share < 1 and allowed_s < share_s
                rows.append(_not_reproducible(row) if cut else row)
    if any(row.reason == OUT_OF_TIME for row in rows):
        rows = [_not_reproducible(row) for row in rows]
    return Comparison(tuple(rows), bound, shortage is not None)


def _not_asked(problem: Problem, name: str, rows: Sequence[Row], left_s: float) -> str | None:
    """Why a solver is not asked, or None. Plans are never worse than data parallelism, so it always
    is, as long as nothing better is there.
    """
    if any(row.plan and row.plan.certificate.gap <= GOOD_ENOUGH for row in rows):
        return f"not asked: a plan within {GOOD_ENOUGH:.0%} of the bound was found"
    if SOLVERS[name].unreplicated and any(row.plan for row in rows):
        least_s = unreplicated_s(problem)
        if least_s >= min(objective_s(row.plan) for row in rows if row.plan):
            return f"not asked: without replicas nothing is faster than {format_seconds(least_s)}"
    always = SOLVERS[name].always_asked
    return OUT_OF_TIME if left_s <= 0 and rows and not always else None


def compare_sizes(
    problems: Sequence[Problem],
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
) -> Comparison:
    """The same for microbatches of several sizes, of which the best is taken. The lower bound and
    the gaps are over all of them.

    Args:
        problems: the same model, devices and samples per iteration, by size of the microbatch.
        time_limit_s: for all together.
    """
    return _joined(problems, _compare_each(problems, names, time_limit_s, progress))


def compare_between(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
) -> tuple[Comparison, tuple[Problem, ...]]:
    """`compare_sizes`, and then the same for sizes that were not profiled, interpolated: those next
    to the best one, because a microbatch that is too small pays overheads and one that is too large
    empties the pipeline or the memory, and the best is somewhere between. At most `MOST_BETWEEN`
    are asked, powers of two and the nearest first; none whose lower bound is above what is there.

    Args:
        problems: as `compare_sizes` takes them.
        profiles: all there are, ascending by size, also those of sizes that are no problem because
            they do not divide the samples.

    Returns:
        The comparison, and all problems that were asked, ascending by size.
    """
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        between = _sizes_between(problems, profiles)
        share = len(problems) / (len(problems) + min(len(between), MOST_BETWEEN))
        found = _compare_each(problems, names, time_limit_s * share, progress)
        added, notes = _between(problems, profiles, between, _joined(problems, found))
        left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
        found += _compare_each(added, names, left_s, progress)
    pairs = sorted(
        zip((*problems, *added), found, strict=True),
        key=lambda pair: pair[0].profile.microbatch_size,
    )
    asked = tuple(problem for problem, _ in pairs)
    joined = _joined(asked, [comparison for _, comparison in pairs])
    return replace(joined, notes=notes), asked


def _sizes_between(problems: Sequence[Problem], profiles: Sequence[Profile]) -> tuple[int, ...]:
    """The sizes that divide the samples of an iteration and lie between those profiled."""
    samples = problems[0].profile.microbatch_size * problems[0].options.num_microbatches
    profiled = [profile.microbatch_size for profile in profiles]
    sizes = range(profiled[0] + 1, profiled[-1])
    return tuple(n for n in sizes if samples % n == 0 and n not in profiled)


def _between(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    between: Sequence[int],
    found: Comparison,
) -> tuple[list[Problem], tuple[str, ...]]:
    """Problems of interpolated sizes that may have a better plan than was found, and which sizes
    have none and why.
    """
    best, sizes = found.best, [problem.profile.microbatch_size for problem in problems]
    # Where nothing fits, only what is smaller may.
    near = sizes[0] if best is None else best.microbatch_size
    low = max((n for n in sizes if n < near), default=0)
    high = min((n for n in sizes if n > near), default=math.inf) if best else near
    candidates = [n for n in between if low < n < high]
    candidates.sort(key=lambda n: (n.bit_count() > 1, abs(math.log(n / near)), n))
    samples = sizes[0] * problems[0].options.num_microbatches
    added, notes = [], []
    for size in candidates[:MOST_BETWEEN]:
        try:
            profile = interpolated(profiles, size)
        except OptionError as error:
            notes.append(str(error))
            continue
        options = replace(problems[0].options, num_microbatches=samples // size)
        problem = replace(problems[0], profile=profile, options=options)
        if best is None or best.plan is None or _may_beat(problem, best.plan):
            added.append(problem)
    return sorted(added, key=lambda one: one.profile.microbatch_size), tuple(notes)


def _may_beat(problem: Problem, plan: Plan) -> bool:
    bottleneck = problem.options.objective is Objective.BOTTLENECK
    samples = problem.profile.microbatch_size if bottleneck else 1
    return lower_bound_s(problem) / samples < comparable_s(plan)


def _compare_each(
    problems: Sequence[Problem],
    names: Sequence[str] | None,
    time_limit_s: float,
    progress: Callable[[str], None],
) -> list[Comparison]:
    """Each problem by itself, within a time for all together."""
    found = []
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        for index, problem in enumerate(problems):
            left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
            found.append(compare(problem, names, left_s / (len(problems) - index), progress))
    return found


def _joined(problems: Sequence[Problem], found: Sequence[Comparison]) -> Comparison:
    """One comparison of those of several sizes."""
    if len(found) == 1:
        return found[0]
    rows = tuple(row for one in found for row in one.rows)
    if any(row.reason == OUT_OF_TIME for row in rows):
        rows = tuple(_not_reproducible(row) for row in rows)
    bottleneck = problems[0].options.objective is Objective.BOTTLENECK
    samples = [p.profile.microbatch_size if bottleneck else 1 for p in problems]
    bound_s = min(one.lower_bound_s / n for one, n in zip(found, samples, strict=True))
    return Comparison(
        tuple(_bounded(row, bound_s) for row in rows),
        bound_s * min(samples),
        all(one.proved_infeasible for one in found),
    )


def _bounded(row: Row, bound_s: float) -> Row:
    """The row with a gap to a bound per sample or per iteration, as `samples_of` says."""
    if row.plan is None:
        return row
    own_s = bound_s * samples_of(row.plan)
    gap = objective_s(row.plan) / own_s - 1 if own_s > 0 else 0.0
    certificate = replace(row.plan.certificate, lower_bound_s=own_s, gap=gap)
    return replace(row, plan=replace(row.plan, certificate=certificate))


def _row(problem: Problem, asked: Problem, name: str, time_limit_s: float, bound_s: float) -> Row:
    """One solver's answer, judged.

    Args:
        problem: as it is.
        asked: as the solver sees it.
    """
    start = time.monotonic()
    result, plan = SOLVERS[name](asked, time_limit_s), None
    if result.strategy is not None:
        result, reason = _without_broken(asked, result)
        if result.strategy is not None:
            plan, reason = judge(problem, name, result, bound_s)
        result = result if plan else _without_plan(result, reason)
    took_s, size = time.monotonic() - start, problem.profile.microbatch_size
    return Row(name, result.status, plan, result.reason, took_s, size, problem.profile.source)


def _without_broken(problem: Problem, result: Result) -> tuple[Result, str | None]:
    """The result without strategies that break a pin; why, if none is left."""
    if not problem.options.pins or result.strategy is None:
        return result, None
    reasons = {one: broken(problem, one) for one in (result.strategy, *result.others)}
    kept = [one for one, reason in reasons.items() if reason is None]
    if not kept:
        return _without_plan(result, reasons[result.strategy]), reasons[result.strategy]
    return replace(result, strategy=kept[0], others=tuple(kept[1:])), None


def _not_reproducible(row: Row) -> Row:
    return row if row.plan is None else replace(row, plan=replace(row.plan, reproducible=False))


def _without_plan(result: Result, reason: str | None) -> Result:
    return Result(Status.UNKNOWN, None, space=result.space, reason=reason)


def under_pipedream(problem: Problem) -> Comparison:
    """PipeDream's plan alone, as its own cost model judges it. The plan is priced and simulated
    like every other one, but kept if it does not fit by the planner's count, which a note says.
    """
    from planner.solvers.pipedream.solve import solve_alone  # compiled: loaded when it is asked

    start, bound_s = time.monotonic(), lower_bound_s(problem)
    name, result, plan = "pipedream", solve_alone(problem), None
    if result.strategy is not None:
        plan, _, _ = exactly(problem, name, result, bound_s)
        note = "chosen by PipeDream's cost model; the prediction is the planner's"
        plan = replace(plan, notes=(*plan.notes, note))
    took_s, size = time.monotonic() - start, problem.profile.microbatch_size
    row = Row(name, result.status, plan, result.reason, took_s, size, problem.profile.source)
    return Comparison((row,), bound_s, result.status is Status.INFEASIBLE)
