"""ZeRO: data parallelism whose devices each keep a part of what all of them would keep.

Replicas run microbatches of their own, and keep parts over all of them (FSDP) or over those of a
host, which gathers over the links inside it (HSDP); see `resharding/over_replicas.py`.

Or the samples of a microbatch are split along one axis over all devices or, with replicas, over a
part of them that divides the microbatch. Such a mesh of n devices, and n replicas with microbatches
of an n-th of the samples, are one plan but for batch normalizations, which see other samples
(`tests/costs/test_sharing.py`): where microbatches of all sizes are asked, the mesh is left out.
Where no number divides the microbatch, all devices split what they can split fastest, such as the
sequence. Along the axis each parameter is cut in the first dimension that can be (Rajbhandari et
al. 2020, section 5):

    0   nothing: each device has whole copies, and samples of its own
    1   the optimizer's state: each device steps through its part, which is gathered then
    2   gradients, too: each backward scatters them
    3   parameters, too: each forward gathers them, and each backward does so again
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from planner.artefacts.graph import parameters_by_name
from planner.artefacts.problem import Problem, Result, Status, switches_of
from planner.artefacts.profile import BatchNorm, SplitRule, has_rules
from planner.artefacts.sharding import CHUNKS, AxisRule, Sharding, Spec, reads
from planner.solvers.intra.lines import Axis, lines_of
from planner.solvers.intra.policy import Policy
from planner.solvers.sharded.best import best_of
from planner.solvers.sharded.complete import shardings
from planner.solvers.sharded.layout import (
    NO_RULES,
    NOTHING_TO_SPLIT,
    ONE_DEVICE,
    Layout,
    divisors,
    groups_of,
    host_by_host,
    smallest_host,
)
from planner.solvers.sharded.options import Zero
from planner.solvers.sharded.rules import Named, divides, holds, named, share_work
from planner.support.memo import remembered


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The plan on all devices.

    Args:
        time_limit_s: not needed.
    """
    stage = switches_of(problem.search, Zero).zero_stage
    space = f"ZeRO-{stage} over all devices"
    layouts = list(_over_replicas(problem, stage))
    if has_rules(problem.profile):
        layouts += _layouts(problem, stage)
    if not layouts:
        reason = NOTHING_TO_SPLIT if has_rules(problem.profile) else NO_RULES
        if len(problem.topology.devices) == 1:
            reason = ONE_DEVICE
        return Result(Status.INFEASIBLE, None, space=space, reason=reason)
    return best_of(problem, layouts, space)


def _over_replicas(problem: Problem, stage: int) -> Iterator[Layout]:
    """A replica on every device, or on as many of them as the microbatches can be dealt to evenly,
    where they exchange gradients in their backwards: with parts over all, and over the most of a
    host that are fewer. Whole replicas are the solver `data-parallel`'s.
    """
    if stage == 0 or problem.training.schedule.is_asynchronous:
        return
    rounds = problem.num_microbatches
    count = min(len(problem.topology.devices), rounds)
    if stage >= 2:
        count = next(n for n in range(count, 0, -1) if rounds % n == 0)
    sizes = [n for n in divisors(count) if 1 < n <= smallest_host(problem)]
    everything = (tuple(range(len(problem.profile.graph.operators))),)
    for over in [*dict.fromkeys([count, *reversed(sizes)])][:2]:
        if over > 1:
            groups = groups_of(host_by_host(problem, over), (1,), count, 1)
            yield Layout(everything, groups, [None], sharing=(over, stage))


def replicas_suffice(problem: Problem) -> bool:
    """Whether each plan on a mesh that splits the samples of a microbatch is one with replicas and
    smaller microbatches, which are asked, too. Batch normalizations in training normalise by the
    statistics of the whole microbatch, and an asynchronous schedule steps after each one.
    """
    frozen = problem.profile.batch_norm is BatchNorm.FROZEN
    return problem.any_size and frozen and not problem.training.schedule.is_asynchronous


def _layouts(problem: Problem, stage: int) -> Iterator[Layout]:
    """One stage on a mesh of all devices or, with replicas, of as many as a divisor says: all that
    divide the samples of a microbatch, or else the largest that anything can be cut for.

    Samples are split as is fastest by the program of the rules and, once more, by all operators
    with parameters. The program adds up computations and sums of gradients, which run at once here:
    of the experts of a mixture it runs all samples everywhere, so that their gradients need no sum.
    """
    graph, devices = problem.profile.graph, host_by_host(problem)
    everything = (tuple(range(len(graph.operators))),)
    samples, most = problem.profile.microbatch_size, problem.num_microbatches
    sizes = [n for n in reversed(divisors(len(devices))) if n > 1 and len(devices) // n <= most]
    dividing = [n for n in sizes if samples % n == 0]
    if stage and dividing and replicas_suffice(problem):
        return
    policy = data_policy(problem)
    policies = [policy, replace(policy, must=lambda v: bool(graph.operators[v].parameters))]
    searches = [_Lines(problem, one) for one in policies[: 2 if dividing else 1]]
    for size in dividing or sizes:
        replicas = len(devices) // size
        groups = groups_of(devices, (size,), replicas, 1)
        found = dict.fromkeys(one.along(groups[0], most / replicas) for one in searches)
        for lines in filter(share_work, found):
            (data,) = shardings(graph, everything, (size,), [lines])
            yield Layout(everything, groups, [cut_further(problem, data, stage)], number=replicas)
            if not dividing:
                return


class _Lines:
    """The rules of all operators along meshes of one axis, the larger ones first.

    Args:
        policy: which are allowed.
    """

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self._problem, self._policy = problem, policy
        self._about = dict(named(problem.profile.graph))
        self._lines: tuple[SplitRule, ...] = ()

    def along(self, groups: Sequence[tuple[int, ...]], rounds: float) -> tuple[SplitRule, ...]:
        """The rules on some meshes of equally many devices. What is cut along samples for many
        devices is so for fewer: that is solved once.

        Args:
            rounds: microbatches of a replica in an iteration.
        """
        problem, size = self._problem, len(groups[0])
        if not share_work(self._lines) or not _hold(problem, self._lines, self._about, size):
            (self._lines,) = lines_of(problem, groups, [Axis(size, self._policy, True)], rounds)
        return self._lines


def _hold(
    problem: Problem, lines: Sequence[SplitRule], about: Mapping[str, Named], size: int
) -> bool:
    """Whether the rules of all operators hold on an axis of some devices."""
    return all(
        holds(rule, operator, about, size)
        for operator, rule in zip(problem.profile.graph.operators, lines, strict=True)
    )


@remembered
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

    return Policy(rule=keeps_parameters, further=False)


def cut_further(problem: Problem, data: Sharding, stage: int) -> Sharding:
    """Data parallelism with the parts of ZeRO's stage 0, 1, 2 or 3."""
    if stage == 0:
        return data
    cut = dict(_parts(problem, data.mesh[0]))
    match stage:
        case 1:
            return replace(data, states=cut)
        case 2:
            return replace(data, states=cut, gradients=cut)
    return replace(data, parameters={**data.parameters, **cut})


def _parts(problem: Problem, size: int) -> Iterator[tuple[str, Spec]]:
    """The first dimension that can be cut into equal parts of each trained parameter, or else
    chunks of its rows: along the first one a part lies in one piece.
    """
    for one in problem.profile.graph.parameters:
        if one.trainable and one.shape:
            cuts = (f"S{dim}" for dim in range(len(one.shape)))
            equal = (cut for cut in cuts if divides(one.shape, cut, size))
            yield one.name, (next(equal, CHUNKS),)
