"""NetSplit's model (`netsplit_model.py`, whose numbers and symbols these are) in OR-Tools CP-SAT.

Operators are optional intervals per device, messages optional intervals per ordered pair of
devices. Besides, z_gh says whether groups g and h are apart, and the model has what follows from
(1) to (9) but is far from obvious to the engine:

    (a) heads, tails and least ends of `netsplit_bounds`                       `phase_of`
    (b) S_j >= C_i + (least ticks of what i sends j) z_g(i)g(j); the same of S'    `_wait`

Source: Perron and Didier, OR-Tools CP-SAT.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.solvers.netsplit.bounds import Joint, Limits, edges_of
from planner.solvers.netsplit.model import Instance, Known, message_ticks
from planner.solvers.placement.coplacement import edge_bytes
from planner.support.arrays import Ints


@dataclass(slots=True)
class Model:
    """The model while it is built.

    Attributes:
        cp: the engine's model; x: x[g][p]; z: z[g, h], g < h; y: y[t][p][q] of tensors that may
            cross, empty without (7).
        hints: values of the known placement.
    """

    instance: Instance
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


# ------------------------------------------------------------------------------------ placement


def placement_of(instance: Instance, cp: Any, known: Sequence[int], *, memory: bool) -> Model:
    """(1), (8) and (9)."""
    devices = range(instance.placing.num_devices)
    x = [[cp.new_bool_var("") for _ in devices] for _ in instance.groups]
    model = Model(instance, cp, x, {}, {}, [])
    for group, row in zip(instance.groups, x, strict=True):
        cp.add_exactly_one(row)  # (1)
        model.hints += [(one, int(p == known[group[0]])) for p, one in enumerate(row)]
    if memory:
        _memory(model)
    if not instance.relaxed:
        for alike in instance.alike:  # (9)
            for p, q in pairwise(alike):
                for g, row in enumerate(x):
                    cp.add_bool_or([x[h][p] for h in range(g)]).only_enforce_if(row[q])
    return model


def keep(model: Model, device_of: Sequence[int]) -> None:
    """Leaves a single placement."""
    for group, row in zip(model.instance.groups, model.x, strict=True):
        model.cp.add(row[device_of[group[0]]] == 1)


def _memory(model: Model) -> None:
    """(8), left out for devices that everything fits on."""
    instance, cp = model.instance, model.cp
    everything = sum(instance.alone_bytes) + sum(instance.together_bytes.values())
    for p, room in enumerate(instance.placing.capacity_bytes):
        if everything <= room:
            continue
        use = [size * row[p] for size, row in zip(instance.alone_bytes, model.x, strict=True)]
        for groups, size in sorted(instance.together_bytes.items()):
            held = cp.new_bool_var("")
            for g in groups:
                cp.add_implication(model.x[g][p], held)
            use.append(size * held)
        cp.add(sum(use) <= int(room))


def add_apart(model: Model, known: Sequence[int]) -> None:
    """Sets up z, for all groups that something is sent between."""
    instance, cp = model.instance, model.cp
    for i, j in edge_bytes(instance.placing):
        g, h = sorted((instance.group_of[i], instance.group_of[j]))
        if g == h or (g, h) in model.z:
            continue
        z = model.z[g, h] = cp.new_bool_var("")
        for here, there in zip(model.x[g], model.x[h], strict=True):
            cp.add_bool_or(~here, there, z)
            cp.add_bool_or(~here, ~there, ~z)
        model.hints.append((z, int(known[i] != known[j])))


def add_crossings(model: Model, known: Sequence[int]) -> None:
    """(3), of tensors with readers in other groups than their maker's."""
    instance, cp, devices = model.instance, model.cp, range(model.instance.placing.num_devices)
    for t, flow in enumerate(instance.placing.tensors):
        home = model.x[instance.group_of[flow.producer]]
        readers = _far_readers(instance, t)
        if not readers:
            continue
        y = model.y[t] = [[cp.new_bool_var("") for _ in devices] for _ in devices]
        for p in devices:
            for q in devices:
                here = known[flow.producer] == p and any(known[j] == q for j in readers)
                model.hints.append((y[p][q], int(here and p != q)))
                if p == q:
                    cp.add(y[p][q] == 0)
                    continue
                cp.add_implication(y[p][q], home[p])
                cp.add_bool_or(*(model.on(j, q) for j in readers), ~y[p][q])
                for j in readers:
                    cp.add_bool_or(~home[p], ~model.on(j, q), y[p][q])


def _far_readers(instance: Instance, t: int) -> list[int]:
    """The readers of a tensor that are in other groups than its maker."""
    flow, group = instance.placing.tensors[t], instance.group_of
    return [j for j in flow.consumers if group[j] != group[flow.producer]]


# ---------------------------------------------------------------------------------------- phases


@dataclass(frozen=True, slots=True)
class Phase:
    """All forwards, or all backwards, with their variables.

    Attributes:
        backward: which; start: S or S' of each operator; done: C or C'; end: F or B.
        lines: optional intervals by place: (p, p) for a device, (p, q) for messages.
    """

    backward: bool
    start: list[Any]
    done: list[Any]
    end: Any
    lines: dict[tuple[int, int], list[Any]]


