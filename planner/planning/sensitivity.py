"""The bottlenecks of a plan: each kind of link and each type of device is made twice as fast in
turn, the plan stays as it is, and the simulator gives its new iteration time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy
from planner.artefacts.topology import Link, Topology
from planner.costs.actions import ActionCosts
from planner.costs.evaluate import Evaluation, evaluate
from planner.costs.transfers import allreduce_s
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
    all-reduces (`Topology.tables`) become faster by as much as the ring formula does.

    Raises:
        ValueError: if the strategy is wrong.
    """
    base, topology = evaluate(problem, strategy), problem.topology
    own_s = iterate(problem, strategy, base).iteration_s
    classes, gains = dict(link_classes(topology)), []
    if len(classes) > 1:
        classes[ALL_LINKS] = frozenset(range(len(topology.links)))
    for name, members in classes.items():
        there = with_faster(topology, members)
        changed = replace(base, costs=replace(base.costs, sum_s=_sums(base, topology, there)))
        time_s = iterate(replace(problem, topology=there), strategy, changed).iteration_s
        ends = {frozenset((topology.links[i].source, topology.links[i].target)) for i in members}
        change = time_s / own_s - 1
        gains.append(Gain("links", name, len(ends), time_s, change, name == ALL_LINKS))
    for kind in topology.device_types:
        devices = {d for d, device in enumerate(topology.devices) if device.type == kind.name}
        changed = replace(base, costs=_computing_faster(base.costs, devices))
        time_s = iterate(problem, strategy, changed).iteration_s
        gains.append(Gain("device type", kind.name, len(devices), time_s, time_s / own_s - 1))
    return tuple(sorted(gains, key=lambda gain: (gain.change, gain.kind, gain.name)))


def link_class(link: Link) -> str:
    """The class of a link: its name, else its figures."""
    figures = f"{format_rate(link.bandwidth_bytes_per_s)}, {format_seconds(link.latency_s)}"
    return link.name or figures


def link_classes(topology: Topology) -> Mapping[str, frozenset[int]]:
    """The indices of the links of each class, in the order of the links."""
    classes: dict[str, list[int]] = {}
    for i, link in enumerate(topology.links):
        classes.setdefault(link_class(link), []).append(i)
    return {name: frozenset(members) for name, members in classes.items()}


def with_faster(topology: Topology, links: frozenset[int]) -> Topology:
    """The topology with some links, by index, twice as wide and half as far."""
    return replace(
        topology,
        links=tuple(
            replace(
                link,
                bandwidth_bytes_per_s=FASTER * link.bandwidth_bytes_per_s,
                latency_s=link.latency_s / FASTER,
            )
            if i in links
            else link
            for i, link in enumerate(topology.links)
        ),
    )


def _sums(base: Evaluation, before: Topology, after: Topology) -> tuple[float, ...]:
    """Times of the all-reduces on the links of `after`."""
    rings = [replace(topology, tables=()) for topology in (before, after)]
    times_s = []
    # The all-reduces of a flow come again in each of its rounds, and cost the same.
    for one, sum_s in zip(base.program.sums, base.costs.sum_s, strict=False):
        old_s, new_s = (allreduce_s(ring, one.devices, one.bytes) for ring in rings)
        times_s.append(sum_s * (new_s / old_s) if old_s > 0 else sum_s)
    return tuple(times_s)


def _computing_faster(costs: ActionCosts, devices: set[int]) -> ActionCosts:
    """The costs where some devices compute faster."""

    def shorter(
        times: Mapping[tuple[int, int], float],
    ) -> dict[tuple[int, int], float]:
        return {
            (of, device): time_s / FASTER if device in devices else time_s
            for (of, device), time_s in times.items()
        }

    return replace(
        costs,
        forward_s=shorter(costs.forward_s),
        backward_s=shorter(costs.backward_s),
        backward_left_s=shorter(costs.backward_left_s),
        step_s={
            d: time_s / FASTER if d in devices else time_s for d, time_s in costs.step_s.items()
        },
    )
