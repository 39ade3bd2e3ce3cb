"""Activations that wait in the host's memory from the forward to the backward of a stage
(`Stage.offloaded`): which they are, and when their copies run.

An activation waits there if it has at least `LEAST_OFFLOADED_BYTES`, if all operators that keep it,
and all segments that read it to be run again, are offloaded, and if the stage makes it from data
and for itself. What operators made that such a segment leaves out stays on the device. A storage is
copied once, however many views of it are kept:

    forward    | segment 0 | segment 1 | segment 2 |    a segment ends when the copies of the one
    copies                 |   0    |  |    1   |   2 | before have ended
    backward   |    | segment 2 | segment 1 | segment 0 |    a segment begins when its own copies
    copies     | 2  |   1   |   |    0    |                  have; then those of the next one start

So the device holds the activations of two segments at most in addition, whatever the copies take,
and a pass ends with its last copy. All devices that share a link are taken to copy at the same
time. On hosts whose devices are processes, their cores make the copies, so that all times add up.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, storage_owner
from planner.artefacts.segments import LEAST_OFFLOADED_BYTES, offloaded_of, segments_of
from planner.artefacts.strategy import Stage, indices_of
from planner.artefacts.topology import Host, Topology, hosts_by_name
from planner.costs.local_stage import local_stage
from planner.costs.passes import (
    STAYS,
    Leaving,
    RerunOperators,
    read_from_outside,
    rerun_operators,
    used_outside,
)
from planner.resharding.over_replicas import over_replicas
from planner.support.errors import TopologyError
from planner.support.memo import remembered


class HostSegment(NamedTuple):
    """An offloaded segment, by operators of a profile.

    Attributes:
        end: its last operator, behind whose forward it is copied.
        last: its last one with a backward, before which it has to be back.
        out_bytes: that are copied to the host.
        back_bytes: that are copied back.
    """

    end: int
    last: int
    out_bytes: int
    back_bytes: int


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What waits in the host's memory of one microbatch of a stage, by operators of a profile.

    Attributes:
        segments: in their order.
        leaving: the storages that wait there.
    """

    segments: tuple[HostSegment, ...] = ()
    leaving: Leaving = STAYS

    @property
    def host_bytes(self) -> int:
        """The bytes that wait there."""
        return sum(one.back_bytes for one in self.segments)


NOT_OFFLOADED = Offloaded()


def stage_offload(profile: Profile, stage: Stage) -> Offloaded:
    """What waits of a stage; of one that is split, by the operators of `local_stage`."""
    return _stage_offload(profile, stage) if stage.offloaded else NOT_OFFLOADED


@remembered(kept=64)
def _stage_offload(profile: Profile, stage: Stage) -> Offloaded:
    graph, shared = profile.graph, over_replicas(stage, profile.graph)
    if shared.sharding is None:
        rows = indices_of(stage, graph)
        again = rerun_operators(segments_of(stage, graph), rows)
        return _Waiting(profile, rows, again).offload(rows, stage)
    local = local_stage(profile, stage)
    waiting = _Waiting(local.profile, local.inside, local.segments)
    return waiting.offload(local.operator_rows, shared, graph)


class _Waiting:
    """What may wait of a stage.

    Args:
        profile: of the operators at their sizes on the device.
        inside: the operators of the stage.
        again: segments that a backward runs again.
    """

    def __init__(
        self, profile: Profile, inside: Sequence[int], again: Sequence[RerunOperators]
    ) -> None:
        graph = profile.graph
        self._profile, self._inside = profile, frozenset(inside)
        self._again = [one.operators for one in again]
        around = (*read_from_outside(graph, self._inside), *used_outside(graph, self._inside))
        held = (name for one in again for v in one.kept for name in graph.operators[v].outputs)
        stays = {storage_owner(profile, name, self._inside) for name in (*around, *held)}
        sizes = {name: one.bytes for name, one in tensors_by_name(graph).items()}
        self._bytes = {
            name: sizes[name]
            for name in _of_data(graph, self._inside)
            if name not in stays and sizes[name] >= LEAST_OFFLOADED_BYTES
        }

    def offload(self, rows: Sequence[int], stage: Stage, graph: Graph | None = None) -> Offloaded:
        """What waits.

        Args:
            rows: by place in the stage, its operators.
            stage: with the segments.
            graph: that the stage names operators of; None for that of the profile.
        """
        places = offloaded_of(stage, self._profile.graph if graph is None else graph)
        segment_of = {v: k for k, one in enumerate(places) for v in rows[one.first : one.end]}
        end = [rows[one.end - 1] for one in places]
        until = [*end[1:], max(self._inside)]
        out, back = [0] * len(places), [0] * len(places)
        storages: dict[str, int] = {}
        for owner, keepers in self._keepers(segment_of).items():
            if keepers[0] >= 0:
                out[keepers[0]] += self._bytes[owner]
                if min(keepers) >= 0:
                    back[keepers[-1]] += self._bytes[owner]
                    storages[owner] = until[keepers[0]]
        private: dict[int, int] = {}
        for v in sorted(segment_of.keys() - frozenset().union(*self._again)):
            size, k = self._profile.operators[v].stash_private_bytes, segment_of[v]
            if size >= LEAST_OFFLOADED_BYTES:
                out[k] += size
                back[k] += size
                private[v] = until[k]
        segments = (
            HostSegment(end[k], rows[one.last], out[k], back[k]) for k, one in enumerate(places)
        )
        return Offloaded(tuple(segments), Leaving(storages, private))

    def _keepers(self, segment_of: Mapping[int, int]) -> Mapping[str, list[int]]:
        """By owner of a storage that may wait, the offloaded segments that keep it, in the order in
        which they do; -1 is what is not offloaded.
        """
        keepers: dict[str, list[int]] = {}
        for v, names in self._kept():
            for name in names:
                owner = storage_owner(self._profile, name, self._inside)
                if owner in self._bytes:
                    keepers.setdefault(owner, []).append(segment_of.get(v, -1))
        return keepers

    def _kept(self) -> Iterator[tuple[int, Sequence[str]]]:
        """The operators of the stage in their order, each with the tensors that it keeps; of a
        segment that is run again, its first one in the stage's order with those that it reads.
        """
        of = {v: some for some in self._again for v in some}
        seen = set[frozenset[int]]()
        for v in sorted(self._inside):
            if v not in of:
                yield v, self._profile.operators[v].stash_tensors
            elif of[v] not in seen and self._profile.graph.operators[v].type != "Reshard":
                seen.add(of[v])
                yield v, read_from_outside(self._profile.graph, of[v])


