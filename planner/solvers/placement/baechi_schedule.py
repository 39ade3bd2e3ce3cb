"""The event-driven list scheduling that m-ETF and m-SCT share: forwards in the order of time, on
devices with one channel each, within their memory.

Baechi places the forward operators, and every backward runs where its forward does. Backwards begin
when all forwards are placed. Legend: operators i, j; devices p, q.

    (1) i is ready when all operators that feed it have ended                     `_finish`
    (2) a device runs one operator at a time                                      `start_s`
    (3) data from q are on p when their transfer has ended; it occupies the
        channel of q from the end of the operator on, and the channel of p from
        then on; every device has one channel, for one transfer at a time; a
        device receives each tensor once                                          `_bring`
    (4) an operator that starts takes its state, its output and its temporary
        memory from its device; the temporary memory is freed when it ends, an
        output that autograd does not stash when its last reader ends             `take`, `_finish`

A dispatch rule chooses the next operator of an idle device. If several devices could start one at
the same time, the first operator in topological order starts, ties to the first device; then the
rule is asked again.

The state of an operator is its parameters, gradients, moments, and its stash besides tensors. The
first reader of a shared parameter holds it, as a framework's variable is an operator. Copies of
received tensors are not counted, so a placement may still be too large: the evaluator checks it.

Source: Jeon et al., SoCC 2020, sections 3 and 4, and its code's virtual scheduler.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from planner.artefacts.problem import Problem
from planner.costs.stage_memory import limit_bytes
from planner.solvers.placement.problem import PlacementProblem, feeds_of, transfer_s
from planner.support.units import format_bytes


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why an algorithm has no placement: an operator that fits no device.

    Attributes:
        operator: the first such operator.
        placed: the number of operators placed before.
        needs_bytes: its memory without the reserve.
    """

    operator: int
    placed: int
    needs_bytes: int

    def reason(self, problem: Problem) -> str:
        """The sentence for the user."""
        operators, reserve = problem.profile.operators, problem.training.reserve
        name, devices = operators[self.operator].name, range(len(problem.topology.devices))
        limit = max(limit_bytes(problem, devices, d) for d in devices)
        return (
            f"after {self.placed} of {len(operators)} operators no device has room for {name},"
            f" which takes {format_bytes(self.needs_bytes)}; the limit is {format_bytes(limit)}"
            f" (reserve {format_bytes(reserve)})"
        )


@dataclass(frozen=True, slots=True)
class OperatorMemory:
    """The memory that an operator takes from its device, in bytes.

    Attributes:
        state: parameters with gradients and moments, and the stash besides tensors.
        output: all tensors that it makes.
        temporary: workspace while it runs.
    """

    state: int
    output: int
    temporary: int

    @property
    def bytes(self) -> int:
        """The sum."""
        return self.state + self.output + self.temporary


def operator_memory_of(problem: PlacementProblem) -> tuple[OperatorMemory, ...]:
    """The memory of each operator."""
    trained = problem.trainable_bytes.tolist()
    state = (problem.parameter_bytes + problem.private_bytes).tolist()
    output = problem.result_bytes.tolist()
    for shared in problem.shared_parameters:
        first = shared.operators[0]
        state[first] += shared.bytes
        trained[first] += shared.bytes if shared.trainable else 0
    for tensor in problem.tensors:
        output[tensor.producer] += tensor.bytes
    moments = problem.moments
    return tuple(
        OperatorMemory(kept + (1 + moments) * own, made, temporary)
        for kept, own, made, temporary in zip(
            state, trained, output, problem.workspace_bytes.tolist(), strict=True
        )
    )


@dataclass(frozen=True, slots=True)
class ChannelTransfer:
    """The transfer of a tensor from a device's channel to another one's.

    Attributes:
        tensor: index into `PlacementProblem.tensors`.
        source: device that sends, from send_s on; target: device that receives, from receive_s on.
        duration_s: how long it occupies either channel.
    """

    tensor: int
    source: int
    target: int
    send_s: float
    receive_s: float
    duration_s: float


