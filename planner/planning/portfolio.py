"""The portfolio: its solvers are asked, the judge prices and simulates every answer, and the best
that fits is the plan. So no plan is worse than plain data parallelism or any other row of the
table.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module

from planner.artefacts.options import Objective
from planner.artefacts.plan import Plan, Prediction
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import Source, has_rules
from planner.artefacts.strategy import Strategy
from planner.costs.bounds import lower_bound_s, memory_shortage, unreplicated_s
from planner.costs.transfers import allreduce_s
from planner.planning.beside import beside
from planner.planning.joint import Joined, joined
from planner.planning.judge import (
    Verdict,
    as_plan,
    gap_to,
    judge,
    judge_unchanged,
    objective_s,
    predicted_s,
    samples_in,
)
from planner.planning.pins import violated_pin, with_pinned_types
from planner.solvers.engines.watch import INTERRUPTED
from planner.solvers.registry import SOLVERS, portfolio
from planner.solvers.sharded.layout import host_by_host, smallest_host
from planner.support.brake import TIMES, Brake, braked, stopwatch
from planner.support.errors import OptionError
from planner.support.units import format_seconds

# The search ends when a plan is this close to the lower bound.
GOOD_ENOUGH = 0.01
# The reason of a solver for which no work was left.
OUT_OF_TIME = "not asked: the time limit was reached"
# The reason of a solver that waits for plans to beat, as long as it is not asked.
NOT_YET = "not asked: other solvers had a good plan, or the time limit was reached"
# The questions of a round, each in a process of its own where there are as many cores.
PROCESSES = 2
# The work of judging variants of a first answer, in seconds of an ordinary core.
FIRST_JUDGED_S = 0.1
# The share of the limit that first answers leave to solvers that wait for them, if any do.
WAITING = 0.3
# Sums over all devices that count as fast as those over a host, by their time over that, and size.
FAST_NETWORK, SUM_BYTES = 2.0, 10**9
# Questions that take less work, or about smaller graphs, are not worth a process.
LEAST_BESIDE_S, FEW_OPERATORS = 0.5, 100


Rank = tuple[float, float, bool]


def _rank(prediction: Prediction, objective: Objective, size: int, status: Status) -> Rank:
    """Smaller is better: objective per sample or iteration, then iteration, then optimality."""
    value_s = predicted_s(prediction, objective) / samples_in(objective, size)
    return value_s, prediction.iteration_s, status is not Status.OPTIMAL


@dataclass(frozen=True, slots=True)
class Answer:
    """A solver's answer to one problem, before it is a plan.

    Attributes:
        solver: its name.
        result: its answer.
        verdict: the judge's; None if there is no strategy that fits.
        solve_s: time of the search and of the judge, by the clock on the wall, without that of
            compiling; None if the solver was not asked.
        work_s: their work, in seconds of an ordinary core: counted, not measured.
    """

    solver: str
    result: Result
    verdict: Verdict | None = None
    solve_s: float | None = None
    work_s: float = 0.0

    @property
    def fitting(self) -> Verdict | None:
        """The verdict, if the plan fits."""
        return None if self.verdict is None or self.verdict.shortage else self.verdict


@dataclass(frozen=True, slots=True)
class Answers:
    """One problem, and the answers of all solvers that were asked.

    Attributes:
        problem: without pins.
        lower_bound_s: for its objective.
        shortage: proof that nothing fits, or None.
        answers: in the order of the asking.
        cut: whether the brake ended the search.
        left: solvers whose first answer no work was left to improve.
    """

    problem: Problem
    lower_bound_s: float
    shortage: str | None
    answers: tuple[Answer, ...]
    cut: bool = False
    left: tuple[str, ...] = ()

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch."""
        return self.problem.profile.microbatch_size

    @property
    def ranks(self) -> Mapping[str, Rank]:
        """Of the plans that fit, by solver."""
        objective = self.problem.training.objective
        return {
            one.solver: _rank(
                one.fitting.prediction, objective, self.microbatch_size, one.result.status
            )
            for one in self.answers
            if one.fitting is not None
        }

    @property
    def best_rank(self) -> Rank | None:
        """Of the best answer; None if no plan fits."""
        return min(self.ranks.values(), default=None)


