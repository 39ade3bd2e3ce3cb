"""`Placing`: what it takes to place single operators on devices, in arrays; and how one microbatch
runs through a placement.

All algorithms that give every operator one device ask this module, so that they mean the same
times, sizes and limits as the evaluator. Legend: N operators, D devices; i, j operators; p, q
devices. Operators are in topological order.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np

from planner.clusters.routes import pair_widths
from planner.costs.compute import slowdowns, times_on
from planner.costs.evaluate import evaluate
from planner.costs.memory import limit_bytes
from planner.graph import Graph, consumers, holders, producers, tensors_by_name
from planner.problem import Problem
from planner.profiles import storage_owner
from planner.strategy import Strategy
from planner.support.arrays import Floats, Ints
from planner.support.derived import derived


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor that one operator makes and others read.

    Attributes:
        producer: the operator that makes it.
        consumers: the operators that read it, ascending, at least one.
        bytes: of one microbatch.
        gradient: whether a gradient of the same size comes back.
        stashed: whether autograd keeps it, or a tensor in the same storage, for backward.
        owns: whether it has a storage of its own where all operators are on one device.
    """

    producer: int
    consumers: tuple[int, ...]
    bytes: int
    gradient: bool
    stashed: bool = True
    owns: bool = True


@dataclass(frozen=True, slots=True)
class Shared:
    """Bytes that every device with at least one of some operators holds once.

    Attributes:
        operators: ascending, at least one.
        bytes: of it.
        trainable: whether it is a parameter that is trained, with gradient and moments.
    """

    operators: tuple[int, ...]
    bytes: int
    trainable: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """A problem as those see it who place single operators, without recomputation.

    Attributes:
        forward_s: (N, D) time of the forward of operator i on device p, in s, with all devices in
            use: processes on shared cores slow each other down.
        backward_s: (N, D) the same of its backward.
        tensors: every tensor between operators, in the order of their producers.
        latency_s: (D, D) of the path from p to q, in s; 0 on the diagonal.
        seconds_per_byte: (D, D) of its narrowest link; 0 on the diagonal.
        parameter_bytes: (N,) parameters that no other operator reads.
        trainable_bytes: (N,) the trained part of them.
        shared_parameters: parameters that several operators read.
        inputs: the model's inputs, with the operators that read them.
        result_bytes: (N,) what an operator makes and none reads.
        private_bytes: (N,) what autograd keeps of it besides tensors and parameters.
        workspace_bytes: (N,) what its kernels hold for themselves while they run.
        capacity_bytes: (D,) memory beside the reserve; negative where that alone is too much.
        moments: tensors of optimizer state per trained parameter.
        doubled: whether NetSplit's model counts memory as it is published, every tensor twice, or
            what training keeps at the least, `least_bytes`.
    """

    forward_s: Floats
    backward_s: Floats
    tensors: tuple[Flow, ...]
    latency_s: Floats
    seconds_per_byte: Floats
    parameter_bytes: Ints
    trainable_bytes: Ints
    shared_parameters: tuple[Shared, ...]
    inputs: tuple[Shared, ...]
    result_bytes: Ints
    private_bytes: Ints
    workspace_bytes: Ints
    capacity_bytes: Ints
    moments: int
    doubled: bool = True

    @property
    def num_operators(self) -> int:
        """N."""
        return len(self.forward_s)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.capacity_bytes)


@derived(kept=4)
def placing_of(problem: Problem) -> Placing:
    """The placement problem of a problem.

    Raises:
        OptionError: if times must be rescaled to a device and cannot be.
        TopologyError: if two devices are not connected.
    """
    profile, topology, graph = problem.profile, problem.topology, problem.profile.graph
    devices = range(len(topology.devices))
    slow, times = slowdowns(topology, devices), [times_on(problem, d) for d in devices]
    tensors, made_by, read_by = tensors_by_name(graph), producers(graph), consumers(graph)
    latency, width = pair_widths(topology)
    everything = frozenset(range(len(graph.operators)))
    stashed = {
        storage_owner(profile, name, everything)
        for operator in profile.operators
        for name in operator.stash_tensors
    }
    parameters = [(p, holders(graph)[p.name]) for p in graph.parameters]
    return Placing(
        forward_s=_fixed([slow[d] * times[d].forward_s for d in devices]),
        backward_s=_fixed([slow[d] * times[d].backward_s for d in devices]),
        tensors=tuple(
            Flow(
                maker,
                read_by[name],
                tensors[name].bytes,
                tensors[name].gradient,
                storage_owner(profile, name, everything) in stashed,
                storage_owner(profile, name, everything) == name,
            )
            for name, maker in made_by.items()
            if read_by[name]
        ),
        latency_s=latency,
        seconds_per_byte=1.0 / width,
        parameter_bytes=_sums(graph, ((p.bytes, u[0]) for p, u in parameters if len(u) == 1)),
        trainable_bytes=_sums(
            graph, ((p.bytes, u[0]) for p, u in parameters if len(u) == 1 and p.trainable)
        ),
        shared_parameters=tuple(
            Shared(users, p.bytes, p.trainable) for p, users in parameters if len(users) > 1
        ),
        inputs=tuple(Shared(read_by[n], tensors[n].bytes) for n in graph.inputs if read_by[n]),
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
            [limit_bytes(problem, devices, d) - problem.options.reserve_bytes for d in devices],
            dtype=np.int64,
        ),
        moments=problem.options.optimizer.num_moments,
    )


