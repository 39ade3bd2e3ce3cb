"""NetSplit's model in integers, as both engines build it (`cpsat_model.py`, `gurobi.py`).

Legend: operators i, j; devices p, q; tensor t, made by i(t) and read by J(t); groups g of operators
that share a device (`solvers/placement/coplacement.py`), g(i) the group of i. f_ip, b_ip ticks of
forward and backward of i on p; m_tpq ticks of a transfer of t from p to q, m_tpp = 0; n_tlpq <=
m_tpq ticks for which it occupies link l of its route (`solvers/placement/links.py`). Variables:

    x_gp            whether group g is on device p
    S_i, C_i        start and end of the forward of i; S'_i, C'_i of its backward
    y_tpq           whether t is made on p and read on q
    A_tq, A'_tq     when t is sent to q, and when its gradient is sent from q
    F, B            length of all forwards, and of all backwards, each on a clock of its own

    minimise   F + B       the latency of one microbatch
    subject to (1) sum_p x_gp = 1
               (2) C_i = S_i + sum_p f_ip x_g(i)p, the same of C'; F >= C_i, B >= C'_i
               (3) y_tpq = x_g(i(t))p and (x_g(j)q for some j in J(t))
               (4) A_tq >= C_i(t);  S_j >= A_tq + sum_p m_tpq y_tpq for j in J(t) on q
               (5) A'_tq >= C'_j for j in J(t) on q;  S'_i(t) >= A'_tq + sum_p m_tqp y_tpq
               (6) the forwards on a device do not overlap, nor do the backwards
               (7) the transfers from p to q do not overlap, nor do those of gradients; nor do the
                   times for which transfers occupy a link l that several pairs share, n_tlpq ticks
                   from the start of the transfer on
               (8) sum over kept bytes, of each whether p has an operator that needs them <= memory
                   of p
               (9) of devices that may be swapped, p before q: g is on q only if an earlier group
                   is on p

The loss needs every result, so the first backward starts after the last forward (S'_i of operators
without readers is at least the end of all forwards). Then the two phases share only the placement,
and each has its own clock. A tensor without gradient has no (5). A tensor is sent once to each
device that reads it, and each of these sends one gradient back, over the reverse path. The
simulator halves the rates of two transfers over a link; here one of them waits, so that the link is
as long busy with both. `solvers/placement/timetable.py` runs (3) to (7).

`relaxed` is the model as it was published: no (6), (7) and (9); with an edge per reader,

    (4') S_j >= C_i + M_ij,  (5') S'_i >= C'_j + M_ij,  M_ij = ticks of i's bytes for j from x to x
    (2') S_i = 0 where none feeds i; S'_i = C_i where none reads i, on one clock; makespan >= C'_i

which charges a gradient like the tensor, on the forward path. Its (8) is (5-18) of the thesis, to
the byte (`published_bytes`). With `forward_only` the backward is left out, (5') and all: Pesto as
the thesis prints it.

Ticks are so short that rounding every duration changes no schedule by more than `LOSS`.

Source: NetSplit, Nanjing 2023; (5), (6), (7) and (9) are this project's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.artefacts.problem import Status
from planner.clusters.routes import distinct_ways
from planner.solvers.placement.coplacement import edge_bytes, kept_bytes
from planner.solvers.placement.problem import (
    KeptBytes,
    Placement,
    PlacementProblem,
    busy_s,
    bytes_by_device,
    links_of_pairs,
    transfer_s,
)
from planner.support.arrays import Bools, Floats, Ints
from planner.support.memo import remembered

LOSS = 0.001
"""Rounding to ticks changes a whole schedule by at most this share of the least latency."""

# Fields of a placement problem, besides the times, with an entry per operator.
_BY_OPERATOR = (
    "parameter_bytes", "trainable_bytes", "result_bytes", "private_bytes", "workspace_bytes"
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class NetSplitInstance:
    """The input of the engines.

    Attributes:
        problem: the placement problem in s and bytes.
        groups: operators that share a device; group_of: (N,) the group of each operator.
        tick_s: length of a tick; lost_s: largest change of a schedule's length by rounding.
        forward: (N, D) ticks f; backward: (N, D) ticks b.
        alone_bytes: (G,) bytes that only this group needs.
        together_bytes: bytes that several groups need, by these groups; a device holds them once.
        alike: classes of devices any two of which may be swapped, each ascending.
        relaxed: whether this is the published model.
        forward_only: whether that has no backward; its ticks are 0 then.
    """

    problem: PlacementProblem
    groups: tuple[tuple[int, ...], ...]
    group_of: tuple[int, ...]
    tick_s: float
    lost_s: float
    forward: Ints
    backward: Ints
    alone_bytes: tuple[int, ...]
    together_bytes: KeptBytes
    alike: tuple[tuple[int, ...], ...]
    relaxed: bool
    forward_only: bool = False

    @property
    def kept(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """All bytes that groups need, by these groups: those of each group alone come first."""
        alone = (((g,), size) for g, size in enumerate(self.alone_bytes))
        return (*alone, *sorted(self.together_bytes.items()))


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The answer of an engine.

    Attributes:
        status: status of the instance, to `LOSS`.
        device_of: device of each operator, None if the status is infeasible or unknown.
        latency_s: latency of the engine's own schedule by its own model; inf without a placement.
        bound_s: no placement of these groups is faster; None if unknown.
        reproducible: False where the brake or the user cut the search.
        note: a sentence for the user, such as the engine that could not be used.
        order: the operators as the forwards of the engine's schedule start; None without one.
    """

    status: Status
    device_of: Placement | None
    latency_s: float
    bound_s: float | None
    reproducible: bool = True
    note: str = ""
    order: tuple[int, ...] | None = None


