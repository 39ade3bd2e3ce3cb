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
from planner.planning.portfolio import Attempts, Rank, Search, SolverComparison, comparison
from planner.profilers.interpolate import interpolated
from planner.solvers.registry import SOLVERS, portfolio
from planner.support.brake import braked
from planner.support.errors import OptionError

# The number of sizes between those profiled that are planned for.
MAX_BETWEEN = 4
# The number of wide sizes at which solvers that split samples are asked.
MAX_WIDE = 4


def compare_between(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    names: Sequence[str] | None = None,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
    refine: Callable[[Sequence[Attempts]], Sequence[Attempts]] = lambda made: made,
) -> tuple[SolverComparison, tuple[Problem, ...]]:
    """`compare` for microbatches of several sizes, with the lower bound and the gaps over all of
    them; and then for interpolated sizes, which were not profiled. These are next to the best size,
    because a microbatch that is too small pays overheads and one that is too large empties the
    pipeline or the memory, and the best is somewhere between. At most `MAX_BETWEEN` are asked,
    powers of two and the nearest first; none whose lower bound is above the best plan. Solvers that
    split samples are asked at up to `MAX_WIDE` more sizes (see `_wide_sizes`).

    Args:
        problems: the same model, devices and samples per iteration, by size of the microbatch.
        profiles: all there are, ascending by size, also those of sizes that are no problem because
            they do not divide the samples.
        time_limit_s: limit of work for all together, in seconds of an ordinary core.
        refine: gives the attempts again, with parts of operators measured.

    Returns:
        The comparison, and all problems that were asked, ascending by size.
    """
    splitting = _that_split_samples(problems[0], names)
    sizes = _wide_sizes(problems[0], profiles)[:MAX_WIDE] if splitting else []
    with braked(time_limit_s) as brake:
        search = Search(time_limit_s, progress, brake)
        search.ask(problems, names)
        between = _sizes_between(problems, profiles)
        added, notes = _between(problems, profiles, between, search.attempts)
        search.ask(added, names)
        wide, more = _wide((*problems, *added), profiles, sizes, search.attempts)
        search.ask(wide, splitting)
        search.improve()
    problems, notes = (*problems, *added, *wide), tuple(dict.fromkeys((*notes, *more)))
    pairs = sorted(
        zip(problems, search.attempts, strict=True),
        key=lambda pair: pair[0].profile.microbatch_size,
    )
    refined = refine([one for _, one in pairs])
    asked = tuple(
        replace(problem, profile=one.problem.profile)
        if one.problem.profile is not problem.profile
        else problem
        for (problem, _), one in zip(pairs, refined, strict=True)
    )
    return comparison(refined, notes), asked


def _sizes_between(problems: Sequence[Problem], profiles: Sequence[Profile]) -> tuple[int, ...]:
    """The sizes that divide the samples of an iteration and lie between those profiled."""
    samples = problems[0].profile.microbatch_size * problems[0].num_microbatches
    profiled = [profile.microbatch_size for profile in profiles]
    sizes = range(profiled[0] + 1, profiled[-1])
    return tuple(n for n in sizes if samples % n == 0 and n not in profiled)


def _between(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    between: Sequence[int],
    made: Sequence[Attempts],
) -> tuple[list[Problem], tuple[str, ...]]:
    """Problems of interpolated sizes that may have a better plan, and why there are none of other
    sizes.

    Args:
        between: sizes to choose from.
        made: the attempts at the problems.
    """
    sizes = [problem.profile.microbatch_size for problem in problems]
    ranks = [(one.best_rank, size) for one, size in zip(made, sizes, strict=True)]
    best = min(((rank, size) for rank, size in ranks if rank is not None), default=None)
    # Where nothing fits, only a smaller microbatch may.
    near = sizes[0] if best is None else best[1]
    low = max((n for n in sizes if n < near), default=0)
    high = min((n for n in sizes if n > near), default=math.inf) if best else near
    candidates = [n for n in between if low < n < high]
    candidates.sort(key=lambda n: (n.bit_count() > 1, abs(math.log(n / near)), n))
    rank = None if best is None else best[0]
    return _of_sizes(problems[0], profiles, candidates[:MAX_BETWEEN], rank)


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


def _wide(
    problems: Sequence[Problem],
    profiles: Sequence[Profile],
    sizes: Sequence[int],
    made: Sequence[Attempts],
) -> tuple[list[Problem], tuple[str, ...]]:
    """Problems of wide sizes that may have a better plan, and why there are none of other sizes.

    Args:
        problems: those that were asked.
        sizes: to choose from.
        made: the attempts at the problems.
    """
    asked = {problem.profile.microbatch_size for problem in problems}
    best = min((one.best_rank for one in made if one.best_rank is not None), default=None)
    return _of_sizes(problems[0], profiles, [n for n in sizes if n not in asked], best)


def _least_s(problem: Problem) -> float:
    """The lower bound, to compare it with plans of other sizes of the microbatch, in s."""
    size = problem.profile.microbatch_size
    return lower_bound_s(problem) / samples_in(problem.training.objective, size)
