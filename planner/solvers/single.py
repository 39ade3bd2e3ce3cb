"""Everything on one device: the fastest that the model fits on."""

from planner.costs.compute import times_on
from planner.problem import Problem, Result
from planner.solvers.fit import first_that_fits, pipeline, recompute_choices


def solve(problem: Problem, time_limit_s: float) -> Result:
    """One stage on the first device of the fastest type that has room for it.

    Args:
        time_limit_s: not needed.
    """
    everything = range(len(problem.profile.operators))
    first: dict[str, int] = {}
    for index, device in enumerate(problem.topology.devices):
        first.setdefault(device.type, index)

    def total_s(device: int) -> float:
        times = times_on(problem, device)
        return float(times.forward_s.sum() + times.backward_s.sum())

    devices = sorted(first.values(), key=lambda d: (total_s(d), d))
    strategies = (
        pipeline(problem, [everything], [[device]], recompute=recompute)
        for recompute in recompute_choices(problem)
        for device in devices
    )
    return first_that_fits(problem, strategies, "one device")
