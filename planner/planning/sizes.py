"""Microbatches of several sizes: the best of all is taken.

Pipelines like small microbatches, which keep all stages busy. What splits or replicates by samples
likes large ones: what moves per microbatch, such as the parameters that ZeRO gathers, then moves
less often. The rounds of the search:

    1  the sizes profiled, by all solvers; where the profile is good for any size, one with a sample
       for each device of a host, or of all where they are linked as fast, by solvers whose plans
       have replicas as meshes (`Solver.wide`), which begin there if no others are asked
    2  where the profile is good for any size: twice, four times .. the largest of them, and a half,
       a quarter .. of the smallest, by scouts, which are solvers that answer soon, and in the last
       round by those that wait for plans to beat
    3  sizes next to the best one, between two that were asked: a microbatch that is too small pays
       overheads, one that is too large empties the pipeline or the memory
    4  wide sizes, with samples for all devices, by solvers that split the samples of a microbatch
    5  where the profile is good for any size: the one at which a formula promises the best pipeline
       (`solvers/sharded/promise.py`), by all solvers
    6  more work on the most promising plans

Which sizes a round has follows from the plans before it and from work that is counted. None is
asked whose lower bound is above the best plan. The lower bound of all plans is the least over all
sizes that may be chosen, asked or not.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, has_rules
from planner.costs.bounds import lower_bound_s
from planner.planning.judge import samples_in
from planner.planning.plans import Plans
from planner.planning.portfolio import Answers, Rank, Search, comparison, wide_size
from planner.planning.problems import sizes_for
from planner.planning.refine import Measure, refine
from planner.profilers.interpolate import interpolated, span
from planner.solvers.registry import SOLVERS, portfolio
from planner.solvers.sharded.promise import Promise, best_promise
from planner.solvers.sharded.zero import replicas_suffice
from planner.support.brake import braked
from planner.support.errors import OptionError

# The number of sizes between two that were asked before.
MAX_BETWEEN = 4
# The number of wide sizes at which solvers that split samples are asked.
MAX_WIDE = 4
# Sizes one after the other at which no scout has a better plan; no further ones are asked.
MAX_WORSE = 2
# The number of sizes beyond those profiled at which all solvers are asked.
MAX_WHOLE = 1


def best_over_sizes(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
    measure: Measure | None = None,
) -> Plans:
    """The plans for microbatches of several sizes, with the lower bound and the gaps over all that
    may be chosen.

    Args:
        problems: the same model, devices and samples per iteration, by size of the microbatch.
        profiles: all there are, ascending by size, also those of sizes that are no problem because
            they do not divide the samples.
        names: keys of `SOLVERS`; None asks the portfolio.
        time_limit_s: limit of work for all together, in seconds of an ordinary core.
        progress: called with the name of each solver before it starts.
        measure: gives a profile with times of parts of operators, by which plans are judged again;
            None measures nothing.
    """
    sizes = _Sizes(problems, profiles)
    with braked(time_limit_s) as brake:
        rounds = _Rounds(sizes, names, Search(time_limit_s, progress, brake))
        rounds.run([one.profile.microbatch_size for one in problems])
    answers, refinement = rounds.answers, None
    if measure is not None:
        answers, refinement = refine(answers, measure)
    asked = {one.microbatch_size: one.problem.profile for one in answers}
    found = comparison(answers, tuple(dict.fromkeys(rounds.notes)), sizes.least_without(asked))
    asked_problems = (replace(sizes.problem(n), profile=own) for n, own in asked.items())
    return Plans(found, tuple(asked_problems), refinement=refinement)


class _Sizes:
    """The sizes of the microbatch that may be chosen, and the problem and the bound of each, which
    are made once.

    Attributes:
        first: of the problems given.
        all: ascending: all that divide the samples of an iteration, in the span of the profiles.
            Those given alone where `--microbatch-size` pins one, or where plans are compared by the
            latency of a microbatch: the smaller it is, the shorter.
        any: whether the profiles are good for any size, and sizes are to be chosen.
    """

    def __init__(self, problems: Sequence[Problem], profiles: Sequence[Profile]) -> None:
        first = problems[0]
        training, self._profiles = first.training, profiles
        self._samples = first.profile.microbatch_size * first.num_microbatches
        chosen = training.microbatch_size is None and training.objective is not Objective.LATENCY
        self.any = chosen and span(profiles)[1] is None
        self.first = replace(first, any_size=self.any)
        given = [one.profile.microbatch_size for one in problems]
        self.all = sorted({*given, *(sizes_for(profiles, self._samples) if chosen else ())})
        mine = (replace(one, any_size=self.any) for one in problems)
        self._problems = dict(zip(given, mine, strict=True))
        self._least_s: dict[int, float] = {}

    def problem(self, size: int) -> Problem:
        """The problem with microbatches of a size.

        Raises:
            OptionError: if there is no profile of that size.
        """
        if size not in self._problems:
            profile, count = interpolated(self._profiles, size), self._samples // size
            self._problems[size] = replace(self.first, profile=profile, num_microbatches=count)
        return self._problems[size]

    def least_s(self, size: int) -> float:
        """The lower bound, to compare it with plans of other sizes of the microbatch, in s.

        Raises:
            OptionError: if there is no profile of that size.
        """
        if size not in self._least_s:
            bound_s = lower_bound_s(self.problem(size))
            self._least_s[size] = bound_s / samples_in(self.first.training.objective, size)
        return self._least_s[size]

    def least_without(self, asked: Collection[int]) -> float:
        """The least of the bounds of all other sizes, as of `least_s`; inf without any. Sizes that
        have no profile cannot be chosen.

        Args:
            asked: sizes.
        """
        least_s = math.inf
        for size in self.all:
            with suppress(OptionError):
                least_s = min(least_s, math.inf if size in asked else self.least_s(size))
        return least_s


class _Rounds:
    """The rounds of a search, and what came of them so far.

    Attributes:
        notes: why some sizes have no profile, for people.
    """

    def __init__(self, sizes: _Sizes, names: Sequence[str] | None, search: Search) -> None:
        """Nothing has been asked.

        Args:
            names: keys of `SOLVERS`; None asks the portfolio.
        """
        self._sizes, self._names, self._search = sizes, names, search
        usual = portfolio(rules=has_rules(sizes.first.profile))
        known = [name for name in names or usual if name in SOLVERS]
        self._scouts = [name for name in known if SOLVERS[name].is_scout] or known
        waiting = (name for name in known if SOLVERS[name].waits)
        self._soon = [*dict.fromkeys((*self._scouts, *waiting))]
        self._all_are_scouts = len(self._scouts) == len(known)
        self._splitting = [name for name in known if SOLVERS[name].splits_samples]
        self._wide_ones = [name for name in known if SOLVERS[name].wide and sizes.any]
        self._all_are_wide = len(self._wide_ones) == len(known)
        self.notes: list[str] = []

    @property
    def answers(self) -> tuple[Answers, ...]:
        """Of all sizes that were asked, ascending."""
        return tuple(sorted(self._search.answers, key=lambda one: one.microbatch_size))

    @property
    def _by_size(self) -> dict[int, Answers]:
        """The same by size."""
        return {one.microbatch_size: one for one in self._search.answers}

    def run(self, given: Sequence[int]) -> None:
        """All rounds.

        Args:
            given: the sizes of the first one.
        """
        if self._all_are_wide:
            self._ask(self._wide_size(), self._names)
        self._ask(given, self._names)
        self._ask(self._wide_size(), self._wide_ones)
        if self._sizes.any:
            self._scout(max(given), growing=True)
            self._scout(min(given), growing=False)
        self._ask(self._between(), self._soon if self._sizes.any else self._names)
        self._ask(self._wide(), self._splitting)
        self._ask(self._promising(given), self._names)
        self._search.improve()

    def _ask(self, sizes: Sequence[int], names: Sequence[str] | None) -> None:
        """Asks solvers about more sizes, but those that have no profile, and those whose lower
        bound is not below the best plan: they cannot win. Nothing once the user has had enough.
        """
        if self._search.interrupted:
            return
        best, problems = self._best(), list[Problem]()
        for size in sorted(sizes):
            try:
                if best is None or self._sizes.least_s(size) < best[0][0]:
                    problems.append(self._sizes.problem(size))
            except OptionError as error:
                self.notes.append(str(error))
        self._search.ask(problems, names)

    def _best(self) -> tuple[Rank, int] | None:
        """The best plan's rank and size; None if none fits."""
        ranks = ((one.best_rank, one.microbatch_size) for one in self._search.answers)
        return min(((rank, size) for rank, size in ranks if rank is not None), default=None)

    def _best_by_scout(self) -> dict[str, tuple[Rank, int]]:
        """By scout, its best plan's rank and size."""
        best: dict[str, tuple[Rank, int]] = {}
        for one in self._search.answers:
            for name, rank in one.ranks.items():
                found = rank, one.microbatch_size
                if name in self._scouts:
                    best[name] = min(found, best.get(name, found))
        return best

    def _scout(self, start: int, *, growing: bool) -> None:
        """Asks the scouts about sizes of which each is about twice, or half, the one before, until
        `MAX_WORSE` of them brought none of the scouts a better plan, a larger one brought no plan
        at all, or no work is left.

        Args:
            start: the size before the first.
        """
        worse = 0
        for size in _ladder(self._sizes.all, start, growing=growing):
            if worse == MAX_WORSE or self._search.left_s <= 0:
                return
            before = self._best_by_scout()
            self._ask([size], self._soon)
            worse = worse + 1 if self._best_by_scout() == before else 0
            if growing and size in self._by_size and self._by_size[size].best_rank is None:
                return

    def _wide_size(self) -> list[int]:
        """The size nearest to `wide_size`, if anyone is asked at it."""
        if not self._wide_ones:
            return []
        wide = wide_size(self._sizes.first)
        return [min(self._sizes.all, key=lambda n: (abs(math.log(n / wide)), n))]

    def _between(self) -> list[int]:
        """The sizes of the third round."""
        if self._sizes.any and self._search.left_s <= 0:
            return []
        ranks = {size: one.best_rank for size, one in self._by_size.items()}
        return _sizes_between(self._sizes.all, ranks)[:MAX_BETWEEN]

    def _wide(self) -> list[int]:
        """The sizes of the fourth round; none where replicas with microbatches of their own are the
        same plans.
        """
        problem = self._sizes.first
        if not self._splitting or not has_rules(problem.profile) or replicas_suffice(problem):
            return []
        return _wide_sizes(self._sizes.all, len(problem.topology.devices))[:MAX_WIDE]

    def _promising(self, given: Sequence[int]) -> list[int]:
        """The sizes of the fifth round, the most promising first: the grid of pipelines, tensor
        degrees and replicas seems to have a better plan there than the best so far.

        Args:
            given: the sizes of the first round.
        """
        sizes, best = self._sizes, self._best()
        if not sizes.any or self._search.left_s <= 0 or self._all_are_scouts:
            return []
        larger = _ladder(sizes.all, max(given), growing=True)
        smaller = _ladder(sizes.all, min(given), growing=False)
        promised: list[tuple[Promise, int]] = []
        for size in sorted({*larger, *smaller, *self._by_size}):
            with suppress(OptionError):
                promised.append((best_promise(sizes.problem(size)), size))
        least_s = math.inf if best is None else best[0][1]
        better = [
            n for one, n in sorted(promised) if not one.too_large and one.iteration_s < least_s
        ]
        return [n for n in better if n not in given][:MAX_WHOLE]


