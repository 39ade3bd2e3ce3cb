"""NetSplit's model in integers, as both engines build it (`netsplit_cpsat`, `netsplit_gurobi`).

Legend: operators i, j; devices p, q; tensor t, made by i(t) and read by J(t); groups g of operators
that share a device (`coplacement`), g(i) that of i. f_ip, b_ip ticks of forward and backward of i
on p; m_tpq ticks of a message of t's bytes from p to q, m_tpp = 0. Variables:

    x_gp            whether group g is on device p
    S_i, C_i        start and end of the forward of i; S'_i, C'_i of its backward
    y_tpq           whether t is made on p and read on q
    A_tq, A'_tq     when t is sent to q, and its gradient from q
    F, B            length of all forwards, and of all backwards, which begin at 0 again

    minimise   F + B       the latency of one microbatch
    subject to (1) sum_p x_gp = 1
               (2) C_i = S_i + sum_p f_ip x_g(i)p, the same of C'; F >= C_i, B >= C'_i
               (3) y_tpq = x_g(i(t))p and (x_g(j)q for some j in J(t))
               (4) A_tq >= C_i(t);  S_j >= A_tq + sum_p m_tpq y_tpq for j in J(t) on q
               (5) A'_tq >= C'_j for j in J(t) on q;  S'_i(t) >= A'_tq + sum_p m_tqp y_tpq
               (6) the forwards on a device do not overlap, nor do the backwards
               (7) the messages from p to q do not overlap, nor do the gradients from p to q
               (8) sum over what is kept of bytes x (whether p has one that needs it) <= memory of p
               (9) of devices that may be swapped, p before q: g is on q only if an earlier group
                   is on p

The loss needs every result, so the first backward starts after the last forward (S'_i of operators
that none reads is at least the end of all forwards). Then all forwards are over before any
backward, and the two phases share nothing but the placement: each has a clock of its own. A tensor
without gradient has no (5). A tensor is sent once to each device that reads it, its gradient comes
back once from each, over the reverse path; messages between one ordered pair of devices exclude
each other, whichever links they share with other pairs. (3) to (7) are what `placing.timetable`
runs.

`relaxed` is the model as it was published: no (6), (7) and (9); with an edge per reader,

    (4') S_j >= C_i + M_ij,  (5') S'_i >= C'_j + M_ij,  M_ij = ticks of i's bytes for j from x to x
    (2') S_i = 0 where none feeds i; S'_i = C_i where none reads i, on one clock; makespan >= C'_i

which charges a gradient like the tensor, on the forward path. Its (8) is published with alpha for
every parameter and 2 for every tensor; here what is not trained and has no gradient counts once.

Ticks are so short that rounding every duration changes no schedule by more than `LOSS`.

Source: NetSplit, Nanjing 2023; (5), (6), (7) and (9) are this project's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.problem import Status
from planner.solvers.placement.coplacement import Kept, edge_bytes, kept_bytes
from planner.solvers.placement.problem import Placing, timetable, transfer_s
from planner.support.arrays import Floats, Ints
from planner.support.derived import derived

LOSS = 0.001
"""Ticks are that exact: at most this share of the least latency, over a whole schedule."""

_BY_OPERATOR = (
    "parameter_bytes", "trainable_bytes", "result_bytes", "private_bytes", "workspace_bytes"
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """What the engines are given.

    Attributes:
        placing: the problem in s and bytes.
        groups: operators that share a device; group_of: (N,) the group of each operator.
        tick_s: length of a tick; lost_s: the most that rounding adds to or takes off a schedule.
        forward: (N, D) ticks f; backward: (N, D) ticks b.
        alone_bytes: (G,) what a device keeps for a group that no other group needs.
        together_bytes: what it keeps once for several groups, by those groups.
        alike: classes of devices of which any two may be swapped, each ascending.
        relaxed: whether this is the published model.
    """

    placing: Placing
    groups: tuple[tuple[int, ...], ...]
    group_of: tuple[int, ...]
    tick_s: float
    lost_s: float
    forward: Ints
    backward: Ints
    alone_bytes: tuple[int, ...]
    together_bytes: Kept
    alike: tuple[tuple[int, ...], ...]
    relaxed: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine says.

    Attributes:
        status: of the instance, to `LOSS`.
        device_of: device of each operator, None if the status is infeasible or unknown.
        latency_s: of the engine's own schedule, by its own model; inf without a placement.
        bound_s: no placement of these groups is faster; None if unknown.
        reproducible: False where the wall clock, or the user, cut the search.
        note: what the user should know, such as an engine that could not be used.
        order: the operators as the forwards of the engine's schedule start; None without one.
    """

    status: Status
    device_of: tuple[int, ...] | None
    latency_s: float
    bound_s: float | None
    reproducible: bool = True
    note: str = ""
    order: tuple[int, ...] | None = None