@dataclass(frozen=True, slots=True)
class Row:
    """A solver's answer to one problem, as a plan where it has one.

    Attributes:
        problem: without pins.
        answer: the solver's.
        plan: judged; None if it has none that fits.
    """

    problem: Problem
    answer: Answer
    plan: Plan | None

    @property
    def solver(self) -> str:
        """Its name."""
        return self.answer.solver

    @property
    def status(self) -> Status:
        """Of the solver's own space."""
        return self.answer.result.status

    @property
    def reason(self) -> str | None:
        """Why there is no plan; None if there is one."""
        return self.answer.result.reason

    @property
    def solve_s(self) -> float | None:
        """Time of the search and of the judge, by the clock on the wall; None if the solver was not
        asked.
        """
        return self.answer.solve_s

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch."""
        return self.problem.profile.microbatch_size

    @property
    def source(self) -> Source:
        """Origin of the profile of that size."""
        return self.problem.profile.source

    @property
    def report(self) -> object | None:
        """The solver's own figures; None if it has none."""
        return self.answer.result.report

    @property
    def shortage(self) -> str | None:
        """Why the plan does not fit by the planner's count, or why there is none that fits; None if
        the plan fits, or another reason than memory is known. Only a solver that was asked to count
        as it was published has a plan that does not fit.
        """
        if self.answer.verdict is None:
            return self.reason if self.short_of_memory else None
        return self.answer.verdict.shortage

    @property
    def rank(self) -> Rank:
        """Of the plan among all plans; smaller is better.

        Raises:
            ValueError: if there is none.
        """
        if self.plan is None:
            raise ValueError(f"{self.solver} has no plan to rank")
        objective = Objective(self.plan.certificate.objective)
        return _rank(self.plan.prediction, objective, self.microbatch_size, self.status)

    @property
    def short_of_memory(self) -> bool:
        """Whether there may be a plan where devices have more memory."""
        return self.answer.result.short_of_memory


SolverRow = Row
"""The public name of a row."""


@dataclass(frozen=True, slots=True)
class SolverComparison:
    """The rows of all solvers that were asked.

    Attributes:
        rows: in the order of the asking.
        lower_bound_s: for the objective, over all strategies (`costs/bounds.py`) with microbatches
            of all sizes that may be chosen, also of those in no row.
        proved_infeasible: whether no strategy of any solver can fit.
        notes: questions that were not asked, and why.
    """

    rows: tuple[Row, ...]
    lower_bound_s: float
    proved_infeasible: bool
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Row | None:
        """The best plan. Plans that fit memory come first; ties are broken by the shorter
        iteration, then by optimality in the solver's space, then by the order of the rows.
        """
        planned = [row for row in self.rows if row.plan is not None]
        return min(planned, key=lambda row: (row.shortage is not None, row.rank), default=None)

    @property
    def status(self) -> Status:
        """Of the whole comparison: the best row's, or why there is none."""
        if self.best is not None:
            return self.best.status
        return Status.INFEASIBLE if self.proved_infeasible else Status.UNKNOWN


def compare(
    problem: Problem,
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
    *,
    full_time: bool = False,
) -> SolverComparison:
    """Asks the solvers, the portfolio unless named, and judges their strategies.

    Args:
        names: keys of `SOLVERS`.
        time_limit_s: limit of work for all together, in seconds of an ordinary core.
        progress: called with each solver's name before it starts.
        full_time: whether each has the limit to itself, and none is left out because a good plan
            is there.

    Raises:
        OptionError: if a name is unknown.
    """
    return comparison([ask_solvers(problem, names, time_limit_s, progress, full_time=full_time)])


def ask_solvers(
    problem: Problem,
    names: Sequence[str] | None,
    time_limit_s: float,
    progress: Callable[[str], None],
    *,
    full_time: bool = False,
) -> Answers:
    """The solvers' answers, each judged; arguments and errors as of `compare`."""
    if full_time:
        return _full_time_for_each(problem, _checked(problem, names), time_limit_s, progress)
    with braked(time_limit_s) as brake:
        search = Search(time_limit_s, progress, brake)
        search.ask([problem], names)
        search.improve()
        return search.answers[0]


def _checked(problem: Problem, names: Sequence[str] | None) -> tuple[str, ...]:
    unknown = [name for name in names or () if name not in SOLVERS]
    if unknown:
        raise OptionError(f"unknown solver {unknown[0]!r}; known: {', '.join(SOLVERS)}")
    return tuple(names or portfolio(rules=has_rules(problem.profile)))


