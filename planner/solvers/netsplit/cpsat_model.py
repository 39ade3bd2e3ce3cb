"""NetSplit's model (`model.py`, whose numbers and symbols these are) in OR-Tools CP-SAT.

Operators are optional intervals per device, transfers optional intervals per ordered pair of
devices, and per shared link of its route. Besides, z_gh says whether groups g and h are apart, and
two families follow from (1) to (9) but are far from obvious to the engine:

    (a) heads, tails and least ends of `bounds.py`                                 `phase_of`
    (b) S_j >= C_i + (least ticks of a transfer from i to j) z_g(i)g(j); the same of S'    `_wait`

In the published model any number of operators run at once on a device, so it has no intervals: only
(1), (8), (2'), (4') and (5')                                                      `makespan_of`

Source: Perron and Didier, OR-Tools CP-SAT; NetSplit, Nanjing 2023.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.solvers.netsplit.bounds import JointBounds, PhaseBounds, edges_of
from planner.solvers.netsplit.model import (
    KnownPlacement,
    NetSplitInstance,
    busy_ticks,
    edge_ticks,
    relaxed_times,
    transfer_ticks,
)
from planner.solvers.placement.coplacement import edge_bytes
from planner.solvers.placement.timetable import LINK
from planner.support.arrays import Ints


@dataclass(slots=True)
class CpSatModel:
    """The model while it is built.

    Attributes:
        cp: the engine's model.
        x: x[g][p]; z: z[g, h], g < h; y: y[t][p][q] of tensors that may be sent, empty without (7).
        hints: values of the known placement and its schedule.
    """

    instance: NetSplitInstance
    cp: Any
    x: list[list[Any]]
    z: dict[tuple[int, int], Any]
    y: dict[int, list[list[Any]]]
    hints: list[tuple[Any, int]]

    def on(self, i: int, p: int) -> Any:
        """Whether operator i is on device p."""
        return self.x[self.instance.group_of[i]][p]

    def apart(self, i: int, j: int) -> Any:
        """Whether two operators of different groups are apart."""
        g, h = self.instance.group_of[i], self.instance.group_of[j]
        return self.z[min(g, h), max(g, h)]


def num_constraints(instance: NetSplitInstance, phases: Sequence[bool], *, channels: bool) -> int:
    """About how many constraints a model has, and so how long it takes to build: most are written
    for every ordered pair of devices.

    Args:
        phases: False for forwards, True for backwards.
        channels: whether with (3) and (7).
    """
    devices = instance.problem.num_devices
    pairs = devices * (devices - 1)
    count = devices * len(instance.groups)
    for t, tensor in enumerate(instance.problem.tensors):
        readers = len(_far_readers(instance, t))
        if not readers:
            continue
        count += 2 * devices * readers  # z
        for backward in phases:
            if backward and not tensor.gradient:
                continue
            count += pairs * readers  # (b)
            count += pairs * (readers + 2) * channels  # (4), (5), (7)
        count += pairs * (readers + 2) * channels  # (3)
    return count


# ------------------------------------------------------------------------------------ placement


def placement_of(
    instance: NetSplitInstance, cp: Any, known: Sequence[int], *, memory: bool
) -> CpSatModel:
    """(1), (8) and (9)."""
    devices = range(instance.problem.num_devices)
    x = [[cp.new_bool_var("") for _ in devices] for _ in instance.groups]
    model = CpSatModel(instance, cp, x, {}, {}, [])
    for group, row in zip(instance.groups, x, strict=True):
        cp.add_exactly_one(row)  # (1)
        model.hints += [(one, int(p == known[group[0]])) for p, one in enumerate(row)]
    if memory:
        _memory(model)
    if not instance.relaxed:
        # No placement is lost: swap alike devices until their first groups ascend.
        for alike in instance.alike:  # (9)
            for p, q in pairwise(alike):
                for g, row in enumerate(x):
                    cp.add_bool_or([x[h][p] for h in range(g)]).only_enforce_if(row[q])
    return model


def keep(model: CpSatModel, device_of: Sequence[int]) -> None:
    """Fixes the placement."""
    for group, row in zip(model.instance.groups, model.x, strict=True):
        model.cp.add(row[device_of[group[0]]] == 1)


def _memory(model: CpSatModel) -> None:
    """(8), left out for devices that everything fits on."""
    instance, cp = model.instance, model.cp
    everything = sum(instance.alone_bytes) + sum(instance.together_bytes.values())
    for p, room in enumerate(instance.problem.capacity_bytes):
        if everything <= room:
            continue
        use = [size * row[p] for size, row in zip(instance.alone_bytes, model.x, strict=True)]
        for groups, size in sorted(instance.together_bytes.items()):
            held = cp.new_bool_var("")
            # One direction is enough: to say that bytes are held that nobody needs only costs room.
            for g in groups:
                cp.add_implication(model.x[g][p], held)
            use.append(size * held)
        cp.add(sum(use) <= int(room))


def add_apart(model: CpSatModel, known: Sequence[int]) -> None:
    """Adds z, for all pairs of groups with an edge between them."""
    group = model.instance.group_of
    for i, j in edge_bytes(model.instance.problem):
        g, h = sorted((group[i], group[j]))
        if g != h and add_pair(model, g, h):
            model.hints.append((model.z[g, h], int(known[i] != known[j])))


def add_pair(model: CpSatModel, g: int, h: int) -> bool:
    """Adds z of two groups, g < h; False if it is there."""
    if (g, h) in model.z:
        return False
    cp, z = model.cp, model.cp.new_bool_var("")
    # On the device of g: either h is not there, so z, or it is, so not z. As g has exactly one
    # device, z is decided.
    for here, there in zip(model.x[g], model.x[h], strict=True):
        cp.add_bool_or(~here, there, z)
        cp.add_bool_or(~here, ~there, ~z)
    model.z[g, h] = z
    return True


def add_transfers(model: CpSatModel, known: Sequence[int]) -> None:
    """(3), for tensors with readers in other groups than their producer's."""
    instance, cp, devices = model.instance, model.cp, range(model.instance.problem.num_devices)
    for t, tensor in enumerate(instance.problem.tensors):
        home = model.x[instance.group_of[tensor.producer]]
        readers = _far_readers(instance, t)
        if not readers:
            continue
        y = model.y[t] = [[cp.new_bool_var("") for _ in devices] for _ in devices]
        for p in devices:
            for q in devices:
                here = known[tensor.producer] == p and any(known[j] == q for j in readers)
                model.hints.append((y[p][q], int(here and p != q)))
                if p == q:
                    cp.add(y[p][q] == 0)
                    continue
                # (3) in both directions: y only if the producer is on p and a reader on q, and then
                # always.
                cp.add_implication(y[p][q], home[p])
                cp.add_bool_or(*(model.on(j, q) for j in readers), ~y[p][q])
                for j in readers:
                    cp.add_bool_or(~home[p], ~model.on(j, q), y[p][q])


