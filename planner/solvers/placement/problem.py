"""`PlacementProblem`: the costs of placing single operators on devices, as arrays.

All algorithms that give every operator one device take their times, sizes and limits from here, so
that these mean the same as the evaluator's. `timetable.py` runs a placement.

Legend: N operators, in topological order; D devices; i, j operators; p, q devices.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.artefacts.graph import Graph, consumers, holders, producers, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, storage_owner
from planner.artefacts.strategy import Strategy
from planner.clusters.routes import pair_widths
from planner.costs.casts import cast_bytes
from planner.costs.evaluate import evaluate
from planner.costs.operators import operator_times, slowdowns
from planner.costs.process_memory import least_reserve_bytes
from planner.costs.stage_memory import limit_bytes
from planner.costs.update import update_copies
from planner.solvers.placement.links import Pair, SharedLink, shared_links
from planner.support.arrays import Floats, Ints
from planner.support.memo import remembered

Placement = tuple[int, ...]
"""The device of each operator."""

KeptBytes = Mapping[tuple[int, ...], int]
"""Bytes by the operators that need them: every device with at least one of these operators holds
them once."""


@dataclass(frozen=True, slots=True)
class ConsumedTensor:
    """A tensor that one operator makes and others read.

    Attributes:
        producer: the operator that makes it.
        consumers: the operators that read it, ascending, at least one.
        bytes: its size for one microbatch.
        gradient: whether a gradient of the same size comes back.
        stashed: whether autograd keeps its storage for the backward.
        owns: whether it owns its storage when all operators are on one device, so that it is no
            view of another tensor.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: int
    gradient: bool
    stashed: bool = True
    owns: bool = True


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """A parameter or an input that several operators read: each of their devices holds it once.

    Attributes:
        operators: its readers, ascending, at least one.
        bytes: its size.
        trainable: whether it is a trained parameter, with a gradient and moments.
    """

    operators: tuple[int, ...]
    bytes: int
    trainable: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """The costs of placing every operator on one device, without recomputation.

    Attributes:
        forward_s: (N, D) forward time of operator i on device p, in s, with all devices in use:
            processes on shared cores slow each other down.
        backward_s: (N, D) its backward time.
        tensors: every tensor between operators, in the order of their producers.
        latency_s: (D, D) latency of the path from p to q, in s; 0 on the diagonal.
        seconds_per_byte: (D, D) inverse bandwidth of its narrowest link; 0 on the diagonal.
        parameter_bytes: (N,) parameters that no other operator reads.
        trainable_bytes: (N,) the trained part of these parameters.
        shared_parameters: parameters that several operators read.
        inputs: the model's inputs, with the operators that read them.
        result_bytes: (N,) outputs that no operator reads.
        private_bytes: (N,) stash of autograd besides tensors and parameters.
        workspace_bytes: (N,) temporary memory of the operator's kernels.
        capacity_bytes: (D,) memory limit without the reserve; negative where the reserve alone is
            over the limit.
        moments: optimizer state over the bytes of trained parameters; with gradients that are
            larger than their parameters, what these have more.
        published_memory: whether NetSplit's model counts memory as it was published, every tensor
            twice; otherwise it counts the minimum of training, `least_bytes`.
        shared: links on which transfers between several pairs of devices delay each other.
    """

    forward_s: Floats
    backward_s: Floats
    tensors: tuple[ConsumedTensor, ...]
    latency_s: Floats
    seconds_per_byte: Floats
    parameter_bytes: Ints
    trainable_bytes: Ints
    shared_parameters: tuple[SharedBytes, ...]
    inputs: tuple[SharedBytes, ...]
    result_bytes: Ints
    private_bytes: Ints
    workspace_bytes: Ints
    capacity_bytes: Ints
    moments: int
    published_memory: bool = True
    shared: tuple[SharedLink, ...] = ()

    @property
    def num_operators(self) -> int:
        """N."""
        return len(self.forward_s)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.capacity_bytes)


def _consumed_tensors(profile: Profile) -> Iterator[ConsumedTensor]:
    graph = profile.graph
    tensors, read_by = tensors_by_name(graph), consumers(graph)
    everything = frozenset(range(len(graph.operators)))
    stashed = {
        storage_owner(profile, name, everything)
        for operator in profile.operators
        for name in operator.stash_tensors
    }
    for name, maker in producers(graph).items():
        if read_by[name]:
            owner, one = storage_owner(profile, name, everything), tensors[name]
            yield ConsumedTensor(
                maker, read_by[name], one.bytes, one.gradient, owner in stashed, owner == name
            )