def _ticks_of(instance: Instance, backward: bool) -> Ints:
    return instance.backward if backward else instance.forward


def _way(p: int, other: int, backward: bool) -> tuple[int, int]:
    """The channel of a tensor made on p, or of its gradient's way back."""
    return (other, p) if backward else (p, other)


def phase_of(
    model: Model, limits: Limits, known: Known, most: int, *, backward: bool, mirrored: bool = False
) -> Phase:
    """(2), (4) to (6), with messages that do not wait for each other.

    Args:
        known: its schedule is the hint, if it has one.
        most: ticks that the phase's end need not exceed.
        mirrored: whether the phase is read from its end.
    """
    instance, cp = model.instance, model.cp
    ticks, devices = _ticks_of(instance, backward), range(instance.placing.num_devices)
    start = [cp.new_int_var(h, most, "") for h in limits.head]
    done = [
        begin + int(row[0])
        if (row == row[0]).all()
        else begin + sum(int(row[p]) * model.on(i, p) for p in devices)
        for i, (begin, row) in enumerate(zip(start, ticks, strict=True))
    ]
    end = cp.new_int_var(limits.least, most, "")
    for i, ended in enumerate(done):
        cp.add(end >= ended + limits.tail[i])
    phase = Phase(backward, start, done, end, {})
    if known.schedule is not None:
        model.hints += zip([*start, end], known.schedule.phase(backward), strict=True)
    for i, j, t in edges_of(instance, backward=backward):
        _wait(model, phase, *((j, i) if mirrored else (i, j)), t, mirrored=mirrored)
    for p in devices:
        line = [
            cp.new_optional_fixed_size_interval_var(start[i], int(row[p]), model.on(i, p), "")
            for i, row in enumerate(ticks)
            if row[p]
        ]
        if len(line) > 1:
            cp.add_no_overlap(line)  # (6)
    return phase


def _wait(model: Model, phase: Phase, i: int, j: int, t: int, *, mirrored: bool) -> None:
    """(b), and where not all paths are alike the message's own time: j waits for i by tensor t."""
    instance, cp = model.instance, model.cp
    flow, devices = instance.placing.tensors[t], range(instance.placing.num_devices)
    if instance.group_of[i] == instance.group_of[j]:
        cp.add(phase.start[j] >= phase.done[i])
        return
    ways = {(p, q): message_ticks(instance, flow.bytes, *((q, p) if mirrored else (p, q)))
            for p in devices for q in devices if p != q}  # fmt: skip
    least = min(ways.values(), default=0)
    cp.add(phase.start[j] >= phase.done[i] + least * model.apart(i, j))
    for (p, q), ticks in ways.items():
        if ticks > least:
            both = [model.on(i, p), model.on(j, q)]
            cp.add(phase.start[j] >= phase.done[i] + ticks).only_enforce_if(both)


def add_joint(model: Model, forward: Phase, backward: Phase, joint: Joint) -> None:
    """What no schedule has less of before an operator, in both phases together, or behind it."""
    for i, (before, behind) in enumerate(zip(joint.before, joint.behind, strict=True)):
        model.cp.add(forward.start[i] + backward.end - backward.done[i] >= before)
        model.cp.add(forward.end - forward.done[i] + backward.start[i] >= behind)


def add_channels(model: Model, phase: Phase, known: Known, most: int) -> None:
    """(7), with when messages are sent in (4) and (5)."""
    instance, cp = model.instance, model.cp
    devices = range(instance.placing.num_devices)
    for t, y in model.y.items():
        flow = instance.placing.tensors[t]
        if phase.backward and not flow.gradient:
            continue
        for other in devices:
            sent = cp.new_int_var(0, most, "")
            if known.schedule is not None:
                times = known.schedule.returned if phase.backward else known.schedule.sent
                model.hints.append((sent, times.get((t, other), 0)))
            for p in devices:
                way = _way(p, other, phase.backward)
                ticks = message_ticks(instance, flow.bytes, *way)
                if p == other or not ticks:
                    continue
                phase.lines.setdefault(way, []).append(
                    cp.new_optional_fixed_size_interval_var(sent, ticks, y[p][other], "")
                )
                _send(model, phase, t, sent, ticks, (p, other))
    for line in phase.lines.values():
        if len(line) > 1:
            cp.add_no_overlap(line)


def _send(model: Model, phase: Phase, t: int, sent: Any, ticks: int, ends: tuple[int, int]) -> None:
    """When a message may go that takes so many ticks if the tensor's maker and readers are there.

    Args:
        ends: device of the maker, device of the readers.
    """
    cp, maker = model.cp, model.instance.placing.tensors[t].producer
    crosses = model.y[t][ends[0]][ends[1]]
    if phase.backward:
        cp.add(phase.start[maker] >= sent + ticks).only_enforce_if(crosses)
    else:
        cp.add(sent >= phase.done[maker]).only_enforce_if(crosses)
    for j in _far_readers(model.instance, t):
        late = sent >= phase.done[j] if phase.backward else phase.start[j] >= sent + ticks
        cp.add(late).only_enforce_if([crosses, model.on(j, ends[1])])