def _far_readers(instance: NetSplitInstance, t: int) -> list[int]:
    """The readers of a tensor in other groups than its producer's."""
    tensor, group = instance.problem.tensors[t], instance.group_of
    return [j for j in tensor.consumers if group[j] != group[tensor.producer]]


# ---------------------------------------------------------------------------------------- phases


@dataclass(frozen=True, slots=True)
class CpSatPhase:
    """The variables of all forwards, or of all backwards.

    Attributes:
        backward: whether of backwards.
        start: S or S' of each operator; done: C or C'; end: F or B.
        channels: optional intervals of the transfers from p to q, by (p, q), and over shared link
            l, by (LINK, l).
    """

    backward: bool
    start: list[Any]
    done: list[Any]
    end: Any
    channels: dict[tuple[int, int], list[Any]]


def _ticks_of(instance: NetSplitInstance, backward: bool) -> Ints:
    return instance.backward if backward else instance.forward


def _way(p: int, other: int, backward: bool) -> tuple[int, int]:
    """The channel of a tensor made on p and read elsewhere, or of its gradient."""
    return (other, p) if backward else (p, other)


def phase_of(
    model: CpSatModel,
    bounds: PhaseBounds,
    known: KnownPlacement,
    max_ticks: int,
    *,
    backward: bool,
    mirrored: bool = False,
) -> CpSatPhase:
    """(2), (4) to (6), with transfers that do not wait for each other.

    Args:
        known: its schedule is the hint, if it has one.
        max_ticks: upper limit of the phase's end.
        mirrored: whether the phase is read from its end: starts are ends, and edges are reversed.
    """
    instance, cp = model.instance, model.cp
    ticks, devices = _ticks_of(instance, backward), range(instance.problem.num_devices)
    # (a): heads, tails and the least end.
    start = [cp.new_int_var(h, max_ticks, "") for h in bounds.head]
    done = [
        begin + int(row[0])
        if (row == row[0]).all()
        else begin + sum(int(row[p]) * model.on(i, p) for p in devices)
        for i, (begin, row) in enumerate(zip(start, ticks, strict=True))
    ]
    end = cp.new_int_var(bounds.least, max_ticks, "")
    for i, ended in enumerate(done):
        cp.add(end >= ended + bounds.tail[i])
    phase = CpSatPhase(backward, start, done, end, {})
    if known.schedule is not None:
        model.hints += zip([*start, end], known.schedule.phase(backward), strict=True)
    for i, j, t in edges_of(instance, backward=backward):
        _wait(model, phase, *((j, i) if mirrored else (i, j)), t, mirrored=mirrored)
    for p in devices:
        running = [
            cp.new_optional_fixed_size_interval_var(start[i], int(row[p]), model.on(i, p), "")
            for i, row in enumerate(ticks)
            if row[p]
        ]
        if len(running) > 1:
            cp.add_no_overlap(running)  # (6)
    return phase