def instance_of(
    placing: Placing, groups: Sequence[tuple[int, ...]], *, relaxed: bool = False
) -> Instance:
    """The model of a placement problem whose groups of operators stay together."""
    group_of = [0] * placing.num_operators
    for g, inside in enumerate(groups):
        for i in inside:
            group_of[i] = g
    tick_s, lost_s = _tick_s(placing)
    alone, together = [0] * len(groups), Counter[tuple[int, ...]]()
    for those, size in kept_bytes(placing).items():
        where = tuple(sorted({group_of[i] for i in those}))
        if len(where) == 1:
            alone[where[0]] += size
        elif size:
            together[where] += size
    return Instance(
        placing=placing,
        groups=tuple(groups),
        group_of=tuple(group_of),
        tick_s=tick_s,
        lost_s=lost_s,
        forward=_ticks(placing.forward_s, tick_s),
        backward=_ticks(placing.backward_s, tick_s),
        alone_bytes=tuple(alone),
        together_bytes=together,
        alike=_alike(placing),
        relaxed=relaxed,
    )


def _ticks(times_s: Floats, tick_s: float) -> Ints:
    return np.rint(times_s / tick_s).astype(np.int64)


def _tick_s(placing: Placing) -> tuple[float, float]:
    """Length of a tick, and the most that rounding changes: a schedule ends with a chain of
    operators and messages that wait for each other, each once per phase and rounded by half a tick
    at most.
    """
    fastest_s = (placing.forward_s + placing.backward_s).min(axis=1)
    # Some device has this much to do, and the longest operator runs somewhere.
    least_s = float(max(fastest_s.sum() / placing.num_devices, fastest_s.max()))
    targets = max(placing.num_devices - 1, 0)
    messages = sum(min(len(flow.consumers), targets) for flow in placing.tensors)
    longest_chain = 2 * (placing.num_operators + messages)
    return LOSS * least_s / (longest_chain / 2) or 1.0, LOSS * least_s


def part(instance: Instance, operators: Sequence[int]) -> Instance:
    """The model of some operators alone, without memory, in the same ticks.

    Args:
        operators: ascending, at least one.
    """
    placing, which = instance.placing, list(operators)
    number = {i: k for k, i in enumerate(which)}
    flows = (
        replace(
            flow,
            producer=number[flow.producer],
            consumers=tuple(number[j] for j in flow.consumers if j in number),
        )
        for flow in placing.tensors
        if flow.producer in number
    )
    inside = replace(
        placing,
        forward_s=placing.forward_s[which],
        backward_s=placing.backward_s[which],
        tensors=tuple(flow for flow in flows if flow.consumers),
        **{name: getattr(placing, name)[which] for name in _BY_OPERATOR},
        shared_parameters=(),
        inputs=(),
    )
    members: dict[int, list[int]] = {}
    for k, i in enumerate(which):
        members.setdefault(instance.group_of[i], []).append(k)
    groups = tuple(tuple(group) for group in members.values())
    group_of = {k: g for g, group in enumerate(groups) for k in group}
    return replace(
        instance,
        placing=inside,
        groups=groups,
        group_of=tuple(group_of[k] for k in range(len(which))),
        forward=instance.forward[which],
        backward=instance.backward[which],
        alone_bytes=(0,) * len(groups),
        together_bytes={},
    )


def message_ticks(instance: Instance, size_bytes: int, p: int, q: int) -> int:
    """Ticks m of a message from p to q."""
    return round(transfer_s(instance.placing, size_bytes, p, q) / instance.tick_s)


def messages_of(instance: Instance) -> Ints:
    """(T, D, D) ticks m of every tensor from p to q."""
    placing = instance.placing
    sizes = np.array([flow.bytes for flow in placing.tensors], dtype=np.int64)[:, None, None]
    return _ticks(placing.latency_s + sizes * placing.seconds_per_byte, instance.tick_s)


def _alike(placing: Placing) -> tuple[tuple[int, ...], ...]:
    """Swapping two of a class changes nothing: neither times, memory nor any path."""
    classes: list[list[int]] = []
    for q in range(placing.num_devices):
        for known in classes:
            if _swappable(placing, known[0], q):
                known.append(q)
                break
        else:
            classes.append([q])
    return tuple(tuple(known) for known in classes)