class ListSchedule:
    """A schedule while it is made.

    Attributes:
        now_s: the time.
        device_of: device of each operator that has started, else -1.
        start: when it started; end: when it ends; in s.
        last: the operator that each device ran last, -1 for none.
        ready: operators that may start now, ascending.
        transfers: all transfers so far.
        used_bytes: per device, at this time.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        size, devices = problem.num_operators, problem.num_devices
        self.problem, self.needs = problem, operator_memory_of(problem)
        self.now_s = 0.0
        self.device_of, self.last = [-1] * size, [-1] * devices
        self.start, self.end = [0.0] * size, [0.0] * size
        self.transfers: list[ChannelTransfer] = []
        self.used_bytes = [0] * devices
        self._free_s, self._channel_s = [0.0] * devices, [0.0] * devices
        self._there: dict[tuple[int, int], float] = {}
        self._known: dict[tuple[int, int], float] = {}
        self._running: list[tuple[float, int]] = []
        self._read_by: list[list[int]] = [[] for _ in range(size)]
        self._inputs: list[list[int]] = [[] for _ in range(size)]
        for t, tensor in enumerate(problem.tensors):
            for j in tensor.consumers:
                self._inputs[j].append(t)
        self._left = [len(tensor.consumers) for tensor in problem.tensors]
        feeds = feeds_of(problem)
        for j, before in enumerate(feeds):
            for i in before:
                self._read_by[i].append(j)
        self._waits_for = [len(before) for before in feeds]
        self.ready = [i for i, count in enumerate(self._waits_for) if count == 0]

    @property
    def order(self) -> tuple[int, ...]:
        """The operators as they start."""
        return tuple(sorted(range(len(self.start)), key=lambda i: (self.start[i], i)))

    def idle(self) -> Iterator[int]:
        """The devices that run nothing now."""
        return (p for p, free_s in enumerate(self._free_s) if free_s <= self.now_s)

    def fits(self, i: int, p: int) -> bool:
        """Whether a device has room for an operator now."""
        left = int(self.problem.capacity_bytes[p]) - self.used_bytes[p]
        return self.needs[i].bytes <= left

    def start_s(self, i: int, p: int) -> float:
        """When a ready operator could start on a device: not before now, the device is free and
        its data are there.
        """
        return max(self.now_s, self._free_s[p], self.data_s(i, p))

    def data_s(self, i: int, p: int) -> float:
        """When the data of a ready operator could be on a device. Known until the next transfer,
        which changes the channels.
        """
        if (i, p) not in self._known:
            self._known[i, p] = self._bring(i, p, list(self._channel_s), [])
        return self._known[i, p]

    def starts_s(self, i: int) -> dict[int, float]:
        """When a ready operator could start, by the devices that have room for it."""
        return {p: self.start_s(i, p) for p in range(len(self.last)) if self.fits(i, p)}

    def _bring(self, i: int, p: int, channel_s: list[float], sent: list[ChannelTransfer]) -> float:
        """When all data of an operator are on a device.

        Args:
            channel_s: when each channel is free; the new transfers are added.
            sent: the new transfers are appended.
        """
        there_s = 0.0
        for t in self._inputs[i]:
            tensor = self.problem.tensors[t]
            q, made_s = self.device_of[tensor.producer], self.end[tensor.producer]
            if q == p:
                there_s = max(there_s, made_s)
                continue
            if (t, p) not in self._there:
                # (3): the receiver may be busy after the sender is free; each is occupied for the
                # whole duration, from its own start on.
                duration_s = transfer_s(self.problem, tensor.bytes, q, p)
                send_s = max(made_s, channel_s[q])
                receive_s = max(send_s, channel_s[p])
                channel_s[q], channel_s[p] = send_s + duration_s, receive_s + duration_s
                sent.append(ChannelTransfer(t, q, p, send_s, receive_s, duration_s))
                there_s = max(there_s, receive_s + duration_s)
            else:
                there_s = max(there_s, self._there[t, p])
        return there_s

    def take(self, i: int, p: int) -> None:
        """Starts an operator on a device now."""
        sent: list[ChannelTransfer] = []
        self._bring(i, p, self._channel_s, sent)
        self.transfers += sent
        self._there.update(((s.tensor, p), s.receive_s + s.duration_s) for s in sent)
        if sent:
            self._known.clear()
        self.used_bytes[p] += self.needs[i].bytes
        self.device_of[i], self.last[p] = p, i
        self.start[i] = self.now_s
        self.end[i] = self._free_s[p] = self.now_s + float(self.problem.forward_s[i, p])
        self.ready.remove(i)
        heappush(self._running, (self.end[i], i))
        self._finish()

    def _finish(self) -> None:
        """Operators that have ended free memory and make their readers ready."""
        while self._running and self._running[0][0] <= self.now_s:
            _, i = heappop(self._running)
            self.used_bytes[self.device_of[i]] -= self.needs[i].temporary
            for t in self._inputs[i]:
                self._left[t] -= 1
                tensor = self.problem.tensors[t]
                if self._left[t] == 0 and not tensor.stashed:
                    self.used_bytes[self.device_of[tensor.producer]] -= tensor.bytes
            for j in self._read_by[i]:
                self._waits_for[j] -= 1
                if self._waits_for[j] == 0:
                    self.ready.append(j)
        self.ready.sort()

    def advance(self) -> bool:
        """Goes on to the next end of an operator or possible start; False if there is none."""
        later = [end_s for end_s, _ in self._running[:1]]
        for i in self.ready:
            # A start that is possible now is no event: the rule has seen it and declined.
            later += [s for s in self.starts_s(i).values() if s > self.now_s]
        if not later:
            return False
        self.now_s = min(later)
        self._finish()
        return True


DispatchRule = Callable[[ListSchedule, int], int | None]
"""The next operator of an idle device, ready, fitting and able to start now; None for none."""


def list_schedule(problem: PlacementProblem, rule: DispatchRule) -> ListSchedule | NoRoom:
    """The schedule of all forwards.

    Args:
        rule: chooses the next operator of an idle device.
    """
    schedule = ListSchedule(problem)
    while True:
        taken = [(i, p) for p in schedule.idle() if (i := rule(schedule, p)) is not None]
        # One at a time: its transfers and its memory change what the others could start.
        if taken:
            schedule.take(*min(taken))
        elif not schedule.advance():
            break
    if schedule.ready:
        i = schedule.ready[0]
        placed = sum(p >= 0 for p in schedule.device_of)
        return NoRoom(i, placed, schedule.needs[i].bytes)
    return schedule


def earliest(schedule: ListSchedule, p: int) -> int | None:
    """The first ready operator that could start on a device now."""
    for i in schedule.ready:
        if schedule.fits(i, p) and schedule.start_s(i, p) <= schedule.now_s:
            return i
    return None