def _wait(model: CpSatModel, phase: CpSatPhase, i: int, j: int, t: int, *, mirrored: bool) -> None:
    """Lets j wait for i because of tensor t: (b), and where paths differ the transfer's time."""
    instance, cp = model.instance, model.cp
    tensor, devices = instance.problem.tensors[t], range(instance.problem.num_devices)
    if instance.group_of[i] == instance.group_of[j]:
        cp.add(phase.start[j] >= phase.done[i])
        return
    ways = {(p, q): transfer_ticks(instance, tensor.bytes, *((q, p) if mirrored else (p, q)))
            for p in devices for q in devices if p != q}  # fmt: skip
    # (b) has no condition, so it propagates before the devices are known; a condition is needed
    # only for paths that take longer than the fastest.
    least = min(ways.values(), default=0)
    cp.add(phase.start[j] >= phase.done[i] + least * model.apart(i, j))
    for (p, q), ticks in ways.items():
        if ticks > least:
            both = [model.on(i, p), model.on(j, q)]
            cp.add(phase.start[j] >= phase.done[i] + ticks).only_enforce_if(both)


def add_joint(
    model: CpSatModel, forward: CpSatPhase, backward: CpSatPhase, joint: JointBounds
) -> None:
    """The least ticks before each operator in both phases together, behind it, and between some."""
    for i, (before, behind) in enumerate(zip(joint.before, joint.behind, strict=True)):
        model.cp.add(forward.start[i] + backward.end - backward.done[i] >= before)
        model.cp.add(forward.end - forward.done[i] + backward.start[i] >= behind)
    for (u, v), ticks in sorted(joint.between.items()):
        there, back = forward.done[v] - forward.start[u], backward.done[u] - backward.start[v]
        model.cp.add(there + back >= ticks)