def instance_of(
    problem: PlacementProblem, groups: Sequence[tuple[int, ...]], *, relaxed: bool = False
) -> NetSplitInstance:
    """The model of a placement problem whose groups of operators stay together."""
    group_of = [0] * problem.num_operators
    for g, inside in enumerate(groups):
        for i in inside:
            group_of[i] = g
    tick_s, lost_s = _tick_s(problem)
    alone, together = [0] * len(groups), Counter[tuple[int, ...]]()
    for operators, size in kept_bytes(problem).items():
        where = tuple(sorted({group_of[i] for i in operators}))
        if len(where) == 1:
            alone[where[0]] += size
        elif size:
            together[where] += size
    return NetSplitInstance(
        problem=problem,
        groups=tuple(groups),
        group_of=tuple(group_of),
        tick_s=tick_s,
        lost_s=lost_s,
        forward=_ticks(problem.forward_s, tick_s),
        backward=_ticks(problem.backward_s, tick_s),
        alone_bytes=tuple(alone),
        together_bytes=together,
        alike=_alike(problem),
        relaxed=relaxed,
    )


def _ticks(times_s: Floats, tick_s: float) -> Ints:
    return np.rint(times_s / tick_s).astype(np.int64)


def _tick_s(problem: PlacementProblem) -> tuple[float, float]:
    """Length of a tick, and the largest change of a schedule's length by rounding.

    A schedule is as long as a chain of operators and transfers that wait for each other. Each is in
    it at most once per phase, and is rounded by at most half a tick.
    """
    fastest_s = (problem.forward_s + problem.backward_s).min(axis=1)
    # Some device has this much to do, and the longest operator runs somewhere.
    least_s = float(max(fastest_s.sum() / problem.num_devices, fastest_s.max()))
    targets = max(problem.num_devices - 1, 0)
    transfers = sum(min(len(tensor.consumers), targets) for tensor in problem.tensors)
    longest_chain = 2 * (problem.num_operators + transfers)
    return LOSS * least_s / (longest_chain / 2) or 1.0, LOSS * least_s


def part(instance: NetSplitInstance, operators: Sequence[int]) -> NetSplitInstance:
    """The model of some operators alone, without memory, in the same ticks.

    Args:
        operators: ascending, at least one.
    """
    problem, which = instance.problem, list(operators)
    number = {i: k for k, i in enumerate(which)}
    tensors = (
        replace(
            tensor,
            producer=number[tensor.producer],
            consumers=tuple(number[j] for j in tensor.consumers if j in number),
        )
        for tensor in problem.tensors
        if tensor.producer in number
    )
    inside = replace(
        problem,
        forward_s=problem.forward_s[which],
        backward_s=problem.backward_s[which],
        tensors=tuple(tensor for tensor in tensors if tensor.consumers),
        **{name: getattr(problem, name)[which] for name in _BY_OPERATOR},
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
        problem=inside,
        groups=groups,
        group_of=tuple(group_of[k] for k in range(len(which))),
        forward=instance.forward[which],
        backward=instance.backward[which],
        alone_bytes=(0,) * len(groups),
        together_bytes={},
    )