def _fixed(columns: Sequence[Floats]) -> Floats:
    """(N, D) of D columns, not to be written to: problems that are asked again share it."""
    table = np.array(columns).T.copy()
    table.setflags(write=False)
    return table


def _sums(graph: Graph, parts: Iterable[tuple[int, int]]) -> Ints:
    """(N,) sums of (bytes, operator)."""
    found = np.zeros(len(graph.operators), dtype=np.int64)
    for size, operator in parts:
        found[operator] += size
    found.setflags(write=False)
    return found


def least_bytes(placing: Placing) -> Mapping[tuple[int, ...], int]:
    """What devices keep from forward to backward of one microbatch at the least, by the operators
    that need it: each entry is held once by every device with at least one of them. No placement
    without recomputation needs less by the evaluator's count, which adds buffers, workspaces and
    what no operator stashes but a transfer waits for.
    """
    found = Counter[tuple[int, ...]]()
    extra = 1 + placing.moments
    for i in range(placing.num_operators):
        found[i,] += int(placing.parameter_bytes[i] + placing.private_bytes[i])
        found[i,] += extra * int(placing.trainable_bytes[i])
    for shared in (*placing.shared_parameters, *placing.inputs):
        found[shared.operators] += shared.bytes * (1 + extra if shared.trainable else 1)
    for flow in placing.tensors:
        if flow.stashed and flow.owns:
            found[tuple(sorted({flow.producer, *flow.consumers}))] += flow.bytes
    return found