@dataclass(slots=True, eq=False)
class _Case:
    """A problem and what solvers have answered.

    Attributes:
        problem: without pins. The bound and the judge need none: a bound over all strategies holds
            for those that keep the pins, too.
        asked: as solvers see it, pins as types of devices (`planning/pins.py`), and operators that
            have to be in one stage as one (`planning/joint.py`).
        names: of the solvers, in the order of the asking.
        answers: theirs, by name.
        results: of solvers, from which others start.
        left: solvers whose first answer no work was left to improve.
        at_once: whether solvers that wait are asked at once, because all do that are asked about
            any problem.
    """

    problem: Problem
    asked: Joined
    names: tuple[str, ...]
    lower_bound_s: float
    shortage: str | None
    answers: dict[str, Answer] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    at_once: bool = False

    @property
    def known(self) -> tuple[Strategy, ...]:
        """The strategies that fit, in the order of the asking."""
        fitting = [self.answers[name].fitting for name in self.names if name in self.answers]
        return tuple(self.asked.joined(one.strategy) for one in fitting if one is not None)

    @property
    def work_s(self) -> float:
        """The work of all answers."""
        return sum(one.work_s for one in self.answers.values())

    @property
    def size(self) -> int:
        """The samples that the objective's figure is for."""
        return samples_in(self.problem.training.objective, self.problem.profile.microbatch_size)

    @property
    def microbatch_size(self) -> int:
        """Samples in a microbatch."""
        return self.problem.profile.microbatch_size

    def value_s(self, name: str) -> float:
        """The objective of a solver's plan, to compare it with other sizes; inf without one."""
        verdict = self.answers[name].fitting
        if verdict is None:
            return math.inf
        return predicted_s(verdict.prediction, self.problem.training.objective) / self.size

    @property
    def best_s(self) -> float:
        """Of all plans; inf without one."""
        return min(map(self.value_s, self.answers), default=math.inf)

    @property
    def waiting(self) -> tuple[str, ...]:
        """The solvers that are asked after others (`Solver.waits`)."""
        return () if self.at_once else tuple(name for name in self.names if SOLVERS[name].waits)

    def may_improve(self, name: str) -> bool:
        """Whether a solver may have a better answer than it has, if it is given work."""
        answer = self.answers[name]
        asked = SOLVERS[name].improves and answer.solve_s is not None
        return asked or answer.result.reason == NOT_YET

    def in_order(self, *, cut: bool) -> Answers:
        """The answers in the order of the asking."""
        own = tuple(self.answers[name] for name in self.names)
        return Answers(self.problem, self.lower_bound_s, self.shortage, own, cut, self.left)


def _case(problem: Problem, names: Sequence[str] | None) -> _Case:
    checked, joint = _checked(problem, names), joined(problem)
    asked = replace(joint, problem=with_pinned_types(joint.problem))
    if problem.search.pins:
        problem = replace(problem, search=replace(problem.search, pins=()))
    return _Case(problem, asked, checked, lower_bound_s(problem), memory_shortage(problem))


_Question = tuple[_Case, str]
"""A problem, and the name of a solver."""


