"""The sums of gradients of an iteration, over replicas and over the lines of meshes.

A gradient that lies as summands along an axis of a mesh is added up over the lines of that axis,
together with those of the other replicas of the stage, once per iteration. Along an axis that cuts
it each part is added up for itself. Along one on which all have the same, each coordinate does the
same sum for itself. Where nothing is split, that is `strategy.gradient_sums`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from planner.graph import Graph, Parameter, holders
from planner.sharding import Spec, local_shape
from planner.splitting.reshardings import homes
from planner.strategy import GradientSum, Stage, Strategy, buckets, stage_of
from planner.strategy import gradient_sums as unsplit_sums


def gradient_sums(strategy: Strategy, graph: Graph) -> tuple[GradientSum, ...]:
    """The all-reduces of an iteration, in their one global order: first those of single stages,
    which are ready early, then those over several stages, of tied parameters. Parameters of the
    same devices are parted into buckets in the order in which a backward makes their gradients.

    Raises:
        ValueError: if a parameter of several stages does not lie in the same way in all of them.
    """
    if all(stage.sharding is None for stage in strategy.stages):
        return unsplit_sums(strategy, graph)
    stages, users = stage_of(strategy, graph), holders(graph)
    groups: dict[tuple[int, tuple[int, ...]], list[Parameter]] = {}
    lies = [_gradients(stage, graph) for stage in strategy.stages]
    for parameter in graph.parameters:
        used_in = sorted({stages[v] for v in users[parameter.name]})
        if not parameter.trainable or not used_in:
            continue
        ways = {(_mesh(strategy.stages[s]), lies[s].get(parameter.name)) for s in used_in}
        if len(ways) > 1:
            raise ValueError(f"parameter {parameter.name} lies differently in stages {used_in}")
        by_part = [_devices_by_part(strategy.stages[s], lies[s].get(parameter.name))
                   for s in used_in]  # fmt: skip
        here = _local(parameter, strategy.stages[used_in[0]], lies[used_in[0]])
        for part in sorted(by_part[0]):
            devices = tuple(sorted({d for one in by_part for d in one[part]}))
            if len(devices) > 1:
                groups.setdefault((len(used_in), devices), []).append(here)
    return tuple(
        GradientSum(key[1], tuple(p.name for p in bucket), sum(p.bytes for p in bucket))
        for key in sorted(groups)
        for bucket in buckets(sorted(groups[key], key=lambda p: -min(users[p.name])))
    )


def _mesh(stage: Stage) -> tuple[int, ...]:
    return () if stage.sharding is None else stage.sharding.mesh


def _gradients(stage: Stage, graph: Graph) -> Mapping[str, Spec]:
    """By name, how the gradients of a split stage's parameters lie; none of an unsplit one."""
    if stage.sharding is None:
        return {}
    return {name: home.gradient for name, home in homes(stage, graph).items()}


def _local(parameter: Parameter, stage: Stage, lies: Mapping[str, Spec]) -> Parameter:
    """A parameter of the size of its gradient on one device."""
    if stage.sharding is None:
        return parameter
    shape = local_shape(parameter.shape, lies[parameter.name], stage.sharding.mesh)
    return replace(parameter, shape=shape)


def _devices_by_part(
    stage: Stage, gradient: Spec | None
) -> Mapping[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """The devices that add up their gradients, over all replicas, by their coordinates on the axes
    along which they do not.
    """
    if stage.sharding is None or gradient is None:
        return {(): stage.devices}
    found: dict[tuple[int, ...], list[int]] = {}
    for group in stage.groups:
        for index, device in enumerate(group):
            where = coordinates(index, stage.sharding.mesh)
            part = tuple(c for c, own in zip(where, gradient, strict=True) if own != "P")
            found.setdefault(part, []).append(device)
    return {part: tuple(devices) for part, devices in found.items()}


def coordinates(index: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The coordinates of a device of a mesh, by its position.

    >>> coordinates(5, (2, 4))
    (1, 1)
    """
    return tuple(_coordinates(index, mesh))


def _coordinates(index: int, mesh: tuple[int, ...]) -> Iterator[int]:
    rest = prod(mesh)
    for size in mesh:
        rest //= size
        yield index // rest % size
