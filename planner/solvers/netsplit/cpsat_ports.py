"""Links that pairs of devices share, in the models of windows (`windows.py`): a relaxation of (4),
(5) and (7) with a transfer per edge instead of one per tensor and pair of devices.

Legend: t tensor, made by i and read by j; z_ij whether i and j are apart; m, n ticks as in
`model.py`, least over all pairs of devices. Variables:

    A_tj        start of the transfer of t between the devices of i and j
    w_tj        whether j stands for all readers of t on its device: it is the first of them, and i
                is elsewhere

    (p1) if z_ij: the transfer starts when its source has ended, and its target starts m later
    (p2) readers of t on one device have the same transfer: A_tj = A_tk if not z_jk
    (p3) link l is occupied from A_tj on for n ticks, if w_tj, the sender is on one of its sources
         and the receiver on one of its targets; these times do not overlap
    (p4) if every device has one port out, all transfers from an operator's device wait for each
         other, wherever that is: those that its own device sends for it do not overlap; the same
         of ports in

(p3) covers links whose pairs are all of some sources with all of some targets. Every link of a
tree is one of these; others are left out, which relaxes the model. (p4) follows from (p3), but the
engine sees it before devices are known. In a phase that is read from its end, A_tj is the end of
the transfer, and a link is occupied up to A_tj + m.

Source: this project's.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.solvers.netsplit.bounds import least_transfers
from planner.solvers.netsplit.cpsat_model import (
    CpSatPhase,
    Items,
    add_pair,
    interval,
    keep_apart,
    wait,
)
from planner.solvers.netsplit.jobs import OPERATOR
from planner.solvers.netsplit.model import NetSplitInstance
from planner.solvers.placement.links import SharedLink
from planner.solvers.placement.problem import ConsumedTensor

OUT, IN = 0, 1
"""The ends of a transfer: where it is sent, and where it is received."""


@dataclass(frozen=True, slots=True)
class _Ports:
    """The links of a problem.

    Attributes:
        sides: sources and targets by link, of links that (p3) covers.
        every: by end, a link of each device over which all its transfers go; empty if a device has
            none.
    """

    sides: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    every: tuple[tuple[int, ...], tuple[int, ...]]


def _ports_of(instance: NetSplitInstance) -> _Ports:
    """The links that (p3) and (p4) cover."""
    everyone = tuple(range(instance.problem.num_devices))
    sides = {k: ends for k, link in enumerate(instance.problem.shared) if (ends := _sides(link))}

    def ports(end: int) -> tuple[int, ...]:
        over = [
            [k for k, at in sides.items() if p in at[end] and at[1 - end] == everyone]
            for p in everyone
        ]
        return tuple(one[0] for one in over) if all(over) else ()

    return _Ports(sides, (ports(OUT), ports(IN)))


def _sides(link: SharedLink) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sources and targets of a link; None if its pairs are not all of these."""
    sources, targets = ({pair[end] for pair in link.pairs} for end in (OUT, IN))
    # No device sends to itself, so the only target of a link may count as one of its sources, too:
    # then the port of a device is one of all devices.
    if len(targets) == 1:
        sources |= targets
    elif len(sources) == 1:
        targets |= sources
    if {(p, q) for p in sources for q in targets if p != q} != set(link.pairs):
        return None
    return tuple(sorted(sources)), tuple(sorted(targets))


