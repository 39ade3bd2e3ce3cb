"""Plain data parallelism: the whole model on every device, microbatches dealt in turn, gradients
summed once per iteration.
"""

from planner.problem import Problem, Result
from planner.solvers.fit import fastest_first, first_that_fits, pipeline, recompute_choices


def solve(problem: Problem, time_limit_s: float) -> Result:
    """One stage on all devices, or on the fastest of them, as many as there are microbatches.

    Args:
        time_limit_s: not needed.
    """
    everything = range(len(problem.profile.operators))
    count = min(len(problem.topology.devices), problem.options.num_microbatches)
    strategies = (
        pipeline(
            problem, [everything], [sorted(fastest_first(problem)[:count])], recompute=recompute
        )
        for recompute in recompute_choices(problem)
    )
    return first_that_fits(problem, strategies, "one stage on all devices")