def tighter(
    problem: Problem,
    placing: Placing,
    device_of: Sequence[int],
    strategy: Strategy,
    counted: Mapping[tuple[int, ...], int],
) -> Placing:
    """The same with so much less memory that a placement which the evaluator finds no room for does
    not fit by the solver's own count either, nor on other devices of as much memory. It lacks half
    of what is over: another placement may also need less of what the solver does not count.

    Args:
        device_of: the placement.
        strategy: the stages that it became.
        counted: the solver's count, in the form of `least_bytes`.
    """
    reserve_bytes = problem.options.reserve_bytes
    limit, capacity = placing_of(problem).capacity_bytes, placing.capacity_bytes.copy()
    used = Counter[int]()
    for those, size in counted.items():
        for p in {device_of[i] for i in those}:
            used[p] += size
    for p, parts in evaluate(problem, strategy).memory.items():
        over = parts.total_bytes - reserve_bytes - int(limit[p])
        if over > 0:
            alike = limit == limit[p]
            capacity[alike] = np.minimum(capacity[alike], used[p] - -(-over // 2))
    return replace(placing, capacity_bytes=capacity)


def transfer_s(placing: Placing, size_bytes: int, p: int, q: int) -> float:
    """Time of one message from p to q on an idle network, in s; 0 on the device itself."""
    return float(placing.latency_s[p, q] + size_bytes * placing.seconds_per_byte[p, q])


@derived
def feeds_of(placing: Placing) -> tuple[tuple[int, ...], ...]:
    """Per operator, the operators that feed it, ascending."""
    found: list[set[int]] = [set() for _ in range(placing.num_operators)]
    for flow in placing.tensors:
        for j in flow.consumers:
            found[j].add(flow.producer)
    return tuple(tuple(sorted(one)) for one in found)


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor, or its gradient, on its way.

    Attributes:
        tensor: index into `Placing.tensors`.
        backward: whether it is the gradient.
        source: device that sends; target: device that receives.
        start_s: when it leaves; end_s: when it is there.
    """

    tensor: int
    backward: bool
    source: int
    target: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """When everything of one microbatch starts.

    Attributes:
        forward_start_s: per operator; backward_start_s: the same of its backward.
        messages: all transfers, forwards first.
        latency_s: when the last backward ends.
    """

    forward_start_s: tuple[float, ...]
    backward_start_s: tuple[float, ...]
    messages: tuple[Message, ...]
    latency_s: float


def latency_s(
    placing: Placing, device_of: Sequence[int], order: Sequence[int] | None = None
) -> float:
    """Time of one microbatch, forward and backward, under `timetable`, in s."""
    return timetable(placing, device_of, order).latency_s


def timetable(
    placing: Placing, device_of: Sequence[int], order: Sequence[int] | None = None
) -> Timetable:
    """One microbatch through a placement, list-scheduled: whatever is idle takes, of what is ready,
    what comes first in the order of preference.

    A device runs one operator at a time, a pair of devices sends one message at a time in each
    direction. A tensor goes once to each device that reads it; the devices that read it send back
    one gradient each, when all of its readers there have run backward. The first backward starts
    when the last forward has ended.

    Args:
        device_of: device of each operator.
        order: operators by falling preference; backwards by the reverse. Without it, what has the
            longest way to go comes first.
    """
    there = _phase(placing, device_of, order, backward=False, begin_s=0.0)
    turn_s = max(job.end_s for job in there)
    back_order = None if order is None else order[::-1]
    back = _phase(placing, device_of, back_order, backward=True, begin_s=turn_s)
    num = placing.num_operators
    return Timetable(
        forward_start_s=tuple(job.start_s for job in there[:num]),
        backward_start_s=tuple(job.start_s for job in back[:num]),
        messages=tuple(
            Message(job.tensor, backward, *job.place, job.start_s, job.end_s)
            for backward, phase in ((False, there), (True, back))
            for job in phase[num:]
        ),
        latency_s=max(job.end_s for job in back),
    )


@dataclass(slots=True)
class _Job:
    """An operator on its device (p, p), or a message on the channel (p, q).

    Attributes:
        tensor: index of the tensor that is sent, -1 for an operator.
        then: the jobs that wait for it.
        waits_for: how many jobs it waits for still.
        rank: of ready jobs in one place, the highest is first.
    """

    place: tuple[int, int]
    duration_s: float
    tensor: int = -1
    then: list[int] = field(default_factory=list)
    waits_for: int = 0
    rank: float = 0.0
    start_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def _phase(
    placing: Placing,
    device_of: Sequence[int],
    order: Sequence[int] | None,
    *,
    backward: bool,
    begin_s: float,
) -> list[_Job]:
    """All forwards, or all backwards, of a microbatch: N operators, then the messages."""
    times = placing.backward_s if backward else placing.forward_s
    jobs = [_Job((p, p), float(times[i, p])) for i, p in enumerate(device_of)]
    for t, flow in enumerate(placing.tensors):
        if flow.gradient or not backward:
            _connect(placing, jobs, t, backward=backward)
    _rank(jobs, order)
    _run(jobs, begin_s)
    return jobs


def _connect(placing: Placing, jobs: list[_Job], t: int, *, backward: bool) -> None:
    """Lets readers wait for a tensor, or its maker for its gradients."""
    flow = placing.tensors[t]
    home = jobs[flow.producer].place[0]
    readers: dict[int, list[int]] = {}
    for j in flow.consumers:
        readers.setdefault(jobs[j].place[0], []).append(j)
    for q, those in readers.items():
        first, last = (those, [flow.producer]) if backward else ([flow.producer], those)
        if q != home:
            p, q = (q, home) if backward else (home, q)
            message = len(jobs)
            jobs.append(_Job((p, q), transfer_s(placing, flow.bytes, p, q), t))
            _link(jobs, first, [message])
            first = [message]
        _link(jobs, first, last)


def _link(jobs: list[_Job], first: Sequence[int], then: Sequence[int]) -> None:
    for i in first:
        jobs[i].then.extend(then)
    for j in then:
        jobs[j].waits_for += len(first)


def _rank(jobs: list[_Job], order: Sequence[int] | None) -> None:
    """By the longest way to the end, or by a given order of the operators; a message is as urgent
    as what waits for it.
    """
    turn = {i: float(len(jobs) - k) for k, i in enumerate(order or ())}
    waits_for = [job.waits_for for job in jobs]
    sequence = [i for i, count in enumerate(waits_for) if count == 0]
    for i in sequence:
        for j in jobs[i].then:
            waits_for[j] -= 1
            if waits_for[j] == 0:
                sequence.append(j)
    for i in reversed(sequence):
        after = max((jobs[j].rank for j in jobs[i].then), default=0.0)
        jobs[i].rank = after + jobs[i].duration_s if order is None else turn.get(i, after)


def _run(jobs: list[_Job], begin_s: float) -> None:
    """Gives every job its start."""
    ready: dict[tuple[int, int], list[tuple[float, int]]] = {job.place: [] for job in jobs}
    for i, job in enumerate(jobs):
        if job.waits_for == 0:
            heappush(ready[job.place], (-job.rank, i))
    ending: list[tuple[float, int]] = []
    busy: set[tuple[int, int]] = set()
    clock_s, looked_at = begin_s, list(ready)
    while looked_at:
        for place in looked_at:
            if ready[place] and place not in busy:
                _, i = heappop(ready[place])
                busy.add(place)
                jobs[i].start_s = clock_s
                heappush(ending, (jobs[i].end_s, i))
        looked_at = []
        clock_s = ending[0][0] if ending else clock_s
        while ending and ending[0][0] == clock_s:
            _, i = heappop(ending)
            busy.remove(jobs[i].place)
            looked_at.append(jobs[i].place)
            for j in jobs[i].then:
                jobs[j].waits_for -= 1
                if jobs[j].waits_for == 0:
                    heappush(ready[jobs[j].place], (-jobs[j].rank, j))
                    looked_at.append(jobs[j].place)