def _swappable(placing: Placing, p: int, q: int) -> bool:
    swap = np.arange(placing.num_devices)
    swap[[p, q]] = q, p
    own = (placing.forward_s, placing.backward_s, placing.capacity_bytes[None, :])
    paths = (placing.latency_s, placing.seconds_per_byte)
    return all(np.array_equal(table[..., p], table[..., q]) for table in own) and all(
        np.array_equal(table, table[np.ix_(swap, swap)]) for table in paths
    )


def canonical(instance: Instance, device_of: Sequence[int]) -> tuple[int, ...]:
    """The same placement with devices of a class renamed in the order of the groups, as (9) wants.

    Args:
        device_of: device of each operator; equal within a group.
    """
    class_of = {p: known for known in instance.alike for p in known}
    free = {known: list(known) for known in instance.alike}
    name: dict[int, int] = {}
    for group in instance.groups:
        p = device_of[group[0]]
        if p not in name:
            name[p] = free[class_of[p]].pop(0)
    return tuple(name[p] for p in device_of)


def grouped(instance: Instance, device_of: Sequence[int]) -> tuple[int, ...]:
    """A placement that keeps groups together: each goes where most of its time is spent; ties go
    to the device of the lowest index.
    """
    placing, found = instance.placing, [0] * instance.placing.num_operators
    for group in instance.groups:
        votes = Counter[int]()
        for i in group:
            p = device_of[i]
            votes[p] += placing.forward_s[i, p] + placing.backward_s[i, p]
        where = min(votes, key=lambda p: (-votes[p], p))
        for i in group:
            found[i] = where
    return tuple(found)