def _of_data(graph: Graph, inside: Collection[int]) -> list[str]:
    """The tensors that some operators make from others than parameters alone."""
    found = dict.fromkeys(read_from_outside(graph, inside))
    coming = len(found)
    for v in sorted(inside):
        if not found.keys().isdisjoint(graph.operators[v].inputs):
            found.update(dict.fromkeys(graph.operators[v].outputs))
    return [*found][coming:]


# ---------------------------------------------------------------------------------- times


@dataclass(frozen=True, slots=True)
class HostCopies:
    """The times of the copies of a stage on one of its devices, in s.

    Attributes:
        out: by place of the operator behind whose forward they start.
        back: by place of the operator before whose backward they have to have ended.
        beside: whether they run beside computations.
    """

    out: Mapping[int, float] = field(default_factory=dict)
    back: Mapping[int, float] = field(default_factory=dict)
    beside: bool = True


NO_COPIES = HostCopies()


def host_copies(problem: Problem, stage: Stage, device: int) -> HostCopies:
    """The copies of a stage on one of its devices.

    Raises:
        TopologyError: if the device has no link to its host's memory.
    """
    if not stage.offloaded:
        return NO_COPIES
    rate, host = host_rate_bytes_per_s(problem.topology, device), host_of(problem.topology, device)
    places = offloaded_of(stage, problem.profile.graph)
    every = zip(places, stage_offload(problem.profile, stage).segments, strict=True)
    both = [(place, one) for place, one in every if one.out_bytes]
    return HostCopies(
        {place.end - 1: one.out_bytes / rate for place, one in both},
        {place.last: one.back_bytes / rate for place, one in both},
        beside=host.cores is None,
    )


def host_of(topology: Topology, device: int) -> Host:
    """The host of a device."""
    return hosts_by_name(topology)[topology.devices[device].host]


def host_rate_bytes_per_s(topology: Topology, device: int) -> float:
    """The bandwidth of a device's copies from or to its host's memory, while all devices that share
    its link copy, too.

    Raises:
        TopologyError: if it has no such link.
    """
    host = host_of(topology, device)
    if host.host_link is None:
        raise TopologyError(
            f"topology {topology.name}: {host.name} has no host_link, over which activations could"
            " be offloaded; add one such as host_link: {bandwidth: 12 GB/s}"
        )
    count = sum(one.host == host.name for one in topology.devices)
    return host.host_link.bandwidth_bytes_per_s / min(host.host_link.num_devices, count)


class CopyClock:
    """The copies of one pass.

    Args:
        copies: of the stage.
    """

    def __init__(self, copies: HostCopies) -> None:
        self._copies, self._free = copies, 0.0
        self._todo = iter(sorted(copies.back, reverse=True))

    def behind(self, place: int, now: float) -> float:
        """When a forward goes on behind an operator that has ended."""
        copy_s = self._copies.out.get(place)
        if copy_s is None:
            return now
        now = max(now, self._free)  # the copies of the segment before have ended
        self._free = now + copy_s
        return now if self._copies.beside else self._free

    def begin(self, now: float) -> float:
        """When a backward goes on that has come to where the next copies back start."""
        place = next(self._todo, None)
        if place is not None:
            self._free = max(now, self._free) + self._copies.back[place]
        return now if self._copies.beside else max(now, self._free)

    def before(self, place: int, now: float) -> float:
        """When the backward of an operator starts that might have started."""
        if place not in self._copies.back:
            return now
        return self.begin(max(now, self._free))

    def end(self, now: float) -> float:
        """When a forward ends whose last operator has ended."""
        return max(now, self._free)
