"""The portfolio: its solvers are asked, the judge prices and simulates every answer, and the best
that fits is the plan. So no plan is worse than plain data parallelism or any other row of the
table.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.costs.bounds import lower_bound_s, memory_shortage, unreplicated_s
from planner.costs.pins import broken, separated
from planner.errors import OptionError
from planner.judging.judge import (
    Verdict,
    as_plan,
    gap_to,
    judge,
    judge_unchanged,
    predicted_s,
    samples_in,
)
from planner.plan import Plan, Prediction
from planner.problem import Objective, Problem, Result, Status
from planner.profiles import Source, has_rules
from planner.solvers.registry import SOLVERS, portfolio
from planner.support.jit import compile_clock
from planner.units import format_seconds

# The search ends when a plan is this close to the lower bound.
GOOD_ENOUGH = 0.01
# The reason of a solver whose turn did not come.
OUT_OF_TIME = "not asked: the time limit was reached"


@dataclass(frozen=True, slots=True)
class SolverRow:
    """A solver's plan, or why it has none.

    Attributes:
        solver: its name.
        status: of its own space.
        plan: judged; None if it has none that fits.
        reason: why there is none.
        solve_s: time of the search and of the judge.
        microbatch_size: samples in a microbatch.
        source: origin of the profile of that size.
        report: the solver's own figures, if it has some.
        shortage: why the plan does not fit by the planner's count; None if it does. Only a solver
            that was asked to count as it was published has such a plan.
        short_of_memory: whether there may be a plan where devices have more memory.
    """

    solver: str
    status: Status
    plan: Plan | None
    reason: str | None
    solve_s: float
    microbatch_size: int
    source: Source
    report: object | None = None
    shortage: str | None = None
    short_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class SolverComparison:
    """The rows of all solvers that were asked.

    Attributes:
        rows: in the order of the asking.
        lower_bound_s: for the objective, over all strategies (`costs/bounds.py`) with microbatches
            of the sizes in the rows.
        proved_infeasible: whether no strategy of any solver can fit.
        notes: questions that were not asked, and why.
    """

    rows: tuple[SolverRow, ...]
    lower_bound_s: float
    proved_infeasible: bool
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> SolverRow | None:
        """The row with the best plan, one that fits if there is any; of equals the one with the
        shorter iteration, then one that is optimal in its space, then the earlier one.
        """
        ranked = [
            ((row.shortage is not None, *_rank_of(row.plan, row)), row)
            for row in self.rows
            if row.plan is not None
        ]
        return min(ranked, key=lambda one: one[0])[1] if ranked else None

    @property
    def status(self) -> Status:
        """Of the whole comparison: the best row's, or why there is none."""
        if self.best is not None:
            return self.best.status
        return Status.INFEASIBLE if self.proved_infeasible else Status.UNKNOWN


Rank = tuple[float, float, bool]


def _rank_of(plan: Plan, row: SolverRow) -> Rank:
    objective = Objective(plan.certificate.objective)
    return _rank(plan.prediction, objective, row.microbatch_size, row.status)


def _rank(prediction: Prediction, objective: Objective, size: int, status: Status) -> Rank:
    """Smaller is better: objective per sample or iteration, then iteration, then optimality."""
    value_s = predicted_s(prediction, objective) / samples_in(objective, size)
    return value_s, prediction.iteration_s, status is not Status.OPTIMAL


@dataclass(frozen=True, slots=True)
class Attempt:
    """A solver's answer to one problem, before it is a plan.

    Attributes:
        solver: its name.
        result: its answer.
        verdict: the judge's; None if there is no strategy that fits.
        solve_s: time of the search and of the judge.
    """

    solver: str
    result: Result
    verdict: Verdict | None = None
    solve_s: float = 0.0

    @property
    def fitting(self) -> Verdict | None:
        """The verdict, if the plan fits."""
        return None if self.verdict is None or self.verdict.shortage else self.verdict


@dataclass(frozen=True, slots=True)
class Attempts:
    """One problem, and the answers of all solvers that were asked.

    Attributes:
        problem: without pins.
        lower_bound_s: for its objective.
        shortage: proof that nothing fits, or None.
        of_solvers: in the order of the asking.
    """

    problem: Problem
    lower_bound_s: float
    shortage: str | None
    of_solvers: tuple[Attempt, ...]

    @property
    def best_rank(self) -> Rank | None:
        """Of the best attempt; None if no plan fits."""
        size, objective = self.problem.profile.microbatch_size, self.problem.options.objective
        return min(
            (
                _rank(one.fitting.prediction, objective, size, one.result.status)
                for one in self.of_solvers
                if one.fitting is not None
            ),
            default=None,
        )