@dataclass(slots=True)
class _Added:
    """The transfers of a phase while they are added to a model.

    Attributes:
        items: intervals by what they occupy: (l,) of (p3), or (end, operator) of (p4).
        both: the conjunctions that the model has, by their literals.
    """

    phase: CpSatPhase
    ports: _Ports
    items: Items = field(default_factory=lambda: defaultdict(list))
    both: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def apart(self, i: int, j: int) -> Any:
        """z_ij, also of operators without an edge between them."""
        group_of = self.phase.model.instance.group_of
        g, h = sorted((group_of[i], group_of[j]))
        add_pair(self.phase.model, g, h)
        return self.phase.model.z[g, h]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor that is sent.

    Attributes:
        least: m; busy: n by link.
    """

    tensor: ConsumedTensor
    least: int
    busy: dict[int, int]


def add_ports(phase: CpSatPhase) -> None:
    """(p1) to (p4) of a phase."""
    instance = phase.model.instance
    ports = _ports_of(instance)
    if not ports.sides:
        return
    added = _Added(phase, ports)
    for tensor, least in zip(instance.problem.tensors, least_transfers(instance), strict=True):
        if tensor.gradient or not phase.backward:
            busy = {k: _busy_ticks(instance, tensor, k, least) for k in ports.sides}
            _add_transfers(added, _Sent(tensor, least, busy))
    keep_apart(phase, added.items)


def _busy_ticks(instance: NetSplitInstance, tensor: ConsumedTensor, k: int, least: int) -> int:
    """n: ticks for which a tensor's transfer occupies link k."""
    link = instance.problem.shared[k]
    if link.exclusive:
        return least
    return min(least, round(tensor.bytes * link.seconds_per_byte / instance.tick_s))


def _add_transfers(added: _Added, sent: _Sent) -> None:
    """The transfers of a tensor, or of its gradient."""
    phase, i = added.phase, sent.tensor.producer
    group, cp, starts = phase.model.instance.group_of, phase.model.cp, dict[int, Any]()
    for j in sent.tensor.consumers:
        if group[j] == group[i]:
            continue
        z, start = added.apart(i, j), cp.new_int_var(0, phase.most, "")
        first, then = (i, j) if phase.backward == phase.mirrored else (j, i)
        cp.add(start >= phase.done(first)).only_enforce_if(z)  # (p1)
        wait(phase, start + sent.least, (OPERATOR, then), z)
        stands = [z]
        for k, other in starts.items():  # (p2)
            if group[k] == group[j]:
                cp.add(start == other)
                stands.clear()
                break
            cp.add(start == other).only_enforce_if(~added.apart(j, k))
            stands.append(added.apart(j, k))
        starts[j] = start
        if stands:
            _occupy(added, sent, j, start, _all_of(added, stands))


def _occupy(added: _Added, sent: _Sent, j: int, start: Any, stands: Any) -> None:
    """(p3) and (p4) of a transfer.

    Args:
        start: A_tj; stands: w_tj.
    """
    phase, ports, i = added.phase, added.ports, sent.tensor.producer
    sender, receiver = (j, i) if phase.backward else (i, j)

    def occupied(busy: int, literal: Any) -> Any:
        begin = start + (sent.least - busy) if phase.mirrored else start
        return interval(phase, begin, busy, literal)

    for k, (sources, targets) in ports.sides.items():
        ends = (_on_one(added, sender, sources), _on_one(added, receiver, targets))
        where = [stands, *(one for one in ends if one is not None)]
        if sent.busy[k]:
            added.items[k,].append(occupied(sent.busy[k], _all_of(added, where)))
    for end, operator in ((OUT, sender), (IN, receiver)):
        busy = min((sent.busy[k] for k in ports.every[end]), default=0)
        # On the maker's port, readers on one device have one transfer, which counts once: for the
        # reader that stands for them. The list of a reader's port holds what this reader alone
        # waits for, so a message counts there whichever reader stands for it.
        literal = stands if operator == i else added.apart(i, j)
        if busy:
            added.items[end, operator].append(occupied(busy, literal))


def _on_one(added: _Added, i: int, devices: Sequence[int]) -> Any:
    """Whether an operator is on one of some devices; None if these are all."""
    model = added.phase.model
    if len(devices) == model.instance.problem.num_devices:
        return None
    return ~_all_of(added, [~model.on(i, p) for p in devices])


def _all_of(added: _Added, literals: Sequence[Any]) -> Any:
    """Whether all of some literals hold."""
    if len(literals) == 1:
        return literals[0]
    key, cp = tuple(sorted(one.index for one in literals)), added.phase.model.cp
    if key not in added.both:
        whole = added.both[key] = cp.new_bool_var("")
        cp.add_bool_or(*(~one for one in literals), whole)
        for one in literals:
            cp.add_implication(whole, one)
    return added.both[key]
