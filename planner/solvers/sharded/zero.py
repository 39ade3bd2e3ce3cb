"""ZeRO: data parallelism whose devices each keep a part of what all of them would keep.

Samples are split along one axis over all devices or, with replicas, over a part of them that
divides the microbatch: such as a host each, which gathers over the links inside it. Where no number
divides it, all devices split what they can split fastest, such as the sequence. Along the axis each
parameter is cut in the first dimension that can be (Rajbhandari et al. 2020, section 5):

    1   the optimizer's state: each device steps through its part, which is gathered then
    2   gradients, too: each backward scatters them
    3   parameters, too: each forward gathers them, and each backward does so again
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.artefacts.graph import parameters_by_name
from planner.artefacts.problem import Problem, Result, Status, switches_of
from planner.artefacts.profile import SplitRule, has_rules
from planner.artefacts.sharding import AxisRule, Sharding, Spec, reads
from planner.solvers.sharded.along import Policy
from planner.solvers.sharded.best import best_of
from planner.solvers.sharded.complete import may_leave, shardings
from planner.solvers.sharded.layout import (
    NO_RULES,
    NOTHING_TO_SPLIT,
    ONE_DEVICE,
    Layout,
    axis_of,
    chosen_for_sure,
    divisors,
    groups_of,
    host_by_host,
)
from planner.solvers.sharded.options import Zero
from planner.solvers.sharded.rules import Named, divides, holds, named, share_work


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The plan on all devices.

    Args:
        time_limit_s: not needed.
    """
    stage = switches_of(problem.search, Zero).zero_stage
    space = f"ZeRO-{stage} over all devices"
    if not has_rules(problem.profile):
        return Result(Status.UNKNOWN, None, space=space, reason=NO_RULES)
    layouts = list(_layouts(problem, stage))
    if not layouts:
        reason = NOTHING_TO_SPLIT if len(problem.topology.devices) > 1 else ONE_DEVICE
        return Result(Status.INFEASIBLE, None, space=space, reason=reason)
    return best_of(problem, layouts, space)


def _layouts(problem: Problem, stage: int) -> Iterator[Layout]:
    """One stage on a mesh of all devices or, with replicas, of as many as a divisor says: all that
    divide the samples of a microbatch, or else the largest that anything can be cut for.
    """
    graph, devices = problem.profile.graph, host_by_host(problem)
    everything = (tuple(range(len(graph.operators))),)
    samples, most = problem.profile.microbatch_size, problem.num_microbatches
    sizes = [n for n in reversed(divisors(len(devices))) if n > 1 and len(devices) // n <= most]
    about = dict(named(graph))
    lines: tuple[SplitRule, ...] = ()
    dividing = [n for n in sizes if samples % n == 0]
    for size in dividing or sizes:
        replicas = len(devices) // size
        groups = groups_of(devices, (size,), replicas, 1)
        # What is cut along samples for many devices is so for fewer: the search is done once.
        if not share_work(lines) or not _hold(problem, lines, about, size):
            axis = axis_of(problem, groups[0], (size,), 0, most / replicas)
            lines = chosen_for_sure(problem, about, axis, data_policy(problem), devices[0])
        if not share_work(lines):
            continue
        (data,) = shardings(graph, everything, (size,), [lines])
        yield Layout(everything, groups, [cut_further(problem, data, stage)], number=replicas)
        if not dividing:
            return


def _hold(
    problem: Problem, lines: Sequence[SplitRule], about: Mapping[str, Named], size: int
) -> bool:
    """Whether the rules of all operators hold on an axis of some devices."""
    return all(
        holds(rule, operator, about, size)
        for operator, rule in zip(problem.profile.graph.operators, lines, strict=True)
    )


def data_policy(problem: Problem) -> Policy:
    """Parameters are whole, or summands of their gradients are made elsewhere; tensors are cut as
    they are cut fastest.
    """
    graph = problem.profile.graph
    parameters = parameters_by_name(graph)

    def keeps_parameters(v: int, rule: AxisRule) -> bool:
        names = reads(graph.operators[v])
        both = zip(names, rule.inputs, strict=True)
        return all(part == "R" for name, part in both if name in parameters
                   and parameters[name].trainable)  # fmt: skip

    return Policy(rule=keeps_parameters, leaves=lambda name, part: may_leave(graph, name, part))


def cut_further(problem: Problem, data: Sharding, stage: int) -> Sharding:
    """Data parallelism with the parts of ZeRO's stage 1, 2 or 3."""
    cut = dict(_parts(problem, data.mesh[0]))
    match stage:
        case 1:
            return replace(data, states=cut)
        case 2:
            return replace(data, states=cut, gradients=cut)
    return replace(data, parameters={**data.parameters, **cut})


def _parts(problem: Problem, size: int) -> Iterator[tuple[str, Spec]]:
    """The first dimension that can be cut of each trained parameter: along it a part lies in one
    piece.
    """
    for one in problem.profile.graph.parameters:
        for dim in range(len(one.shape)) if one.trainable else ():
            if divides(one.shape, f"S{dim}", size):
                yield one.name, (f"S{dim}",)
                break