class Search:
    """The questions to solvers about one problem, or about the same problem with microbatches of
    several sizes. Each solver is asked for a first answer, which takes next to no work, unless it
    waits for those of others. Then those that can do more with work are asked, in rounds of two
    questions, the most promising first: those whose first plan was the best. A question that the
    bound rules out is not asked.

    Which questions a round has, and the strategies from which they start, follow from the rounds
    before it and from work that is counted. So the answers are the same on a busy machine, and with
    one process or two.
    """

    def __init__(self, limit_s: float, progress: Callable[[str], None], brake: Brake) -> None:
        """Nothing has been asked.

        Args:
            limit_s: limit of work, in seconds of an ordinary core.
            progress: called with each solver's name before it starts.
            brake: of the whole search.
        """
        self._limit_s, self._progress, self._brake = limit_s, progress, brake
        self._cases: list[_Case] = []
        self._cut, self._process, self._kept_s = False, os.getpid(), 0.0

    @property
    def left_s(self) -> float:
        """The work that is left for first answers, in seconds of an ordinary core."""
        return self._left_s - self._kept_s

    @property
    def _left_s(self) -> float:
        return self._limit_s - sum(case.work_s for case in self._cases)

    @property
    def answers(self) -> list[Answers]:
        """What has been answered, by problem, in the order of the asking."""
        return [case.in_order(cut=self._cut) for case in self._cases]

    @property
    def interrupted(self) -> bool:
        """Whether the user has ended a search."""
        every = (answer for case in self._cases for answer in case.answers.values())
        return any(INTERRUPTED in answer.result.space for answer in every)

    def ask(self, problems: Sequence[Problem], names: Sequence[str] | None) -> None:
        """Asks for first answers to problems, of those that were asked before from more solvers.

        Args:
            names: keys of `SOLVERS`, all that were asked about one of the problems before.

        Raises:
            OptionError: if a name is unknown.
        """
        cases = [self._case(problem, names) for problem in problems]
        if any(one.waiting for one in cases):
            self._kept_s = WAITING * self._limit_s
        for k in range(0, len(cases), PROCESSES):
            some, left_s = cases[k : k + PROCESSES], self.left_s
            large = all(len(one.problem.profile.operators) > FEW_OPERATORS for one in some)
            asking = [partial(self._first_answers, one, left_s + one.work_s) for one in some]
            if large and any(len(one.problem.topology.devices) > 1 for one in some):
                import_module("planner.schedules.event_loop")  # once, not in both processes
            for case, answered in zip(some, beside(asking, large), strict=True):
                if answered is None:
                    raise KeyboardInterrupt
                case.answers, case.results = answered
            self._cases += [one for one in some if one not in self._cases]
            self._cut = self._cut or self._brake.over()

    def _case(self, problem: Problem, names: Sequence[str] | None) -> _Case:
        """The case of a problem, which may have been asked before, with solvers to ask."""
        found = [one for one in self._cases if one.problem.profile is problem.profile]
        case = found[0] if found else _case(problem, names)
        case.names = tuple(dict.fromkeys((*_checked(problem, names), *case.names)))
        every = {name for one in (*self._cases, case) for name in one.names}
        case.at_once = all(SOLVERS[name].waits for name in every)
        return case

    def _first_answers(
        self, case: _Case, left_s: float
    ) -> tuple[dict[str, Answer], dict[str, Result]]:
        """The first answers of all solvers that have none yet, and their results, from which others
        start.

        Args:
            left_s: the work that was left before the first of them, in seconds of an ordinary core.
        """
        for name in case.names:
            if name in case.answers:
                continue
            solver, reason = SOLVERS[name], _not_asked(case, name, left_s - case.work_s)
            if case.shortage is not None and solver.counts_memory(case.problem.search):
                result = Result(Status.INFEASIBLE, None, reason=case.shortage, short_of_memory=True)
                case.answers[name] = Answer(name, result)
            elif reason is not None or name in case.waiting:
                reason = NOT_YET if name in case.waiting else reason
                case.answers[name] = Answer(name, Result(Status.UNKNOWN, None, reason=reason))
            else:
                self._tell(name)
                limit_s = 0.0 if solver.improves else solver.time_share * left_s
                case.answers[name] = _asked(case, name, limit_s, FIRST_JUDGED_S, case.known)
        return case.answers, case.results

    def _tell(self, name: str) -> None:
        """Tells of a solver, in the first process alone: a copy must not touch the terminal."""
        if os.getpid() == self._process:
            self._progress(name)

    def improve(self) -> None:
        """Asks again, as long as work is left; solvers that waited, as long as most of theirs is,
        whatever the first answers took. Not once the user has had enough.
        """
        if self.interrupted:
            return
        todo = [
            (case, name) for case in self._cases for name in case.names if case.may_improve(name)
        ]
        kept_s = self._kept_s
        while todo := [one for one in todo if not self._ruled_out(*one)]:
            self._cut = self._cut or self._brake.over()
            left_s, able = max(self._left_s, kept_s), self._able(todo)
            if left_s <= 0 or not able or self._cut:
                break
            some = _of_a_round(sorted(able, key=self._promise))
            answered = self._round(some, left_s)
            for one, answer in answered.items():
                kept_s = self._kept_after(one, answer, kept_s)
            todo = [one for one in todo if one not in answered]
            if self.interrupted or len(answered) < len(some):
                return
        self._leave(todo)

    def _promise(self, question: _Question) -> tuple[float, float, float]:
        """Smaller is more promising: the plan of the first answer or, without one, what the solver
        may find; then the size nearest to `wide_size` for a solver that has the plans of smaller
        ones, too; then the bound.
        """
        case, name = question
        solver, value_s, distance = SOLVERS[name], case.value_s(name), 0.0
        if not math.isfinite(value_s):
            best_s = case.best_s
            if solver.wide:
                best_s = min(
                    one.best_s for one in self._cases if one.microbatch_size <= case.microbatch_size
                )
                distance = abs(math.log(case.microbatch_size / wide_size(case.problem)))
            value_s = solver.may_find_s(case.asked.problem, best_s * case.size) / case.size
        return value_s, distance, case.lower_bound_s / case.size

    def _leave(self, todo: Sequence[_Question]) -> None:
        """Tells the cases which questions are left."""
        for case in self._cases:
            unasked = (name for one, name in todo if one is case and SOLVERS[name].improves)
            case.left = () if self._cut else tuple(unasked)

    def _able(self, todo: Sequence[_Question]) -> list[_Question]:
        """The questions for which work may be left."""
        return [one for one in todo if self._left_s > 0 or one[1] in one[0].waiting]

    def _kept_after(self, question: _Question, answer: Answer, kept_s: float) -> float:
        """Takes in an answer; the work that is still kept for solvers that waited.

        Args:
            kept_s: before it.
        """
        case, name = question
        case.answers[name] = answer
        left_s = kept_s - (answer.work_s if name in case.waiting else 0.0)
        return left_s if left_s > self._kept_s / 2 else 0.0  # too little for another

    def _round(self, some: Sequence[_Question], left_s: float) -> dict[_Question, Answer]:
        """The answers to some questions, but to one that Ctrl-C ended.

        Args:
            some: one whose solver has threads comes first.
        """
        at_once = left_s > LEAST_BESIDE_S and not SOLVERS[some[-1][1]].has_threads
        asking = []
        for case, name in some:
            share_s = SOLVERS[name].time_share * self._limit_s
            self._tell(name)
            asking.append(partial(_improved, case, name, min(share_s, left_s / len(some))))
        found = zip(some, beside(asking, at_once), strict=True)
        return {one: answer for one, answer in found if answer is not None}

    def _ruled_out(self, case: _Case, name: str) -> bool:
        """Whether a question cannot bring a plan that is better by more than `GOOD_ENOUGH`."""
        best_s = min(one.best_s for one in self._cases)
        least_s = case.lower_bound_s
        if SOLVERS[name].unreplicated:
            least_s = max(least_s, unreplicated_s(case.problem))
        return best_s <= (1 + GOOD_ENOUGH) * least_s / case.size


