"""The bottlenecks of a plan: each kind of link and each type of device is made twice as fast in
turn, the plan stays as it is, and the simulator gives its new iteration time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy
from planner.artefacts.topology import CollectiveTable, DeviceType, Link, Topology
from planner.costs.evaluate import evaluate
from planner.costs.transfers import collective_s
from planner.simulator.steady import iterate
from planner.support.units import format_rate, format_seconds

FASTER = 2
# Where one kind of link alone brings nothing because another is as slow.
ALL_LINKS = "all links together"


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain from a resource that is twice as fast.

    Attributes:
        kind: "links" or "device type".
        name: of the links, or their figures where they have no name; of the type of device.
        count: how many of it there are; the two directions of a link count once.
        iteration_s: of the plan with it.
        change: iteration_s over the plan's own, less 1: -0.3 is 30 % shorter.
        together: whether it stands for other resources together.
    """

    kind: str
    name: str
    count: int
    iteration_s: float
    change: float
    together: bool = False


def sensitivity(problem: Problem, strategy: Strategy) -> tuple[Gain, ...]:
    """The gains from resources that are twice as fast: links with twice the bandwidth and half the
    latency, devices with half the time of forwards, backwards and steps. The largest gain first;
    equals by kind and name.

    Links are taken together that have a name in common, or no name and the same figures. Measured
    collectives (`Topology.tables`) become faster by as much as their formulas do.

    Raises:
        ValueError: if the strategy is wrong.
    """
    base, topology = evaluate(problem, strategy), problem.topology
    own_s = iterate(problem, strategy, base).iteration_s

    def with_it_s(changed: Problem) -> float:
        # Where devices run several stages, lists are made for given times. The plan has its own.
        evaluation = replace(evaluate(changed, strategy), program=base.program)
        return iterate(changed, strategy, evaluation).iteration_s

    classes, gains = dict(link_classes(topology)), []
    if len(classes) > 1:
        classes[ALL_LINKS] = frozenset(range(len(topology.links)))
    for name, members in classes.items():
        time_s = with_it_s(replace(problem, topology=_with_faster_links(topology, members)))
        ends = {frozenset((topology.links[i].source, topology.links[i].target)) for i in members}
        change = time_s / own_s - 1
        gains.append(Gain("links", name, len(ends), time_s, change, name == ALL_LINKS))
    for kind in topology.device_types:
        count = sum(device.type == kind.name for device in topology.devices)
        time_s = with_it_s(_with_faster_devices(problem, kind))
        gains.append(Gain("device type", kind.name, count, time_s, time_s / own_s - 1))
    return tuple(sorted(gains, key=lambda gain: (gain.change, gain.kind, gain.name)))


def _link_class(link: Link) -> str:
    """The class of a link: its name, else its figures."""
    figures = f"{format_rate(link.bandwidth_bytes_per_s)}, {format_seconds(link.latency_s)}"
    return link.name or figures


def link_classes(topology: Topology) -> Mapping[str, frozenset[int]]:
    """The indices of the links of each class, in the order of the links."""
    classes: dict[str, list[int]] = {}
    for i, link in enumerate(topology.links):
        classes.setdefault(_link_class(link), []).append(i)
    return {name: frozenset(members) for name, members in classes.items()}


def _with_faster_links(topology: Topology, links: frozenset[int]) -> Topology:
    """The topology with some links, by index, twice as wide and half as far, and measured
    collectives as much faster as their formulas are.
    """
    faster = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=FASTER * link.bandwidth_bytes_per_s,
            latency_s=link.latency_s / FASTER,
        )
        if i in links
        else link
        for i, link in enumerate(topology.links)
    )
    bare = replace(topology, tables=()), replace(topology, tables=(), links=faster)
    return replace(
        topology, links=faster, tables=tuple(_faster(table, *bare) for table in topology.tables)
    )


def _faster(table: CollectiveTable, before: Topology, after: Topology) -> CollectiveTable:
    """A table of measured times on other links."""
    index = {device.name: d for d, device in enumerate(before.devices)}
    group = tuple(sorted(index[name] for name in table.devices[: table.num_devices]))

    def scaled_s(size_bytes: int, time_s: float) -> float:
        old_s, new_s = (collective_s(one, group, table.kind, size_bytes) for one in (before, after))
        return time_s * new_s / old_s if old_s > 0 else time_s

    return replace(table, times=tuple((size, scaled_s(size, one)) for size, one in table.times))


def _with_faster_devices(problem: Problem, kind: DeviceType) -> Problem:
    """The problem where operators and steps take half as long on a type of device, collectives as
    long as before.
    """
    known = problem.calibration
    if known.device_type in ("", kind.name):
        correction = replace(
            known,
            device_type=kind.name,
            forward=known.forward / FASTER,
            backward=known.backward / FASTER,
            host=known.host * FASTER,  # which is as fast as before
            deviations=tuple(
                replace(one, forward=one.forward / FASTER, backward=one.backward / FASTER)
                for one in known.deviations
            ),
            loss_forward_s_per_byte=known.loss_forward_s_per_byte / FASTER,
            loss_backward_s_per_byte=known.loss_backward_s_per_byte / FASTER,
            steps=known.steps / FASTER,
        )
        return replace(problem, calibration=correction)
    # The calibration is for the profile's own type. Times on others follow from their speeds.
    faster = replace(
        kind,
        flops={dtype: FASTER * rate for dtype, rate in kind.flops.items()},
        memory_bandwidth_bytes_per_s=FASTER * kind.memory_bandwidth_bytes_per_s,
    )
    types = tuple(faster if one == kind else one for one in problem.topology.device_types)
    return replace(problem, topology=replace(problem.topology, device_types=types))
