"""Everything on one device: the fastest that the model fits on."""

from planner.problem import Problem, Result
from planner.solvers.fit import fastest_first, first_that_fits, pipeline, recompute_choices


def solve(problem: Problem, time_limit_s: float) -> Result:
    """One stage on the fastest device that has room for it; only one of each kind is tried.

    Args:
        time_limit_s: not needed.
    """
    everything = range(len(problem.profile.operators))
    devices, hosts = problem.topology.devices, {h.name: h for h in problem.topology.hosts}
    kinds: dict[tuple[str, int | None], int] = {}
    for d in fastest_first(problem):
        kinds.setdefault((devices[d].type, hosts[devices[d].host].memory_bytes), d)
    strategies = (
        pipeline(problem, [everything], [[device]], recompute=recompute)
        for recompute in recompute_choices(problem)
        for device in kinds.values()
    )
    return first_that_fits(problem, strategies, "one device")
