"""Microbatches of several sizes: the best of all is taken.

Pipelines like small microbatches, which keep all stages busy. A mesh that splits the samples of a
microbatch likes large ones, with samples for all its devices: what it moves per microbatch, such as
the parameters that ZeRO gathers, it then moves less often. So solvers that split samples are asked
at wide sizes besides.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, has_rules
from planner.costs.bounds import lower_bound_s
from planner.planning.judge import samples_in
from planner.planning.plans import Plans
from planner.planning.portfolio import Answers, Rank, Search, comparison
from planner.planning.refine import Measure, refine
from planner.profilers.interpolate import interpolated
from planner.solvers.registry import SOLVERS, portfolio
from planner.support.brake import braked
from planner.support.errors import OptionError

# The number of sizes between those profiled that are planned for.
MAX_BETWEEN = 4
# The number of wide sizes at which solvers that split samples are asked.
MAX_WIDE = 4


def best_over_sizes(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
    measure: Measure | None = None,
) -> Plans:
    """The plans for microbatches of several sizes, with the lower bound and the gaps over all of
    them.

    Args:
        problems, profiles, names, time_limit_s, progress: see `_ask_all_sizes`.
        measure: gives a profile with times of parts of operators, by which plans are judged again;
            None measures nothing.
    """
    asked, answers, notes = _ask_all_sizes(problems, profiles, names, time_limit_s, progress)
    if measure is None:
        return Plans(comparison(answers, notes), asked)
    answers, refinement = refine(answers, measure)
    asked = tuple(
        replace(problem, profile=one.problem.profile)
        for problem, one in zip(asked, answers, strict=True)
    )
    return Plans(comparison(answers, notes), asked, refinement=refinement)


def _ask_all_sizes(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
) -> tuple[tuple[Problem, ...], tuple[Answers, ...], tuple[str, ...]]:
    """Asks solvers about microbatches of several sizes, in three rounds: the sizes profiled,
    interpolated ones, and wide ones.

    Interpolated sizes are next to the best size, because a microbatch that is too small pays
    overheads and one that is too large empties the pipeline or the memory, and the best is
    somewhere between. At most `MAX_BETWEEN` are asked, powers of two and the nearest first; none
    whose lower bound is above the best plan. Solvers that split samples are asked at up to
    `MAX_WIDE` more sizes (see `_wide_sizes`).

    Args:
        problems: the same model, devices and samples per iteration, by size of the microbatch.
        profiles: all there are, ascending by size, also those of sizes that are no problem because
            they do not divide the samples.
        names: keys of `SOLVERS`; None asks the portfolio.
        time_limit_s: limit of work for all together, in seconds of an ordinary core.
        progress: called with the name of each solver before it starts.

    Returns:
        All problems that were asked, ascending by size, the answers to each, and why some sizes
        were not asked, for people.
    """
    splitting = _that_split_samples(problems[0], names)
    wide_sizes = _wide_sizes(problems[0], profiles)[:MAX_WIDE] if splitting else []
    asked, notes = list(problems), list[str]()
    with braked(time_limit_s) as brake:
        search = Search(time_limit_s, progress, brake)

        def ask_more(sizes: Sequence[int], solvers: Sequence[str] | None) -> None:
            known = {problem.profile.microbatch_size for problem in asked}
            ranks = [one.best_rank for one in search.answers if one.best_rank is not None]
            new = [size for size in sizes if size not in known]
            more, why = _of_sizes(problems[0], profiles, new, min(ranks, default=None))
            search.ask(more, solvers)
            asked.extend(more)
            notes.extend(why)

        search.ask(problems, names)
        ask_more(_sizes_between(problems, profiles, search.answers), names)
        ask_more(wide_sizes, splitting)
        search.improve()
    pairs = sorted(
        zip(asked, search.answers, strict=True), key=lambda pair: pair[0].profile.microbatch_size
    )
    return (
        tuple(problem for problem, _ in pairs),
        tuple(answers for _, answers in pairs),
        tuple(dict.fromkeys(notes)),
    )


def _sizes_between(
    problems: Sequence[Problem], profiles: Sequence[Profile], answers: Sequence[Answers]
) -> list[int]:
    """The sizes between those profiled that divide the samples of an iteration and are next to the
    best size, the most promising first.

    Args:
        answers: to the problems.
    """
    samples = problems[0].profile.microbatch_size * problems[0].num_microbatches
    profiled = [profile.microbatch_size for profile in profiles]
    sizes = [problem.profile.microbatch_size for problem in problems]
    ranks = [(one.best_rank, size) for one, size in zip(answers, sizes, strict=True)]
    best = min(((rank, size) for rank, size in ranks if rank is not None), default=None)
    # Where nothing fits, only a smaller microbatch may.
    near = sizes[0] if best is None else best[1]
    low = max((n for n in sizes if n < near), default=0)
    high = min((n for n in sizes if n > near), default=profiled[-1]) if best else near
    between = range(max(low, profiled[0]) + 1, min(high, profiled[-1]))
    candidates = [n for n in between if samples % n == 0 and n not in profiled]
    # Powers of two first, then the nearest in ratio.
    candidates.sort(key=lambda n: (n.bit_count() > 1, abs(math.log(n / near)), n))
    return candidates[:MAX_BETWEEN]


def _of_sizes(
    problem: Problem, profiles: Sequence[Profile], sizes: Sequence[int], best: Rank | None
) -> tuple[list[Problem], tuple[str, ...]]:
    """The same problem with microbatches of other sizes, ascending; and why some have no profile.

    Args:
        best: the rank to beat. A size whose lower bound is not below it cannot win: no time is
            spent on it.
    """
    samples = problem.profile.microbatch_size * problem.num_microbatches
    made, notes = [], []
    for size in sorted(sizes):
        try:
            profile = interpolated(profiles, size)
        except OptionError as error:
            notes.append(str(error))
            continue
        one = replace(problem, profile=profile, num_microbatches=samples // size)
        if best is None or _least_s(one) < best[0]:
            made.append(one)
    return made, tuple(notes)


def _that_split_samples(problem: Problem, names: Sequence[str] | None) -> tuple[str, ...]:
    """The solvers among those asked that split the samples of a microbatch, if they have rules."""
    if not has_rules(problem.profile):
        return ()
    asked = names or portfolio()
    return tuple(name for name in asked if name in SOLVERS and SOLVERS[name].splits_samples)


def _wide_sizes(problem: Problem, profiles: Sequence[Profile]) -> list[int]:
    """The sizes that split evenly over all devices, or over a part of them with replicas, divide
    the samples of an iteration, and are profiled or between two that are; the nearest to a sample
    per device first.

    >>> from types import SimpleNamespace as some
    >>> problem = some(profile=some(microbatch_size=1), num_microbatches=48,
    ...                topology=some(devices=range(8)))
    >>> _wide_sizes(problem, [some(microbatch_size=n) for n in (1, 32)])
    [8, 4, 16, 24, 2]
    """
    samples = problem.profile.microbatch_size * problem.num_microbatches
    count, most = len(problem.topology.devices), profiles[-1].microbatch_size
    sizes = [n for n in range(max(2, profiles[0].microbatch_size), most + 1) if samples % n == 0]
    even = [n for n in sizes if n % count == 0 or count % n == 0]
    return sorted(even, key=lambda n: (abs(math.log(n / count)), n))


def _least_s(problem: Problem) -> float:
    """The lower bound, to compare it with plans of other sizes of the microbatch, in s."""
    size = problem.profile.microbatch_size
    return lower_bound_s(problem) / samples_in(problem.training.objective, size)