def transfer_ticks(instance: NetSplitInstance, size_bytes: int, p: int, q: int) -> int:
    """Ticks m of a transfer from p to q."""
    return round(transfer_s(instance.problem, size_bytes, p, q) / instance.tick_s)


def ticks_by_way(instance: NetSplitInstance) -> tuple[Ints, Ints]:
    """(D, D) the way from p to q, and (T, W) ticks m of the transfer of every tensor on each."""
    problem = instance.problem
    sizes = np.array([tensor.bytes for tensor in problem.tensors], dtype=np.int64)[:, None]
    way, latency, per_byte = distinct_ways(problem.latency_s, problem.seconds_per_byte)
    return way, _ticks(latency + sizes * per_byte, instance.tick_s)


def busy_ticks(
    instance: NetSplitInstance, size_bytes: int, p: int, q: int
) -> tuple[tuple[int, int], ...]:
    """(l, ticks n) of each shared link that a transfer from p to q occupies."""
    problem = instance.problem
    return tuple(
        (link, round(busy_s(problem, problem.shared[link], size_bytes, p, q) / instance.tick_s))
        for link in links_of_pairs(problem).get((p, q), ())
    )


class TransferTicks(NamedTuple):
    """What transfers occupy, as arrays for the kernels. Resource p D + q is the channel from p to
    q, resource D D + l shared link l; W ways and different widths of links, C in all.

    Attributes:
        ticks: (T, C) of each tensor, by way or by width of a link.
        way: (D, D) the column of the way from p to q.
        resources: by channel, the resources of its route, itself first.
        columns: likewise, the column of the ticks for which a transfer occupies each.
        num_resources: their number.
    """

    ticks: Ints
    way: Ints
    resources: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    num_resources: int


def transfer_table(instance: NetSplitInstance) -> TransferTicks:
    """The ticks of all transfers."""
    problem, devices = instance.problem, instance.problem.num_devices
    way, away = ticks_by_way(instance)
    sizes = np.array([tensor.bytes for tensor in problem.tensors], dtype=np.int64)[:, None]
    widths = sorted({link.seconds_per_byte for link in problem.shared if not link.exclusive})
    busy = _ticks(sizes * np.array(widths), instance.tick_s)
    resources, columns = [], []
    for p in range(devices):
        for q in range(devices):
            there = int(way[p, q])
            links = links_of_pairs(problem).get((p, q), ())
            kinds = (problem.shared[k] for k in links)
            resources.append((p * devices + q, *(devices * devices + k for k in links)))
            columns.append((there, *(
                there if one.exclusive else away.shape[1] + widths.index(one.seconds_per_byte)
                for one in kinds
            )))  # fmt: skip
    count = devices * devices + len(problem.shared)
    return TransferTicks(np.hstack([away, busy]), way, tuple(resources), tuple(columns), count)


def _alike(problem: PlacementProblem) -> tuple[tuple[int, ...], ...]:
    """Classes of devices: swapping two of a class changes no time, no memory and no path."""
    classes: list[list[int]] = []
    for q in range(problem.num_devices):
        for known in classes:
            if _swappable(problem, known[0], q):
                known.append(q)
                break
        else:
            classes.append([q])
    return tuple(tuple(known) for known in classes)


def _swappable(problem: PlacementProblem, p: int, q: int) -> bool:
    own = (problem.forward_s, problem.backward_s, problem.capacity_bytes[None, :])
    paths = (problem.latency_s, problem.seconds_per_byte)
    swap = np.arange(problem.num_devices)
    swap[[p, q]] = q, p
    # Only the rows and columns of the two change, so no other entries are compared.
    equal = all(np.array_equal(table[..., p], table[..., q]) for table in own) and all(
        np.array_equal(side[p], side[q][swap]) for table in paths for side in (table, table.T)
    )
    return equal and _same_links(problem, swap)