def compare(
    problem: Problem,
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
    *,
    thorough: bool = False,
) -> SolverComparison:
    """Asks the solvers, the portfolio unless named, and judges their strategies.

    Args:
        names: keys of `SOLVERS`.
        time_limit_s: for all together, without compiling; a solver not begun by then is left out.
        progress: called with each solver's name before it starts.
        thorough: each has the time to itself, and none is left out because a good plan is there.

    Raises:
        OptionError: if a name is unknown.
    """
    return comparison([attempts(problem, names, time_limit_s, progress, thorough=thorough)])


def attempts(
    problem: Problem,
    names: Sequence[str] | None,
    time_limit_s: float,
    progress: Callable[[str], None],
    *,
    thorough: bool = False,
) -> Attempts:
    """The solvers' answers, each judged; arguments and errors as of `compare`."""
    unknown = [name for name in names or () if name not in SOLVERS]
    if unknown:
        raise OptionError(f"unknown solver {unknown[0]!r}; known: {', '.join(SOLVERS)}")
    # Solvers see pins as types of devices (`costs/pins.py`). The bound and the judge need no pins:
    # a bound over all strategies holds for those that keep the pins, too.
    asked = separated(problem)
    if problem.options.pins:
        problem = replace(problem, options=replace(problem.options, pins=()))
    bound_s, shortage = lower_bound_s(problem), memory_shortage(problem)
    made: list[Attempt] = []
    answers: dict[str, Result] = {}
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        for name in names or portfolio(splits=has_rules(problem.profile)):
            left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
            share = SOLVERS[name].time_share
            share_s = share * time_limit_s
            allowed_s = time_limit_s if thorough else min(left_s, share_s)
            reason = None if thorough else _not_asked(problem, name, made, left_s, bound_s)
            if shortage is not None and SOLVERS[name].counts_memory(problem.options):
                result = Result(Status.INFEASIBLE, None, reason=shortage, short_of_memory=True)
                made.append(Attempt(name, result))
            elif reason is not None:
                made.append(Attempt(name, Result(Status.UNKNOWN, None, reason=reason)))
            else:
                progress(name)
                known = tuple(one.fitting.strategy for one in made if one.fitting is not None)
                start = time.monotonic()
                # A solver that another one starts from may have answered already.
                if name not in answers:
                    answers[name] = SOLVERS[name](asked, allowed_s, known, answers)
                until_s = start + allowed_s if thorough else begin + time_limit_s

                def over(until_s: float = until_s) -> bool:
                    return time.monotonic() - compiling_s() > until_s

                attempt = _judged(problem, asked, name, answers[name], start, over)
                # A search that uses all its time and got less than its share was cut by the clock.
                cut = not thorough and share < 1 and allowed_s < share_s
                made.append(_not_reproducible(attempt) if cut else attempt)
    return Attempts(problem, bound_s, shortage, tuple(made))


def _not_asked(
    problem: Problem, name: str, made: Sequence[Attempt], left_s: float, bound_s: float
) -> str | None:
    """Why a solver is not asked, or None. Plans are never worse than data parallelism, so it always
    is, as long as nothing better is there.

    Args:
        made: the attempts before it.
    """
    solver, objective = SOLVERS[name], problem.options.objective
    values = [predicted_s(one.fitting.prediction, objective) for one in made if one.fitting]
    if any(gap_to(bound_s, value_s) <= GOOD_ENOUGH for value_s in values):
        return f"not asked: a plan within {GOOD_ENOUGH:.0%} of the bound was found"
    if solver.unreplicated and values:
        least_s = unreplicated_s(problem)
        if least_s >= min(values):
            return f"not asked: without replicas nothing is faster than {format_seconds(least_s)}"
    return OUT_OF_TIME if left_s <= 0 and made and not solver.always_asked else None


def _judged(
    problem: Problem,
    asked: Problem,
    name: str,
    result: Result,
    start: float,
    over: Callable[[], bool],
) -> Attempt:
    """One solver's answer, judged.

    Args:
        problem: as it is.
        asked: as the solver sees it.
        start: of the search, by the monotonic clock.
        over: whether the time for judging is over.
    """
    verdict = None
    if result.strategy is not None:
        result = _without_broken(asked, result)
    if result.strategy is not None:
        verdict, shortage = judge(problem, name, result, over)
        if verdict is None and result.unfit:
            verdict, _ = judge_unchanged(problem, result.strategy)
        if verdict is None:
            result = replace(_without_strategy(result, shortage), short_of_memory=True)
    attempt = Attempt(name, result, verdict, time.monotonic() - start)
    return _not_reproducible(attempt) if verdict is not None and verdict.cut else attempt