@remembered(kept=4)
def placement_problem_of(problem: Problem) -> PlacementProblem:
    """The placement problem of a problem.

    Raises:
        OptionError: if times must be rescaled to a device and cannot be.
        TopologyError: if two devices are not connected.
    """
    profile, topology, graph = problem.profile, problem.topology, problem.profile.graph
    devices = range(len(topology.devices))
    slow, times = slowdowns(problem, devices), [operator_times(problem, d) for d in devices]
    tensors, made_by, read_by = tensors_by_name(graph), producers(graph), consumers(graph)
    latency, width = pair_widths(topology)
    parameters = [(p, holders(graph)[p.name]) for p in graph.parameters]
    casts = cast_bytes(profile)
    return PlacementProblem(
        forward_s=_fixed([slow[d] * times[d].forward_s for d in devices]),
        backward_s=_fixed([slow[d] * times[d].backward_s for d in devices]),
        tensors=tuple(_consumed_tensors(profile)),
        latency_s=latency,
        seconds_per_byte=1.0 / width,
        parameter_bytes=_sums(
            graph,
            ((p.bytes + casts.get(p.name, 0), u[0]) for p, u in parameters if len(u) == 1),
        ),
        trainable_bytes=_sums(
            graph, ((p.bytes, u[0]) for p, u in parameters if len(u) == 1 and p.trainable)
        ),
        shared_parameters=tuple(
            SharedBytes(users, p.bytes, p.trainable) for p, users in parameters if len(users) > 1
        ),
        inputs=tuple(SharedBytes(read_by[n], tensors[n].bytes) for n in graph.inputs if read_by[n]),
        result_bytes=_sums(
            graph, ((tensors[n].bytes, v) for n, v in made_by.items() if not read_by[n])
        ),
        private_bytes=_sums(
            graph, ((o.stash_private_bytes, v) for v, o in enumerate(profile.operators))
        ),
        workspace_bytes=_sums(
            graph, ((o.workspace_bytes, v) for v, o in enumerate(profile.operators))
        ),
        capacity_bytes=np.array(
            [limit_bytes(problem, devices, d) - least_reserve_bytes(problem, d) for d in devices],
            dtype=np.int64,
        ),
        moments=update_copies(problem) - 1,
        shared=shared_links(topology),
    )


def _fixed(columns: Sequence[Floats]) -> Floats:
    """(N, D) array of D columns, read-only, because all users of a cached problem share it."""
    array = np.array(columns).T.copy()
    array.setflags(write=False)
    return array


def _sums(graph: Graph, parts: Iterable[tuple[int, int]]) -> Ints:
    """(N,) sums of (bytes, operator)."""
    sums = np.zeros(len(graph.operators), dtype=np.int64)
    for size, operator in parts:
        sums[operator] += size
    sums.setflags(write=False)
    return sums


# ----------------------------------------------------------------------------------------- memory


def least_bytes(problem: PlacementProblem) -> KeptBytes:
    """The minimum that devices keep from the forward to the backward of one microbatch.

    No placement without recomputation needs less by the evaluator's count. That count adds buffers,
    workspaces, and tensors that nobody stashes but that wait to be sent.
    """
    kept = Counter[tuple[int, ...]]()
    extra = 1 + problem.moments  # a gradient and the moments
    for i in range(problem.num_operators):
        kept[i,] += int(problem.parameter_bytes[i] + problem.private_bytes[i])
        kept[i,] += extra * int(problem.trainable_bytes[i])
    for shared in (*problem.shared_parameters, *problem.inputs):
        kept[shared.operators] += shared.bytes * (1 + extra if shared.trainable else 1)
    for tensor in problem.tensors:
        if tensor.stashed and tensor.owns:
            kept[tuple(sorted({tensor.producer, *tensor.consumers}))] += tensor.bytes
    return kept


def bytes_by_device(kept: KeptBytes, device_of: Sequence[int]) -> Counter[int]:
    """The bytes that each device of a placement keeps."""
    used = Counter[int]()
    for operators, size in kept.items():
        for p in {device_of[i] for i in operators}:
            used[p] += size
    return used


def tighter(
    problem: Problem,
    placement_problem: PlacementProblem,
    device_of: Sequence[int],
    strategy: Strategy,
    kept: KeptBytes,
) -> PlacementProblem:
    """The same problem with less memory, after the evaluator found no room for a placement.

    The memory shrinks so far that the solver's own count excludes this placement, also on other
    devices of the same memory. The solver's count is lower than the evaluator's by some bytes that
    another placement may not need, so it shrinks by half of the excess only.

    Args:
        device_of: the placement.
        strategy: the stages made of it.
        kept: the solver's count.
    """
    limit = placement_problem_of(problem).capacity_bytes
    capacity = placement_problem.capacity_bytes.copy()
    used = bytes_by_device(kept, device_of)
    for p, parts in evaluate(problem, strategy).memory.items():
        over = parts.total_bytes - least_reserve_bytes(problem, p) - int(limit[p])
        if over > 0:
            alike = limit == limit[p]
            capacity[alike] = np.minimum(capacity[alike], used[p] - -(-over // 2))  # rounded up
    return replace(placement_problem, capacity_bytes=capacity)


# ---------------------------------------------------------------------------------------- transfers


def transfer_s(problem: PlacementProblem, size_bytes: int, p: int, q: int) -> float:
    """Time of one transfer from p to q on an idle network, in s; 0 within a device."""
    return float(problem.latency_s[p, q] + size_bytes * problem.seconds_per_byte[p, q])


def busy_s(problem: PlacementProblem, link: SharedLink, size_bytes: int, p: int, q: int) -> float:
    """Time for which a transfer from p to q occupies a shared link, in s."""
    if link.exclusive:
        return transfer_s(problem, size_bytes, p, q)
    return size_bytes * link.seconds_per_byte


@remembered
def links_of_pairs(problem: PlacementProblem) -> Mapping[Pair, tuple[int, ...]]:
    """Per ordered pair of devices with some, the numbers of its shared links, ascending."""
    numbers: dict[Pair, list[int]] = {}
    for number, link in enumerate(problem.shared):
        for pair in link.pairs:
            numbers.setdefault(pair, []).append(number)
    return {pair: tuple(listed) for pair, listed in numbers.items()}


@remembered
def feeds_of(problem: PlacementProblem) -> tuple[tuple[int, ...], ...]:
    """Per operator, the operators that feed it, ascending."""
    feeds: list[set[int]] = [set() for _ in range(problem.num_operators)]
    for tensor in problem.tensors:
        for j in tensor.consumers:
            feeds[j].add(tensor.producer)
    return tuple(tuple(sorted(before)) for before in feeds)
