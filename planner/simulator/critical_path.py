"""The critical path of an iteration: a chain of actions from its start to its end, each of which
began the moment that the one before it ended, for a reason. To shorten the iteration is to shorten
one of them.

The search begins at the end. The last thing that an action waited for ended when the action began:

    a computation     the action before it on its device, the transfer of something that it needs,
                      or that of a result of the second computation before it of its kind
    an all-reduce     the all-reduce before it on a member, or what made the member's gradients: the
                      computation that was at its cut, or the action before the all-reduce
    a step, a post    the action before it on its device, or the all-reduce before it
    a transfer        the last action of its sender before the send, the last action of its receiver
                      before the receive, the transfer before it of the same pair of devices, or one
                      that had an exclusive link

Of several that ended at that moment, the first of these is taken. A computation that an all-reduce
waited for counts up to its cut. Waits of no length do not show.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.artefacts.topology import Topology
from planner.schedules.actions import Action, ActionKind, decode
from planner.schedules.dependencies import dependencies
from planner.schedules.tasks import Dependencies
from planner.simulator.network import Network, exclusive_links, network
from planner.simulator.timeline import Times, occupied, transfers
from planner.support.arrays import Bools, Ints


class Reason(StrEnum):
    """Why an action did not begin before the one before it on the path had ended."""

    START = "start"
    DEVICE = "device busy"
    DATA = "data"
    RECEIVER = "receiver busy"
    LINK = "link busy"
    SENDING = "still sending"
    MEMBERS = "members of the sum"


@dataclass(frozen=True, slots=True)
class PathStep:
    """An action on the critical path.

    Attributes:
        action: a computation, all-reduce or step; a receive stands for its transfer, or, like a
            send, for its posting where that took time.
        device: the one that it ran on; of a transfer, the target.
        transfer: whether it is one.
        reason: why it did not begin before.
        start_s: the end of the one before it, to the last bit; 0 of the first.
        end_s: of the last one, the end of the iteration; of a computation that an all-reduce waited
            for, when the gradients were there.
    """

    action: Action
    device: int
    transfer: bool
    reason: Reason
    start_s: float
    end_s: float


# An action that occupies its device, or the transfer of a receive.
_Node = tuple[int, bool]


def critical_path(times: Times, topology: Topology) -> tuple[PathStep, ...]:
    """The critical path, from the start of the iteration to its end.

    Args:
        times: simulated ones, with every action at the moment that it could begin at.
        topology: that they were simulated on.

    Raises:
        ValueError: if an action began when nothing had ended.
    """
    predecessors = _Predecessors(times, topology)
    node, path = predecessors.last(), []
    while node is not None:
        before, reason = predecessors.before(node)
        path.append((node, reason))
        node = before
    path.reverse()
    actions = decode(times.code, [i for (i, _), _ in path])
    owner = times.code.owner()
    starts_s = [predecessors.start_s(*node) for node, _ in path]
    return tuple(
        PathStep(action, int(times.code.devices[owner[i]]), moving, reason, start_s, end_s)
        for action, ((i, moving), reason), start_s, end_s in zip(
            actions, path, starts_s, [*starts_s[1:], times.iteration_s], strict=True
        )
    )


class _Predecessors:
    """When everything ended, by the order of the ends.

    Ends and starts are compared for equality of floats, without a tolerance. That is safe because
    the event loop copies the end of the one into the start of the other, and computes nothing in
    between.
    """

    def __init__(self, times: Times, topology: Topology) -> None:
        self.times, self.code = times, times.code
        self.known: Dependencies = dependencies(times.code)
        code, known = self.code, self.known
        sources, targets = code.devices[known.source], code.devices[known.target]
        self.network: Network = network(topology, sources, targets)
        self.exclusive = exclusive_links(topology)
        self.begins, self.ends = occupied(times)
        moving = transfers(code)
        occupying, sums = ~moving | (self.ends > self.begins), code.kind == ActionKind.ALL_REDUCE
        # Per action, the last one before it on its device that took time, the last one of these
        # that was no all-reduce, and the last all-reduce; -1 without one.
        self.earlier = _latest_before(code.start, occupying)
        self.earlier_own = _latest_before(code.start, occupying & ~sums)
        self.earlier_sum = _latest_before(code.start, sums)
        # Per all-reduce, the computation in which its gradients got there.
        self.made_in = dict(zip(times.cut_of.tolist(), times.cut_at.tolist(), strict=True))
        # Per receive, its transfer: an index into `send` and `receive` of the dependencies.
        self.transfer_of = {i: t for t, i in enumerate(known.receive.tolist())}
        by_end = known.receive[np.argsort(times.end_s[known.receive], kind="stable")]
        self.by_end: list[int] = by_end.tolist()
        self.ends_s: list[float] = times.end_s[by_end].tolist()
        self.visited: set[_Node] = set()

    def start_s(self, i: int, transfer: bool) -> float:
        return float(self.times.start_s[i] if transfer else self.begins[i])

    def end_s(self, i: int, transfer: bool) -> float:
        return float(self.times.end_s[i] if transfer else self.ends[i])

    def last(self) -> _Node | None:
        """What ended last: an action of a device before a transfer."""
        if not len(self.code):
            return None
        occupying = ~transfers(self.code) | (self.ends > self.begins)
        own = np.where(occupying, self.ends, -1.0)
        # A transfer may end later than all devices have finished, if nothing waits for it.
        if own.max() == self.times.iteration_s:
            return int(own.argmax()), False
        return self.by_end[-1], True

    def before(self, node: _Node) -> tuple[_Node | None, Reason]:
        """What an action waited for, and why; nothing at the start of the iteration."""
        # Actions of no length may wait for each other in a circle at one moment. No node is on the
        # path twice, so the walk ends.
        self.visited.add(node)
        start = self.start_s(*node)
        if start == 0.0:
            return None, Reason.START
        for candidate, reason, end_s in self._candidates(*node):
            if end_s == start and candidate not in self.visited:
                return candidate, reason
        raise ValueError(f"an action began at {start} s, when nothing had ended")

    def _candidates(self, i: int, transfer: bool) -> Iterator[tuple[_Node, Reason, float]]:
        if transfer:
            before = self._before_transfer(i)
        elif self.code.kind[i] == ActionKind.ALL_REDUCE:
            yield from self._before_sum(i)
            return
        else:
            before = self._before_action(i)
        yield from ((node, reason, self.end_s(*node)) for node, reason in before)

    def _before_action(self, i: int) -> Iterator[tuple[_Node, Reason]]:
        for node in self._of_device(i):
            yield node, Reason.DEVICE
        if self.code.kind[i] == ActionKind.COMPUTE:
            yield from self._arrivals(i)

    def _of_device(self, i: int) -> Iterator[_Node]:
        """What the device of an action may have ended last before it comes to it."""
        for before in dict.fromkeys((int(self.earlier[i]), int(self.earlier_own[i]))):
            if before >= 0:
                yield before, False

    def _before_sum(self, i: int) -> Iterator[tuple[_Node, Reason, float]]:
        """What the members of an all-reduce may have ended last, the device's own first."""
        members = (self.code.kind == ActionKind.ALL_REDUCE) & (
            self.code.piece == self.code.piece[i]
        )
        for member in (i, *np.flatnonzero(members).tolist()):
            own = member == i
            if self.earlier_sum[member] >= 0:
                node = int(self.earlier_sum[member]), False
                yield node, Reason.DEVICE if own else Reason.MEMBERS, self.end_s(*node)
            if member in self.made_in:
                node, there_s = (self.made_in[member], False), float(self.times.post_s[member])
                yield node, Reason.DATA if own else Reason.MEMBERS, there_s
                continue
            for node in self._of_device(member):
                yield node, Reason.DEVICE if own else Reason.MEMBERS, self.end_s(*node)

    def _arrivals(self, i: int) -> Iterator[tuple[_Node, Reason]]:
        """The transfers that a computation waits for."""
        # A computation, the receives that it needs and the sends that it waits for have the number
        # of one counter in common.
        counter = self.known.counter
        ending = self._ending_at(float(self.begins[i]))
        for receive in ending:
            if counter[receive] == counter[i]:
                yield (receive, True), Reason.DATA
        for receive in ending:
            if counter[self._send(receive)] == counter[i]:
                yield (receive, True), Reason.SENDING

    def _send(self, receive: int) -> int:
        """The send that a receive meets."""
        return int(self.known.send[self.transfer_of[receive]])

    def _before_transfer(self, receive: int) -> Iterator[tuple[_Node, Reason]]:
        for post, reason in (
            (self._send(receive), Reason.DATA),
            (receive, Reason.RECEIVER),
        ):
            if self.ends[post] > self.begins[post]:
                yield (post, False), reason
            else:
                yield from ((node, reason) for node in self._of_device(post))
        # Transfers of a pair are numbered one after the other, in the order in which they run.
        pair, transfer = int(self.known.pair[receive]), self.transfer_of[receive]
        if transfer > self.known.first[pair]:
            yield (int(self.known.receive[transfer - 1]), True), Reason.LINK
        mine = self._exclusive(pair)
        together = self._ending_at(float(self.times.start_s[receive])) if mine else []
        others = [r for r in together if mine & self._exclusive(int(self.known.pair[r]))]
        # One that took time goes first: of those without length, any may have gone before.
        for other in sorted(others, key=lambda r: self.times.start_s[r] == self.times.end_s[r]):
            yield (other, True), Reason.LINK

    def _ending_at(self, moment: float) -> list[int]:
        """The receives whose transfers ended at a moment."""
        first = bisect_left(self.ends_s, moment)
        ending = []
        while first < len(self.ends_s) and self.ends_s[first] == moment:
            ending.append(self.by_end[first])
            first += 1
        return ending

    def _exclusive(self, pair: int) -> set[int]:
        links = self.network.links[self.network.bounds[pair] : self.network.bounds[pair + 1]]
        return set(links[self.exclusive[links]].tolist())


def _latest_before(start: Ints, occupying: Bools) -> Ints:
    """(n,) per action, the last occupying one before it in its list; -1 without one."""
    count = len(occupying)
    # Over all lists at once: a maximum that comes from before the list's own start is none.
    latest = np.maximum.accumulate(np.where(occupying, np.arange(count), -1))
    before = np.concatenate([[-1], latest[:-1]])
    begin = np.repeat(start[:-1], np.diff(start))
    return np.where(before >= begin, before, -1)