def add_channels(
    model: CpSatModel, phase: CpSatPhase, known: KnownPlacement, max_ticks: int
) -> None:
    """(7), with A and A' in (4) and (5)."""
    instance, cp = model.instance, model.cp
    devices = range(instance.problem.num_devices)
    for t, y in model.y.items():
        tensor = instance.problem.tensors[t]
        if phase.backward and not tensor.gradient:
            continue
        for other in devices:
            sent = cp.new_int_var(0, max_ticks, "")
            if known.schedule is not None:
                times = known.schedule.returned if phase.backward else known.schedule.sent
                model.hints.append((sent, times.get((t, other), 0)))
            # One start for all paths to a device, and an interval for each: the producer is on one
            # device, so one of them is there at most, with the ticks of its path.
            for p in devices:
                way = _way(p, other, phase.backward)
                ticks = transfer_ticks(instance, tensor.bytes, *way)
                if p == other or not ticks:
                    continue
                links = busy_ticks(instance, tensor.bytes, *way)
                for one, busy in ((way, ticks), *(((LINK, k), busy) for k, busy in links)):
                    phase.channels.setdefault(one, []).append(
                        cp.new_optional_fixed_size_interval_var(sent, busy, y[p][other], "")
                    )
                _send(model, phase, t, sent, ticks, (p, other))
    for transfers in phase.channels.values():
        if len(transfers) > 1:
            cp.add_no_overlap(transfers)


def _send(
    model: CpSatModel, phase: CpSatPhase, t: int, sent: Any, ticks: int, ends: tuple[int, int]
) -> None:
    """(4) or (5) of one transfer, if the producer and the readers of its tensor are on two devices.

    Args:
        t: the tensor; sent: A or A'; ticks: m.
        ends: device of the producer, device of the readers.
    """
    cp, maker = model.cp, model.instance.problem.tensors[t].producer
    is_sent = model.y[t][ends[0]][ends[1]]
    if phase.backward:
        cp.add(phase.start[maker] >= sent + ticks).only_enforce_if(is_sent)
    else:
        cp.add(sent >= phase.done[maker]).only_enforce_if(is_sent)
    for j in _far_readers(model.instance, t):
        late = sent >= phase.done[j] if phase.backward else phase.start[j] >= sent + ticks
        cp.add(late).only_enforce_if([is_sent, model.on(j, ends[1])])


# --------------------------------------------------------------------------- the published model


def makespan_of(model: CpSatModel, known: KnownPlacement) -> Any:
    """(2'), (4') and (5'): the makespan of the published model."""
    instance, cp, worst = model.instance, model.cp, known.latest
    num, devices = instance.problem.num_operators, range(instance.problem.num_devices)
    edges = edge_bytes(instance.problem)
    forward, backward = relaxed_times(instance, known.device_of)
    there = [cp.new_int_var(0, worst, "") for _ in range(num)]
    back = [cp.new_int_var(0, worst, "") for _ in range(num)]
    model.hints += [*zip(there, forward, strict=True), *zip(back, backward, strict=True)]
    makespan = cp.new_int_var(0, worst, "")
    model.hints.append((makespan, worst))
    lasts = [
        [sum(int(ticks[i, p]) * model.on(i, p) for p in devices) for i in range(num)]
        for ticks in (instance.forward, instance.backward)
    ]
    fed, read = {j for _, j in edges}, {i for i, _ in edges}
    for i in range(num):
        if i not in fed:
            cp.add(there[i] == 0)
        if instance.forward_only or i not in read:
            cp.add(back[i] == there[i] + lasts[0][i])
        cp.add(makespan >= back[i] + lasts[1][i])
    for (i, j), size in edges.items():
        cp.add(there[j] >= there[i] + lasts[0][i])
        if not instance.forward_only:
            cp.add(back[i] >= back[j] + lasts[1][j])
        for p in devices:
            for q in devices:
                moved = edge_ticks(instance, size, p, q)
                if not moved or instance.group_of[i] == instance.group_of[j]:
                    continue
                both = [model.on(i, p), model.on(j, q)]
                cp.add(there[j] >= there[i] + lasts[0][i] + moved).only_enforce_if(both)
                if not instance.forward_only:
                    cp.add(back[i] >= back[j] + lasts[1][j] + moved).only_enforce_if(both)
    return makespan