def _ladder(sizes: Sequence[int], start: int, *, growing: bool) -> Iterator[int]:
    """Sizes of which each is at least twice, or at most half, the one before.

    Args:
        sizes: ascending.
        start: the size before the first.

    >>> list(_ladder([1, 2, 3, 6, 9, 18], 3, growing=True))
    [6, 18]
    >>> list(_ladder([1, 2, 3, 6, 9, 18], 9, growing=False))
    [3, 1]
    """
    last = start
    for size in sizes if growing else reversed(sizes):
        if size >= 2 * last if growing else 2 * size <= last:
            yield size
            last = size


def _sizes_between(sizes: Sequence[int], ranks: Mapping[int, Rank | None]) -> list[int]:
    """The sizes between those that were asked that are next to the best of them, the most promising
    first.

    Args:
        sizes: that may be chosen.
        ranks: of the best plan at each size that was asked; None where none fits.
    """
    best = min(((rank, size) for size, rank in ranks.items() if rank is not None), default=None)
    # Where nothing fits, only a smaller microbatch may.
    near = min(ranks) if best is None else best[1]
    low = max((n for n in ranks if n < near), default=0)
    high = min((n for n in ranks if n > near), default=math.inf) if best else near
    between = [n for n in sizes if low < n < high and n != near]
    # Powers of two first, then the nearest in ratio.
    between.sort(key=lambda n: (n.bit_count() > 1, abs(math.log(n / near)), n))
    return between


def _wide_sizes(sizes: Sequence[int], count: int) -> list[int]:
    """The sizes that split evenly over all devices, or over a part of them with replicas; the
    nearest to a sample per device first.

    Args:
        sizes: that may be chosen.
        count: of the devices.

    >>> _wide_sizes([1, 2, 3, 4, 6, 8, 12, 16, 24], 8)
    [8, 4, 16, 24, 2]
    """
    even = [n for n in sizes if n > 1 and (n % count == 0 or count % n == 0)]
    return sorted(even, key=lambda n: (abs(math.log(n / count)), n))
