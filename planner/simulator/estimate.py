"""The objective of a strategy from a short iteration, for searches that price few strategies and
want to know which are the best ones.

The closed form (`costs/closed_form.py`), which kernels of searches compile, says little of *stages
in parts*, which are split over a mesh, or whose replicas keep parts of their state. Boxes between
meshes share cards with those of other devices and replicas, buckets of several groups wait for each
other, and collectives lengthen some stages of a pipeline more than others: it is up to 75 % off
there. So an iteration is simulated. A long one is simulated with fewer microbatches, n and m of M,
and goes on at the pace between them:

    iteration(M) = T(m) + (M - m) (T(m) - T(n)) / (m - n)

M, m and n leave the same rest in rounds of all stages, of P = lcm_s R_s microbatches. Under an
asynchronous schedule a flow is simulated, however long M minibatches are.
"""

from dataclasses import replace

from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy, in_parts, shares_devices
from planner.costs.evaluate import closed_form_s, evaluate, priced, pricing_work_s
from planner.schedules.flows import in_flight, period, steady_minibatches
from planner.schedules.orders import with_microbatches
from planner.schedules.program import program
from planner.simulator.events import run
from planner.simulator.objective import latency_s
from planner.simulator.steady import iterate
from planner.support.memo import remembered

ERROR = 0.03
"""By how much, relatively, an estimate is off at most. `make bench-estimates` found none that was
off by more than 0.2 %.
"""
OVERRATED = 1.25
"""The closed form of whole operators is hardly ever longer than the simulator's time by more than
this factor, though it may be much shorter: of 480 random pipelines on shipped clusters 1 in 100
was. An early stage that is the slowest hides round trips behind its warm-up.
"""
MAX_COMPUTATIONS = 16_384
"""Forwards and backwards on all devices that are simulated: more than most iterations have. On
cards that devices share, it takes some hundred microbatches until a pipeline has its pace.
"""
_IN_FLIGHT = 2
"""How often the most microbatches in flight are simulated, however many computations these are."""
_COMPUTATIONS_PER_S = 400_000
"""Simulated per second of an ordinary core, with the transfers between them. Measured on a core at
2.9 GHz shared with others, on Llama 6.7B with 64 devices.
"""


def estimate_s(problem: Problem, strategy: Strategy) -> float:
    """The problem's objective for a sound strategy, in s; a bottleneck has a closed form.

    Raises:
        ValueError: if its lists block each other.
    """
    match problem.training.objective:
        case Objective.ITERATION:
            return estimated_iteration_s(problem, strategy)
        case Objective.LATENCY:
            return latency_s(problem, strategy, priced(problem, strategy))
    return closed_form_s(problem, strategy)


def least_s(problem: Problem, strategy: Strategy) -> float:
    """A time, in s, that the simulator's objective of a strategy is hardly ever below, from what is
    known of it without its memory; 0 where little is known.

    Raises:
        ValueError: if its lists block each other.
    """
    if any(map(in_parts, strategy.stages)):
        return estimate_s(problem, strategy) / (1 + ERROR)
    if strategy.schedule.is_asynchronous or shares_devices(strategy):
        return 0.0
    return closed_form_s(problem, strategy) / OVERRATED


def least_work_s(strategy: Strategy) -> float:
    """The work of `least_s`, in seconds of an ordinary core."""
    parts = any(map(in_parts, strategy.stages))
    return estimate_work_s(strategy) if parts else pricing_work_s(strategy)


@remembered(kept=64)
def estimated_iteration_s(problem: Problem, strategy: Strategy) -> float:
    """The time of an iteration, in s. Arguments and errors as of `estimate_s`."""
    count, known = strategy.num_microbatches, priced(problem, strategy)
    if strategy.schedule.is_asynchronous:
        least = period(strategy)
        short = replace(strategy, num_microbatches=least)
        return count / least * iterate(problem, short, evaluate(problem, short)).iteration_s

    def simulated_s(count: int) -> float:
        lists = program(with_microbatches(strategy, count), problem.profile.graph, known.times)
        return run(lists, known.costs, problem.topology).iteration_s

    few, many = simulated_counts(strategy)
    long_s = simulated_s(many)
    if many == count:
        return long_s
    return long_s + (count - many) * (long_s - simulated_s(few)) / (many - few)


def estimate_work_s(strategy: Strategy) -> float:
    """The work of an estimate, in seconds of an ordinary core."""
    if strategy.schedule.is_asynchronous:
        count = steady_minibatches(replace(strategy, num_microbatches=period(strategy)))
    else:
        few, many = simulated_counts(strategy)
        count = many if many == strategy.num_microbatches else few + many
    computations = _computations(strategy) * count / period(strategy)
    return pricing_work_s(strategy) + computations / _COMPUTATIONS_PER_S


def simulated_counts(strategy: Strategy) -> tuple[int, int]:
    """The numbers of microbatches that are simulated, n and m; both M where that is few enough."""
    count, least = strategy.num_microbatches, period(strategy)
    # In phases all are in flight, but a stage waits for no more than one in each stage before it.
    flying = len(strategy.stages) * least if strategy.schedule.has_phases else in_flight(strategy)
    periods = max(MAX_COMPUTATIONS // _computations(strategy), 2 * -(-_IN_FLIGHT * flying // least))
    if count <= periods * least:
        return count, count
    rest = count % least
    return rest + periods // 2 * least, rest + periods * least


def _computations(strategy: Strategy) -> int:
    """Forwards and backwards of a period on all devices."""
    least = period(strategy)
    return sum(2 * least * len(s.devices) // s.num_replicas for s in strategy.stages)