def _same_links(problem: PlacementProblem, swap: Ints) -> bool:
    """Whether devices of other names have the same shared links.

    Args:
        swap: (D,) the new name of each device.
    """
    table = _pairs_of_links(problem)
    renamed = table[:, swap][:, :, swap]
    changed = np.flatnonzero((table != renamed).any(axis=(1, 2))).tolist()

    def kinds(pairs: Bools) -> Counter[tuple[float, bool, bytes]]:
        links = [(k, problem.shared[k]) for k in changed]
        return Counter(
            (one.seconds_per_byte, one.exclusive, pairs[k].tobytes()) for k, one in links
        )

    return kinds(table) == kinds(renamed)


@remembered
def _pairs_of_links(problem: PlacementProblem) -> Bools:
    """(L, D, D) whether a shared link is on the route from p to q."""
    table = np.zeros((len(problem.shared), problem.num_devices, problem.num_devices), dtype=bool)
    for k, link in enumerate(problem.shared):
        table[k, *np.array(link.pairs).T] = True
    return table


def canonical(instance: NetSplitInstance, device_of: Sequence[int]) -> Placement:
    """The same placement with the devices of a class renamed in the order of the groups, by (9).

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


def grouped(instance: NetSplitInstance, device_of: Sequence[int]) -> Placement:
    """A placement changed so that groups stay together: each goes to the device with most of its
    time, ties to the lowest index.
    """
    problem, together = instance.problem, [0] * instance.problem.num_operators
    for group in instance.groups:
        votes = Counter[int]()
        for i in group:
            p = device_of[i]
            votes[p] += problem.forward_s[i, p] + problem.backward_s[i, p]
        where = min(votes, key=lambda p: (-votes[p], p))
        for i in group:
            together[i] = where
    return tuple(together)


def overflow(instance: NetSplitInstance, device_of: Sequence[int]) -> int:
    """Bytes by which the fullest device exceeds its memory under (8); at most 0 if all fits."""
    used = bytes_by_device(kept_bytes(instance.problem), device_of)
    return max(used[p] - int(room) for p, room in enumerate(instance.problem.capacity_bytes))


@dataclass(frozen=True, slots=True)
class TickSchedule:
    """A feasible schedule in ticks, each phase on its own clock.

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
    forward: Sequence[float], backward: Sequence[float]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The operators as their forwards start, and as their backwards do. Ties keep the topological
    order, backwards its reverse.

    Args:
        forward, backward: (N,) starts.
    """
    num = range(len(forward))
    return (
        tuple(sorted(num, key=lambda i: (forward[i], i))),
        tuple(sorted(num, key=lambda i: (backward[i], -i))),
    )


@dataclass(frozen=True, slots=True)
class KnownPlacement:
    """A known placement, to start from and to beat.

    Attributes:
        device_of: a placement that keeps groups together, named by (9).
        fits: whether it fits the memory; if not, it is no answer and no hint.
        latest: ticks that the best schedule does not exceed: this one's, or without one all jobs
            one after the other.
        schedule: its schedule; None if it does not fit, or the model is relaxed.
    """

    device_of: Placement
    fits: bool
    latest: int
    schedule: TickSchedule | None = None


def edge_ticks(instance: NetSplitInstance, size_bytes: int, p: int, q: int) -> int:
    """Ticks M of the published model, 0 within a device."""
    return transfer_ticks(instance, size_bytes, p, q) if p != q else 0


def relaxed_times(
    instance: NetSplitInstance, device_of: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The earliest starts (S, S') of the published model for a placement: its makespan is the
    longest path, forwards and back.
    """
    num = instance.problem.num_operators
    start, back = [0] * num, [0] * num
    edges = edge_bytes(instance.problem)
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
        if instance.forward_only or i not in read:
            back[i] = start[i] + forward[i]
    for i, j in () if instance.forward_only else sorted(edges, reverse=True):
        back[i] = max(back[i], back[j] + backward[j] + moved[i, j])
    return tuple(start), tuple(back)