def wide_size(problem: Problem) -> int:
    """The number of devices between which samples of a microbatch are split best: those of a host,
    or all where sums over them take less than `FAST_NETWORK` times as long.
    """
    topology, host = problem.topology, smallest_host(problem)
    some, every = host_by_host(problem)[:host], range(len(topology.devices))
    host_s, all_s = (allreduce_s(topology, tuple(one), SUM_BYTES) for one in (some, every))
    return len(every) if all_s < FAST_NETWORK * host_s else host


def _of_a_round(able: Sequence[_Question]) -> list[_Question]:
    """The questions of a round: the most promising, and the next one after it, if there is any of
    a solver that waited where the first one's did not, or the other way round. Threads come first.

    Args:
        able: at least one, the most promising first.
    """
    first, *others = able
    waited = SOLVERS[first[1]].waits
    others.sort(key=lambda one: SOLVERS[one[1]].waits is waited)
    return sorted(
        [first, *others[: PROCESSES - 1]], key=lambda one: not SOLVERS[one[1]].has_threads
    )


def _asked(
    case: _Case, name: str, limit_s: float, judged_s: float, known: tuple[Strategy, ...]
) -> Answer:
    """A solver's answer, judged.

    Args:
        limit_s: limit of the solver's work.
        judged_s: of the judge's.
        known: strategies that fit.
    """
    took_s = stopwatch()
    # A solver that another one starts from may have answered already.
    if name not in case.results:
        case.results[name] = SOLVERS[name](case.asked.problem, limit_s, known, case.results)
    return _judged(case, name, case.results[name], took_s, judged_s)


