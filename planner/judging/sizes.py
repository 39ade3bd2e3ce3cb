"""Microbatches of several sizes: the best of all is taken."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.costs.bounds import lower_bound_s
from planner.errors import OptionError
from planner.judging.interpolate import interpolated
from planner.judging.judge import samples_in
from planner.judging.portfolio import Attempts, SolverComparison, attempts, comparison
from planner.problem import Problem
from planner.profiles import Profile
from planner.support.jit import compile_clock

# The number of sizes between those profiled that are planned for.
MAX_BETWEEN = 4


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
    powers of two and the nearest first; none whose lower bound is above the best plan.

    Args:
        problems: the same model, devices and samples per iteration, by size of the microbatch.
        profiles: all there are, ascending by size, also those of sizes that are no problem because
            they do not divide the samples.
        time_limit_s: for all together.
        refine: gives the attempts again, with parts of operators measured.

    Returns:
        The comparison, and all problems that were asked, ascending by size.
    """
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        between = _sizes_between(problems, profiles)
        share = len(problems) / (len(problems) + min(len(between), MAX_BETWEEN))
        made = _attempts_at_each(problems, names, time_limit_s * share, progress)
        added, notes = _between(problems, profiles, between, made)
        left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
        made += _attempts_at_each(added, names, left_s, progress)
    pairs = sorted(
        zip((*problems, *added), made, strict=True),
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
    samples = problems[0].profile.microbatch_size * problems[0].options.num_microbatches
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
    samples = sizes[0] * problems[0].options.num_microbatches
    added, notes = [], []
    for size in candidates[:MAX_BETWEEN]:
        try:
            profile = interpolated(profiles, size)
        except OptionError as error:
            notes.append(str(error))
            continue
        options = replace(problems[0].options, num_microbatches=samples // size)
        problem = replace(problems[0], profile=profile, options=options)
        # A size whose bound is not below the best plan cannot win: no time is spent on it.
        if best is None or _least_s(problem) < best[0][0]:
            added.append(problem)
    return sorted(added, key=lambda one: one.profile.microbatch_size), tuple(notes)


def _least_s(problem: Problem) -> float:
    """The lower bound, to compare it with plans of other sizes of the microbatch, in s."""
    size = problem.profile.microbatch_size
    return lower_bound_s(problem) / samples_in(problem.options.objective, size)


def _attempts_at_each(
    problems: Sequence[Problem],
    names: Sequence[str] | None,
    time_limit_s: float,
    progress: Callable[[str], None],
) -> list[Attempts]:
    """Each problem by itself, within a time for all together."""
    made = []
    with compile_clock() as compiling_s:
        begin = time.monotonic()
        for index, problem in enumerate(problems):
            left_s = time_limit_s - (time.monotonic() - begin - compiling_s())
            allowed_s = left_s / (len(problems) - index)
            made.append(attempts(problem, names, allowed_s, progress))
    return made
