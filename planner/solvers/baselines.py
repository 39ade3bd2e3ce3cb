"""Plans that take no search, to start from and to compare with.

`single`          everything on one device: the fastest that the model fits on
`data_parallel`   the whole model on every device, microbatches dealt in turn, gradients summed
once per iteration
`even`            a straight pipeline whose stages have equally many layers, one device each: the
partition by hand that GPipe (Huang et al. 2019) is given. A layer is an
operator with trained parameters and all that follows it up to the next. On
more than 64 devices such pipelines run side by side, as replicas, which
keep the optimizer's state in parts where nothing fits otherwise (the
distributed optimizer of Megatron-LM)
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from planner.artefacts.graph import parameters_by_name
from planner.artefacts.problem import Problem, Result
from planner.artefacts.strategy import Strategy
from planner.clusters.routes import chain
from planner.costs.update import has_state
from planner.solvers.fit import fastest_first, first_that_fits, pipeline
from planner.solvers.segments import recompute_choices

# On more devices than `_MAX_STAGES`, a pipeline has at most that many stages, or a half of it, a
# quarter.. The first one tried has at most `_FORWARDS` forwards, which are simulated in a second.
_MAX_STAGES, _FORWARDS = 64, 2**16
# A smaller share of the time in which devices idle is not worth a note.
_NOTICEABLE = 0.1


def single(problem: Problem, time_limit_s: float) -> Result:
    """One stage on the fastest device that has room for it; only one device of each kind is tried.

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


def data_parallel(problem: Problem, time_limit_s: float) -> Result:
    """One stage on all devices, or on the fastest of them: as many as there are microbatches, or,
    under an asynchronous schedule, the most to which these can be dealt evenly.

    Args:
        time_limit_s: not needed.
    """
    everything = range(len(problem.profile.operators))
    num_microbatches, num_devices = problem.num_microbatches, len(problem.topology.devices)
    count = min(num_devices, num_microbatches)
    if problem.training.schedule.is_asynchronous:
        count = next(n for n in range(count, 0, -1) if num_microbatches % n == 0)
    devices = sorted(fastest_first(problem)[:count])
    strategies = (
        pipeline(problem, [everything], [devices], recompute=recompute)
        for recompute in recompute_choices(problem)
    )
    where = "all" if count == num_devices else f"{count} of {num_devices}"
    result = first_that_fits(problem, strategies, f"one stage on {where} devices")
    return result if result.strategy is None else replace(result, reason=_unused(problem, count))


def _unused(problem: Problem, count: int) -> str | None:
    """Why plain data parallelism leaves devices idle, and how to change that; None if it leaves
    none, or only for a small share of the time.

    Args:
        count: of the devices that it uses.
    """
    num_microbatches, num_devices = problem.num_microbatches, len(problem.topology.devices)
    advice = "(--microbatches or --global-batch)"
    microbatches = "1 microbatch" if num_microbatches == 1 else f"{num_microbatches} microbatches"
    if num_microbatches < num_devices:
        return (
            f"{microbatches} per iteration for {num_devices} devices: a device needs at least one;"
            f" give {num_devices} or more {advice}"
        )
    if num_microbatches % num_devices == 0:
        return None
    uneven = f"{microbatches} cannot be dealt evenly to {num_devices} devices"
    if problem.training.schedule.is_asynchronous:
        return (
            f"{uneven}, as the schedule {problem.training.schedule.value} needs, so {count} of them"
            f" {'is' if count == 1 else 'are'} used; give a multiple of {num_devices} microbatches"
            f" {advice}"
        )
    most = -(-num_microbatches // count)
    if num_microbatches > (1 - _NOTICEABLE) * most * count:
        return None
    return (
        f"{uneven}: some compute {most} and others {most - 1}, and these idle; give a multiple of"
        f" {num_devices} microbatches {advice}"
    )


def even(problem: Problem, time_limit_s: float) -> Result:
    """As many equal stages as there are devices and layers, on well linked neighbours; on more
    than 64 devices, up to 64 stages.

    Args:
        time_limit_s: not needed.
    """
    return first_that_fits(problem, _candidates(problem), "stages with equally many layers")


def _candidates(problem: Problem) -> Iterator[Strategy]:
    """Whole copies first; then the optimizer's state, if there is any, in parts over replicas."""
    yield from _pipelines(problem)
    training = problem.training
    if has_state(problem) and not training.schedule.is_asynchronous:
        for strategy in _pipelines(problem):
            if any(stage.num_replicas > 1 for stage in strategy.stages):
                stages = (replace(one, over=one.num_replicas, zero=1) for one in strategy.stages)
                yield replace(strategy, stages=tuple(stages))


def _pipelines(problem: Problem) -> Iterator[Strategy]:
    """All devices first, then fewer; with one more microbatch in flight first, which hides
    transfers, then without.
    """
    fastest, starts = fastest_first(problem), _layer_starts(problem)
    most = min(len(fastest), len(starts), _MAX_STAGES)
    counts: Sequence[int] = range(most, 0, -1)
    if len(fastest) > _MAX_STAGES:
        counts = _affordable_first([most >> i for i in range(most.bit_length())], problem)
    for recompute in recompute_choices(problem):
        for count in counts:
            width = _replicas(problem, count)
            used = tuple(sorted(fastest[: count * width]))
            devices = chain(problem.topology, used)
            cuts = [starts[len(starts) * s // count] for s in range(1, count)]
            bounds = [0, *cuts, len(problem.profile.operators)]
            stages = [range(a, b) for a, b in pairwise(bounds)]
            where = [devices[s * width : (s + 1) * width] for s in range(count)]
            for extra in (1, 0):
                yield pipeline(problem, stages, where, recompute=recompute, extra=extra)


def _affordable_first(counts: Sequence[int], problem: Problem) -> Sequence[int]:
    """The largest number of stages that takes few forwards, then larger ones, which need less
    memory, then the others.

    Args:
        counts: numbers of stages, descending.
    """
    forwards = _FORWARDS // problem.num_microbatches
    few = [count for count in counts if count <= forwards]
    many = [count for count in counts if count > forwards]
    return [*few[:1], *reversed(many), *few[1:]]


def _replicas(problem: Problem, count: int) -> int:
    """The number of pipelines with `count` stages that run side by side."""
    devices = len(problem.topology.devices)
    if devices <= _MAX_STAGES:
        return 1
    return max(1, min(devices // count, problem.num_microbatches))


def _layer_starts(problem: Problem) -> list[int]:
    """The first operator of every layer, ascending; the first layer starts with the graph."""
    graph = problem.profile.graph
    parameters = parameters_by_name(graph)
    starts = [
        v
        for v, operator in enumerate(graph.operators)
        if any(parameters[name].trainable for name in operator.parameters)
    ]
    # Operators before the first layer belong to it.
    return [0, *starts[1:]]