def _improved(case: _Case, name: str, limit_s: float) -> Answer:
    """A solver's answer with more work, or its first one if that is better."""
    took_s, before = stopwatch(), case.answers[name]
    result = SOLVERS[name](case.asked.problem, limit_s, case.known, dict(case.results))
    judged_s = max(FIRST_JUDGED_S, limit_s - result.work_s)
    after = _judged(case, name, result, took_s, judged_s)
    objective, size = case.problem.training.objective, case.problem.profile.microbatch_size

    def rank(answer: Answer) -> Rank:
        if answer.fitting is None:
            return math.inf, math.inf, True
        return _rank(answer.fitting.prediction, objective, size, answer.result.status)

    best, found = after, after.result
    if rank(before) < rank(after):
        best, found = before, before.result
        if after.fitting is not None:  # what was searched, and its bound, hold for both plans
            found = replace(found, bound_s=result.bound_s, space=result.space)
    return replace(
        best,
        result=replace(found, reproducible=result.reproducible),
        solve_s=(before.solve_s or 0.0) + (after.solve_s or 0.0),
        work_s=before.work_s + after.work_s,
    )


def _full_time_for_each(
    problem: Problem,
    names: Sequence[str],
    time_limit_s: float,
    progress: Callable[[str], None],
) -> Answers:
    """Each solver with the limit to itself, one after the other."""
    case = _case(problem, names)
    for name in case.names:
        if case.shortage is not None and SOLVERS[name].counts_memory(problem.search):
            result = Result(Status.INFEASIBLE, None, reason=case.shortage, short_of_memory=True)
            case.answers[name] = Answer(name, result)
        else:
            progress(name)
            # What is only to be beaten would keep a solver from showing its own plan.
            known = () if SOLVERS[name].waits else case.known
            case.answers[name] = _asked(case, name, time_limit_s, time_limit_s, known)
    return case.in_order(cut=False)


def _not_asked(case: _Case, name: str, left_s: float) -> str | None:
    """Why a solver is not asked, or None. Plans are never worse than data parallelism, so it always
    is, as long as nothing better is there.
    """
    solver, best_s = SOLVERS[name], case.best_s * case.size
    if math.isfinite(best_s):
        if gap_to(case.lower_bound_s, best_s) <= GOOD_ENOUGH:
            return f"not asked: a plan within {GOOD_ENOUGH:.0%} of the bound was found"
        least_s = unreplicated_s(case.problem) if solver.unreplicated else 0.0
        if least_s >= best_s:
            return f"not asked: without replicas nothing is faster than {format_seconds(least_s)}"
    return OUT_OF_TIME if left_s <= 0 and case.answers and not solver.always_asked else None


def _judged(
    case: _Case, name: str, result: Result, took_s: Callable[[], float], judged_s: float
) -> Answer:
    """One solver's answer, judged.

    Args:
        took_s: the stopwatch of the search.
        judged_s: limit of the judge's work.
    """
    verdict, work_s = None, result.work_s
    if result.strategy is not None:
        result = case.asked.parted(_without_broken(case.asked.problem, result))
    if result.strategy is not None:
        verdict, shortage = judge(case.problem, name, result, judged_s)
        if verdict is None and result.unfit:
            verdict, _ = judge_unchanged(case.problem, result.strategy)
        if verdict is None:
            result = replace(_without_strategy(result, shortage), short_of_memory=True)
    work_s += verdict.work_s if verdict is not None else 0.0
    return Answer(name, result, verdict, took_s(), work_s)


def _without_broken(problem: Problem, result: Result) -> Result:
    """The result without strategies that break a pin."""
    if not problem.search.pins or result.strategy is None:
        return result
    reasons = {one: violated_pin(problem, one) for one in (result.strategy, *result.others)}
    kept = [one for one, reason in reasons.items() if reason is None]
    if not kept:
        return _without_strategy(result, reasons[result.strategy])
    return replace(result, strategy=kept[0], others=tuple(kept[1:]))


def _not_reproducible(answer: Answer) -> Answer:
    return replace(answer, result=replace(answer.result, reproducible=False))


def _without_strategy(result: Result, reason: str | None) -> Result:
    return Result(Status.UNKNOWN, None, space=result.space, reason=reason, report=result.report)