def _without_broken(problem: Problem, result: Result) -> Result:
    """The result without strategies that break a pin."""
    if not problem.options.pins or result.strategy is None:
        return result
    reasons = {one: broken(problem, one) for one in (result.strategy, *result.others)}
    kept = [one for one, reason in reasons.items() if reason is None]
    if not kept:
        return _without_strategy(result, reasons[result.strategy])
    return replace(result, strategy=kept[0], others=tuple(kept[1:]))


def _not_reproducible(attempt: Attempt) -> Attempt:
    return replace(attempt, result=replace(attempt.result, reproducible=False))


def _without_strategy(result: Result, reason: str | None) -> Result:
    return Result(Status.UNKNOWN, None, space=result.space, reason=reason, report=result.report)


def comparison(of_sizes: Sequence[Attempts], notes: tuple[str, ...] = ()) -> SolverComparison:
    """The rows of all attempts at one problem, or at the same problem with microbatches of several
    sizes. Here plans are made: with the lower bound over all sizes, per sample for a bottleneck.
    """
    several = len(of_sizes) > 1
    objective = of_sizes[0].problem.options.objective
    samples = [
        samples_in(objective, one.problem.profile.microbatch_size) if several else 1
        for one in of_sizes
    ]
    bound_s = min(one.lower_bound_s / n for one, n in zip(of_sizes, samples, strict=True))
    timely = not any(
        attempt.result.reason == OUT_OF_TIME for one in of_sizes for attempt in one.of_solvers
    )
    rows = tuple(
        _row(one.problem, attempt if timely else _not_reproducible(attempt), bound_s * n, several)
        for one, n in zip(of_sizes, samples, strict=True)
        for attempt in one.of_solvers
    )
    proved = all(one.shortage is not None for one in of_sizes)
    return SolverComparison(rows, bound_s * min(samples), proved, (*notes, *_cut_notes(of_sizes)))


def _cut_notes(of_sizes: Sequence[Attempts]) -> tuple[str, ...]:
    """A line on the searches that the time limit cut, if there are any."""
    names = dict.fromkeys(
        attempt.solver
        for one in of_sizes
        for attempt in one.of_solvers
        if attempt.verdict is not None and not attempt.result.reproducible
    )
    if not names:
        return ()
    return (f"the time limit cut the search of {', '.join(names)}; --time-limit gives more",)


def _row(problem: Problem, attempt: Attempt, bound_s: float, of_sizes: bool) -> SolverRow:
    result, verdict, plan = attempt.result, attempt.verdict, None
    if verdict is not None:
        plan = as_plan(problem, attempt.solver, result, verdict, bound_s, of_sizes=of_sizes)
    return SolverRow(
        solver=attempt.solver,
        status=result.status,
        plan=plan,
        reason=result.reason,
        solve_s=attempt.solve_s,
        microbatch_size=problem.profile.microbatch_size,
        source=problem.profile.source,
        report=result.report,
        shortage=None if verdict is None else verdict.shortage,
        short_of_memory=result.short_of_memory,
    )


def under_pipedream(problem: Problem) -> SolverComparison:
    """PipeDream's plan alone, as its own cost model judges it, with PipeDream's schedule. The plan
    is priced and simulated like every other one, but kept if it does not fit by the planner's
    count, which a note says.
    """
    from planner.solvers.pipedream.solve import solve_alone  # compiled: loaded when it is asked

    start, result, verdict = time.monotonic(), solve_alone(problem), None
    if result.strategy is not None:
        asked, strategy = problem.options.num_microbatches, result.strategy
        options = replace(
            problem.options,
            schedule=strategy.schedule,
            num_microbatches=strategy.num_microbatches,
        )
        problem = replace(problem, options=options)
        verdict, _ = judge_unchanged(problem, strategy)
        notes = ["chosen by PipeDream's cost model; the prediction is the planner's"]
        if strategy.num_microbatches != asked:
            notes.append(
                f"an iteration has {strategy.num_microbatches} microbatches, not {asked}, so that"
                " all replicas of each stage have equally many"
            )
        verdict = replace(verdict, notes=(*verdict.notes, *notes))
    attempt = Attempt("pipedream", result, verdict, time.monotonic() - start)
    shortage = result.reason if result.status is Status.INFEASIBLE else None
    return comparison([Attempts(problem, lower_bound_s(problem), shortage, (attempt,))])