def overflow(instance: Instance, device_of: Sequence[int]) -> int:
    """Bytes by which the fullest device exceeds its memory under (8); 0 or less if all fits."""
    use = [0] * instance.placing.num_devices
    for those, size in kept_bytes(instance.placing).items():
        for p in {device_of[i] for i in those}:
            use[p] += size
    return max(
        used - int(room) for used, room in zip(use, instance.placing.capacity_bytes, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A feasible schedule in ticks, each phase from 0.

    Attributes:
        forward_start: (N,) S; backward_start: (N,) S'.
        sent: A by (tensor, target); returned: A' by (tensor, sender).
        forward_end: F; backward_end: B.
    """

    forward_start: tuple[int, ...]
    backward_start: tuple[int, ...]
    sent: dict[tuple[int, int], int]
    returned: dict[tuple[int, int], int]
    forward_end: int
    backward_end: int

    @property
    def latency(self) -> int:
        """F + B."""
        return self.forward_end + self.backward_end

    def phase(self, backward: bool) -> tuple[int, ...]:
        """(N + 1,) the starts of a phase's operators, and its end."""
        if backward:
            return *self.backward_start, self.backward_end
        return *self.forward_start, self.forward_end

    @property
    def orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The operators as their forwards start, and as their backwards do."""
        return orders_of(self.forward_start, self.backward_start)


def orders_of(
    forward: Sequence[int], backward: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The operators as their forwards start, and as their backwards do; among equals, what feeds
    comes first, or last.

    Args:
        forward, backward: (N,) starts.
    """
    num = range(len(forward))
    return (
        tuple(sorted(num, key=lambda i: (forward[i], i))),
        tuple(sorted(num, key=lambda i: (backward[i], -i))),
    )


def schedule_of(instance: Instance, device_of: Sequence[int]) -> Schedule:
    """The list schedule of a placement, its order kept and its times in ticks."""
    table = timetable(instance.placing, device_of)
    # Operators are in topological order, so these keys put what feeds first among equals.
    there = [(start, i, 0, -1, -1) for i, start in enumerate(table.forward_start_s)]
    back = [(start, -i, 1, -1, -1) for i, start in enumerate(table.backward_start_s)]
    for message in table.messages:
        i = instance.placing.tensors[message.tensor].producer
        if message.backward:
            back.append((message.start_s, -i, 0, message.tensor, message.source))
        else:
            there.append((message.start_s, i, 1, message.tensor, message.target))
    forward, sent, forward_end = _retimed(instance, device_of, sorted(there), backward=False)
    backward, returned, backward_end = _retimed(instance, device_of, sorted(back), backward=True)
    return Schedule(forward, backward, sent, returned, forward_end, backward_end)


def _retimed(
    instance: Instance,
    device_of: Sequence[int],
    jobs: Sequence[tuple[float, int, int, int, int]],
    *,
    backward: bool,
) -> tuple[tuple[int, ...], dict[tuple[int, int], int], int]:
    """Starts of operators and messages if each goes as soon as it can, in the order of the jobs.

    Args:
        jobs: (start, sign x operator, rank, tensor, other device); tensor -1 for an operator.
    """
    placing = instance.placing
    ticks = instance.backward if backward else instance.forward
    start, messages = [0] * placing.num_operators, dict[tuple[int, int], int]()
    ready = Counter[int]()
    ready_message = Counter[tuple[int, int]]()
    free = Counter[tuple[int, int]]()
    readers, made = _touching(placing)

    def after(i: int, end: int) -> None:
        """Passes on that an operator has ended."""
        for t in readers[i] if backward else made[i]:
            flow = placing.tensors[t]
            if backward and not flow.gradient:
                continue
            others = (flow.producer,) if backward else flow.consumers
            for j in others:
                if device_of[j] == device_of[i]:
                    ready[j] = max(ready[j], end)
                else:
                    key = (t, device_of[i] if backward else device_of[j])
                    ready_message[key] = max(ready_message[key], end)

    for _, signed, _, t, other in jobs:
        i = abs(signed)
        here = device_of[i]
        if t < 0:
            start[i] = max(ready[i], free[here, here])
            free[here, here] = start[i] + int(ticks[i, here])
            after(i, free[here, here])
            continue
        flow, channel = placing.tensors[t], (other, here) if backward else (here, other)
        begin = max(ready_message[t, other], free[channel])
        end = begin + message_ticks(instance, flow.bytes, *channel)
        messages[t, other], free[channel] = begin, end
        for j in (flow.producer,) if backward else flow.consumers:
            if device_of[j] == channel[1]:
                ready[j] = max(ready[j], end)
    return tuple(start), messages, max(free[p, p] for p in range(placing.num_devices))


@derived
def _touching(placing: Placing) -> tuple[list[list[int]], list[list[int]]]:
    """The tensors that each operator reads, and those that it makes."""
    readers: list[list[int]] = [[] for _ in range(placing.num_operators)]
    made: list[list[int]] = [[] for _ in range(placing.num_operators)]
    for t, flow in enumerate(placing.tensors):
        made[flow.producer].append(t)
        for j in flow.consumers:
            readers[j].append(t)
    return readers, made


@dataclass(frozen=True, slots=True)
class Known:
    """What the search starts from.

    Attributes:
        device_of: a placement that keeps groups together, as (9) wants it.
        fits: whether it fits the memory; if not, it is no answer and no hint.
        latest: ticks that the best schedule does not exceed: its own, or those of everything after
            each other.
        schedule: its own; None if it does not fit, or the model is relaxed.
    """

    device_of: tuple[int, ...]
    fits: bool
    latest: int
    schedule: Schedule | None = None


def known_of(instance: Instance, start: Sequence[int] | None) -> Known:
    """What a placement that fits says, or what is known without one.

    Args:
        start: device of each operator, or None.
    """
    if start is None:
        placing = instance.placing
        devices = range(placing.num_devices)
        longest = sum(
            2
            * len(flow.consumers)
            * max(message_ticks(instance, flow.bytes, p, q) for p in devices for q in devices)
            for flow in placing.tensors
        )
        slowest = (instance.forward.max(axis=1) + instance.backward.max(axis=1)).sum()
        nowhere = canonical(instance, [0] * placing.num_operators)
        return Known(nowhere, False, int(slowest) + longest)
    device_of = canonical(instance, grouped(instance, start))
    if instance.relaxed:
        back = relaxed_times(instance, device_of)[1]
        latest = max(t + int(instance.backward[i, device_of[i]]) for i, t in enumerate(back))
        return Known(device_of, True, latest)
    schedule = schedule_of(instance, device_of)
    return Known(device_of, True, schedule.latency, schedule)


def edge_ticks(instance: Instance, size_bytes: int, p: int, q: int) -> int:
    """Ticks M of the published model, 0 on one device."""
    return message_ticks(instance, size_bytes, p, q) if p != q else 0


def relaxed_times(
    instance: Instance, device_of: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Starts (S, S') of the published model for a placement, all as early as they can be: its
    makespan is the longest path, there and back.
    """
    num = instance.placing.num_operators
    start, back = [0] * num, [0] * num
    edges = edge_bytes(instance.placing)
    moved = {
        (i, j): edge_ticks(instance, size, device_of[i], device_of[j])
        for (i, j), size in edges.items()
    }
    forward = [int(instance.forward[i, p]) for i, p in enumerate(device_of)]
    backward = [int(instance.backward[i, p]) for i, p in enumerate(device_of)]
    for i, j in sorted(edges, key=lambda edge: (edge[1], edge[0])):
        start[j] = max(start[j], start[i] + forward[i] + moved[i, j])
    read = {i for i, _ in edges}
    for i in range(num):
        if i not in read:
            back[i] = start[i] + forward[i]
    for i, j in sorted(edges, reverse=True):
        back[i] = max(back[i], back[j] + backward[j] + moved[i, j])
    return tuple(start), tuple(back)