def comparison(
    of_sizes: Sequence[Answers], notes: tuple[str, ...] = (), others_s: float = math.inf
) -> SolverComparison:
    """The rows of all answers to one problem, or to the same problem with microbatches of several
    sizes. Here plans are made: with the lower bound over all sizes, per sample for a bottleneck.

    Args:
        notes: for people.
        others_s: the least bound of sizes that may be chosen and were not asked, per sample for a
            bottleneck.
    """
    several = len(of_sizes) > 1 or others_s < math.inf
    objective = of_sizes[0].problem.training.objective
    samples = [samples_in(objective, one.microbatch_size) if several else 1 for one in of_sizes]
    bounds_s = (one.lower_bound_s / n for one, n in zip(of_sizes, samples, strict=True))
    bound_s = min(others_s, *bounds_s)
    cut = any(one.cut for one in of_sizes)
    asked = {a.solver for one in of_sizes for a in one.answers if a.result.reason != NOT_YET}
    # A solver that waited is in one row at least.
    rows = tuple(
        _row(
            one.problem, _not_reproducible(answer) if cut else answer, bound_s * n, several=several
        )
        for one, n in zip(of_sizes, samples, strict=True)
        for answer in one.answers
        if answer.result.reason != NOT_YET or (one is of_sizes[0] and answer.solver not in asked)
    )
    proved = all(one.shortage is not None for one in of_sizes)
    notes = (*notes, *_left_notes(of_sizes), *_cut_notes(of_sizes))
    return SolverComparison(rows, bound_s * min(samples), proved, notes)


def _left_notes(of_sizes: Sequence[Answers]) -> Iterator[str]:
    """A line on the searches for which no work was left, if there are any."""
    names = dict.fromkeys(name for one in of_sizes for name in one.left)
    if names:
        yield (
            f"the time limit left no work to improve some plans of {', '.join(names)};"
            " --time-limit gives more"
        )


def _cut_notes(of_sizes: Sequence[Answers]) -> Iterator[str]:
    """A line on the searches that the brake or the user cut, if there are any."""
    cut = [
        answer
        for one in of_sizes
        for answer in one.answers
        if answer.verdict is not None and not answer.result.reproducible
    ]
    names = dict.fromkeys(one.solver for one in cut if INTERRUPTED not in one.result.space)
    if names or any(one.cut for one in of_sizes):
        of_which = f" of {', '.join(names)}" if names else ""
        yield (
            f"the brake cut the search{of_which}: it took {TIMES:g} times its limit in processor"
            " time; another run may find another plan"
        )


def _row(problem: Problem, answer: Answer, bound_s: float, *, several: bool) -> Row:
    """A row, with the plan.

    Args:
        bound_s: the lower bound for the problem's objective.
        several: whether that bound is over microbatches of several sizes.
    """
    result, verdict = answer.result, answer.verdict
    if verdict is None:
        return Row(problem, answer, None)
    plan = as_plan(problem, answer.solver, result, verdict, bound_s)
    if several and bound_s > 0:
        # Equal to `gap_to` but for the last bit; format 3 will have that one only.
        gap = objective_s(plan) / bound_s - 1
        plan = replace(plan, certificate=replace(plan.certificate, gap=gap))
    return Row(problem, answer, plan)


def solve_by_pipedream_costs(problem: Problem) -> SolverComparison:
    """PipeDream's plan alone, as its own cost model judges it, with PipeDream's schedule. The plan
    is priced and simulated like every other one, but kept if it does not fit by the planner's
    count, which a note says.
    """
    from planner.solvers.pipedream.solve import solve_alone  # compiled: loaded when it is asked

    took_s, result, verdict = stopwatch(), solve_alone(problem), None
    if result.strategy is not None:
        asked, strategy = problem.num_microbatches, result.strategy
        training = replace(problem.training, schedule=strategy.schedule)
        problem = replace(problem, training=training, num_microbatches=strategy.num_microbatches)
        verdict, _ = judge_unchanged(problem, strategy)
        notes = ["chosen by PipeDream's cost model; the prediction is the planner's"]
        if strategy.num_microbatches != asked:
            notes.append(
                f"an iteration has {strategy.num_microbatches} microbatches, not {asked}, so that"
                " all replicas of each stage have equally many"
            )
        verdict = replace(verdict, notes=(*verdict.notes, *notes))
    answer = Answer("pipedream", result, verdict, took_s())
    shortage = result.reason if result.status is Status.INFEASIBLE else None
    return comparison([Answers(problem, lower_bound_s(problem), shortage, (answer,))])
