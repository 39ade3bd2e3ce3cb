"""The simulator, action by action in plain Python. `planner.simulator` must equal it to the last
bit, and the dry run must block exactly where it does.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heappop, heappush

from planner.artefacts.topology import Sharing, Topology
from planner.clusters.routes import latency_s, routes
from planner.costs.actions import ActionCosts
from planner.schedules.actions import (
    Action,
    AllReduce,
    Compute,
    Direction,
    Program,
    Receive,
    Send,
    Step,
)
from planner.simulator.timeline import Event, Timeline, Transfer

STREAM = -1

# A computation, or the one that a receive is for: whether forward, stage, microbatch.
_Key = tuple[bool, int, int]


def simulate(program: Program, costs: ActionCosts, topology: Topology) -> Timeline:
    """When every device does what, in one iteration.

    Args:
        program: its devices are indices into the topology.
        costs: of everything in the program.

    Raises:
        ValueError: if the lists block each other.
    """
    simulation = _Simulation(program, costs, topology)
    if not simulation.run():
        raise ValueError("the schedule blocks")
    # A flow has steps that are equal; each device makes its own in their order.
    places = {d: defaultdict(deque) for d in program.lists}
    for device, actions in program.lists.items():
        for place, action in enumerate(actions):
            places[device][action].append(place)
    by_place = [(e.start_s, e.device, places[e.device][e.action].popleft(), e)
                for e in simulation.events]  # fmt: skip
    events = [e for *_, e in sorted(by_place, key=lambda one: one[:3])]
    ended = sorted(simulation.ended, key=lambda f: (f.start_s, f.source, f.target))
    last_s = max((one.end_s for many in (events, ended) for one in many), default=0.0)
    return Timeline(last_s, tuple(events), tuple(ended))


class _Pair:
    """An ordered pair of devices, with the sends and receives that were posted and not begun."""

    __slots__ = (
        "busy", "exclusive", "latency_s", "receives", "route", "sends", "source", "target",
    )  # fmt: skip

    def __init__(self, topology: Topology, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.route = routes(topology)[source, target]
        self.exclusive = [
            link for link in self.route if topology.links[link].sharing is Sharing.EXCLUSIVE
        ]
        self.latency_s = latency_s(topology, source, target)
        self.sends: deque[Send] = deque()
        self.receives: deque[Receive] = deque()
        self.busy = False


class _Transfer:
    """A transfer under way: `left` bytes from time `since_s` on, at `rate`; 0 in its latency."""

    __slots__ = ("end_s", "left", "pair", "rate", "receive", "send", "since_s", "start_s")

    def __init__(
        self, pair: _Pair, send: Send, receive: Receive, size_bytes: int, now_s: float
    ) -> None:
        self.pair, self.send, self.receive = pair, send, receive
        self.start_s = self.since_s = now_s
        self.left: float = size_bytes
        self.rate = 0.0
        self.end_s = now_s + pair.latency_s


class _Computation:
    """A computation in a group: `left` s of work from time `since_s` on, which take `slow` times as
    long; 0 until that is known.
    """

    __slots__ = ("action", "cut_s", "left", "since_s", "slow", "start_s")

    def __init__(self, action: Action, now_s: float, time_s: float) -> None:
        self.action, self.left = action, time_s
        self.start_s = self.since_s = now_s
        self.slow = 0.0
        self.cut_s = 0.0  # the cut that it has passed last


class _Stream:
    """The all-reduces of a device, one after the other beside its actions."""

    __slots__ = ("ready", "running", "sums")

    def __init__(self, actions: Sequence[Action]) -> None:
        self.sums = deque(a.sum for a in actions if isinstance(a, AllReduce))
        self.ready: set[int] = set()  # those whose gradients are there
        self.running = False


class _Simulation:
    """The state between two events; a device stands at the action that it runs or waits for."""

    def __init__(self, program: Program, costs: ActionCosts, topology: Topology) -> None:
        self.program, self.costs, self.topology = program, costs, topology
        self.now_s = 0.0
        self.events: list[Event] = []
        self.ended: list[Transfer] = []
        self.links = Links([link.bandwidth_bytes_per_s for link in topology.links])
        self.position = dict.fromkeys(program.lists, 0)
        self.missing: dict[int, dict[_Key, int]] = {device: {} for device in program.lists}
        self.waits_for: dict[int, _Key | None] = dict.fromkeys(program.lists)
        waiting = _waiting(program)
        self.held = {device: held(actions, waiting) for device, actions in program.lists.items()}
        self.members: dict[int, list[int]] = {}
        self.streams = {device: _Stream(actions) for device, actions in program.lists.items()}
        # Per device and position of a computation, its cuts to come: (s from its start, sum).
        self.cuts = {
            d: cuts(d, actions, self._time_s, costs) for d, actions in program.lists.items()
        }
        self.pairs: dict[tuple[int, int], _Pair] = {}
        # Per exclusive link, the transfers that hold it or wait for it; transfers that got ready
        # at this moment, and those that ended at it.
        self.queues: dict[int, deque[_Transfer]] = {}
        self.fresh: list[_Transfer] = []
        self.freed: list[_Transfer] = []
        self.transfers: dict[int, _Transfer] = {}
        # (time in s, device, order, transfer); no transfer where the device ends its action, or is
        # at a cut, and -1 where its stream ends an all-reduce.
        self.queue: list[tuple[float, int, int, int | None]] = []
        self.order = 0
        # The group of a device; the computations of each group, by device; groups that changed.
        self.groups = {d: n for n, group in enumerate(costs.contention) for d in group.devices}
        self.computing: list[dict[int, _Computation]] = [{} for _ in costs.contention]
        self.stirred: set[int] = set()
        # By device, the number of its event to come.
        self.due: dict[int, int] = {}

    def run(self) -> bool:
        """Runs to the end; whether it is one in which nothing is left over."""
        for device in self.program.lists:
            self._advance(device)
        while self.queue or self.stirred or self.links.stale or self.fresh or self.freed:
            over = not self.queue or self.queue[0][0] > self.now_s
            if self.stirred and over:
                self._pace()
                continue
            if self.links.stale and over:
                self._share()
                continue
            if over and (self.fresh or self.freed):
                self._admit()
                continue
            time_s, device, order, number = heappop(self.queue)
            if number is None:
                if self.due[device] != order:
                    continue  # foreseen at a speed that has changed since
                self.now_s = time_s
                if self._pass_cut(device):
                    continue
                self._leave_group(device)
                action = self.program.lists[device][self.position[device]]
                if isinstance(action, Send | Receive):
                    self._post(device, action)
                self.position[device] += 1
                self._advance(device)
            elif number == STREAM:
                self.now_s = time_s
                self._end_sum(device)
            # Else foreseen at a rate that has changed since.
            elif number in self.transfers and self.transfers[number].end_s == time_s:
                self.now_s = time_s
                self._proceed(number, self.transfers[number])
        ended = all(self.position[d] == len(one) for d, one in self.program.lists.items())
        return ended and not any(pair.sends or pair.receives for pair in self.pairs.values())

    def _foresee(self, time_s: float, device: int, number: int | None) -> None:
        self.order += 1
        if number is None:
            self.due[device] = self.order
        heappush(self.queue, (time_s, device, self.order, number))

    def _advance(self, device: int) -> None:
        """Takes a device to its next action that needs time; begins it if nothing is missing."""
        actions, position = self.program.lists[device], self.position[device]
        while position < len(actions) and type(actions[position]) in (Send, Receive):
            post_s = self._post_s(device, actions[position])
            if post_s > 0:
                self.position[device] = position
                self._occupy(device, actions[position], post_s)
                return
            self._post(device, actions[position])
            position += 1
        self.position[device] = position
        if position == len(actions):
            return
        match actions[position]:
            case Compute() as compute:
                self._compute(device, compute)
            case AllReduce(index):
                if index in self.streams[device].sums:
                    self._there(device, index)
                else:
                    self.position[device] += 1
                    self._advance(device)
            case Step() as action:
                self._occupy(device, action, self._time_s(device, action))

    def _there(self, device: int, index: int) -> None:
        """The gradients of an all-reduce are there."""
        self.streams[device].ready.add(index)
        self._enter(device)

    def _enter(self, device: int) -> None:
        """Enters the next all-reduce of a device if its gradients are there; the last member begins
        it for all.
        """
        stream = self.streams[device]
        if stream.running or not stream.sums or stream.sums[0] not in stream.ready:
            return
        stream.running = True
        index = stream.sums[0]
        members = self.members.setdefault(index, [])
        members.append(device)
        if len(members) == len(self.program.sums[index].devices):
            for member in members:
                end_s = self.now_s + self._time_s(member, AllReduce(index))
                self.events.append(Event(member, AllReduce(index), self.now_s, end_s))
                self._foresee(end_s, member, STREAM)

    def _end_sum(self, device: int) -> None:
        stream, position = self.streams[device], self.position[device]
        index = stream.sums.popleft()
        stream.running = False
        self._enter(device)
        actions = self.program.lists[device]
        if position < len(actions) and actions[position] == AllReduce(index):
            self._advance(device)

    def _time_s(self, device: int, action: Action) -> float:
        """For how long an action that is not a transfer runs, if no other device computes."""
        match action:
            case Compute(direction, stage):
                forward = direction is Direction.FORWARD
                time_s = self.costs.forward_s if forward else self.costs.backward_s
                first = next(a for a in self.program.lists[device] if isinstance(a, Compute))
                head_s = self.costs.head_s.get(device, 0.0) if action == first else 0.0
                return time_s[stage, device] + head_s
            case AllReduce(index):
                # In a flow every all-reduce comes again in each round.
                return self.costs.sum_s[index % len(self.costs.sum_s)]
            case _:
                return self.costs.step_s[device]

    def _compute(self, device: int, action: Compute) -> None:
        forward = action.direction is Direction.FORWARD
        key = forward, action.stage, action.microbatch
        if self.missing[device].get(key):
            self.waits_for[device] = key
        else:
            self._occupy(device, action, self._time_s(device, action))

    def _occupy(self, device: int, action: Action, time_s: float) -> None:
        ahead = self.cuts[device].get(self.position[device])
        first_s = ahead[0][0] if ahead else time_s
        if device in self.groups and isinstance(action, Compute | Step):
            group = self.groups[device]
            self.computing[group][device] = _Computation(action, self.now_s, first_s)
            self.stirred.add(group)
            return
        self.events.append(Event(device, action, self.now_s, self.now_s + time_s))
        self._foresee(self.now_s + first_s, device, None)

    def _pass_cut(self, device: int) -> bool:
        """Goes on with a computation that is at a cut; False if it is at none."""
        ahead = self.cuts[device].get(self.position[device])
        if not ahead:
            return False
        passed_s, index = ahead.popleft()
        action = self.program.lists[device][self.position[device]]
        next_s = ahead[0][0] if ahead else self._time_s(device, action)
        group = self.groups.get(device)
        if group is None:
            start_s = next(e.start_s for e in reversed(self.events) if e.action == action)
            self._foresee(start_s + next_s, device, None)
        else:
            one = self.computing[group][device]
            one.left, one.since_s = next_s - passed_s, self.now_s
            self._foresee(self.now_s + one.left * one.slow, device, None)
        self._there(device, index)
        return True

    def _pace(self) -> None:
        """At the end of a moment: foresees the computations of the groups that changed."""
        for group in self.stirred:
            slow = self.costs.contention[group].slowdown[len(self.computing[group])]
            for device, one in self.computing[group].items():
                if slow != one.slow:
                    if one.slow:
                        one.left = max(one.left - (self.now_s - one.since_s) / one.slow, 0.0)
                    one.since_s, one.slow = self.now_s, slow
                    self._foresee(self.now_s + one.left * slow, device, None)
        self.stirred.clear()

    def _leave_group(self, device: int) -> None:
        """Notes the end of the computation of a device in a group, if it runs one."""
        group = self.groups.get(device)
        if group is not None and device in self.computing[group]:
            one = self.computing[group].pop(device)
            self.stirred.add(group)
            self.events.append(Event(device, one.action, one.start_s, self.now_s))

    def _post_s(self, device: int, action: Send | Receive) -> float:
        each_s = self.costs.post_s.get(device, 0.0)
        per_byte_s = self.costs.copy_s_per_byte.get(device, 0.0)
        return each_s + per_byte_s * self.costs.tensor_bytes[action.tensor]

    def _post(self, device: int, action: Action) -> None:
        if isinstance(action, Send):
            pair = self._pair(device, action.device)
            pair.sends.append(action)
            self._miss(device, self.held[device].get(_key(action)))
        elif isinstance(action, Receive):
            pair = self._pair(action.device, device)
            pair.receives.append(action)
            self._miss(device, _key(action))
        self._match(pair)

    def _miss(self, device: int, key: _Key | None) -> None:
        if key is not None:
            self.missing[device][key] = self.missing[device].get(key, 0) + 1

    def _come(self, device: int, key: _Key | None) -> None:
        if key is not None:
            self.missing[device][key] -= 1
            if not self.missing[device][key] and self.waits_for[device] == key:
                self.waits_for[device] = None
                self._advance(device)

    def _pair(self, source: int, target: int) -> _Pair:
        pair = self.pairs.get((source, target))
        if pair is None:
            pair = self.pairs[source, target] = _Pair(self.topology, source, target)
        return pair

    def _match(self, pair: _Pair) -> None:
        """The next transfer of a pair, if both ends have posted it and none is under way."""
        if pair.busy or not pair.sends or not pair.receives:
            return
        send, receive = pair.sends.popleft(), pair.receives.popleft()
        if (send.tensor, send.box, send.microbatch, send.direction) != (
            receive.tensor, receive.box, receive.microbatch, receive.direction
        ):  # fmt: skip
            raise ValueError("the schedule blocks")
        pair.busy = True
        transfer = _Transfer(pair, send, receive, self.costs.tensor_bytes[send.tensor], self.now_s)
        if pair.exclusive:
            self.fresh.append(transfer)
        else:
            self._begin(transfer)

    def _begin(self, transfer: _Transfer) -> None:
        transfer.start_s = transfer.since_s = self.now_s
        transfer.end_s = self.now_s + transfer.pair.latency_s
        number = self.order
        self.transfers[number] = transfer
        self._foresee(transfer.end_s, transfer.pair.source, number)

    def _admit(self) -> None:
        """At the end of a moment: queues the transfers that got ready, and begins those that are
        the first in all of their queues.
        """
        self.fresh.sort(key=lambda one: (one.pair.source, one.pair.target))
        for transfer in self.fresh:
            for link in transfer.pair.exclusive:
                self.queues.setdefault(link, deque()).append(transfer)
        queues = [self.queues[link] for one in self.freed for link in one.pair.exclusive]
        for transfer in (*(queue[0] for queue in queues if queue), *self.fresh):
            first = all(self.queues[link][0] is transfer for link in transfer.pair.exclusive)
            if first and transfer not in self.transfers.values():
                self._begin(transfer)
        self.fresh, self.freed = [], []

    def _proceed(self, number: int, transfer: _Transfer) -> None:
        """The end of a transfer's latency, or its own."""
        pair = transfer.pair
        if transfer.rate == 0:
            self.links.add(number, pair.route)
            return
        self.links.remove(number)
        for link in pair.exclusive:
            self.queues[link].popleft()
        self.freed += [transfer] if pair.exclusive else []
        del self.transfers[number]
        pair.busy = False
        self._match(pair)
        self._arrive(transfer)

    def _share(self) -> None:
        """Gives transfers their new rates and foresees their ends."""
        for number, rate in self.links.new_rates().items():
            transfer = self.transfers[number]
            if rate != transfer.rate:
                moved = transfer.rate * (self.now_s - transfer.since_s)
                transfer.left = max(transfer.left - moved, 0.0)
                transfer.since_s, transfer.rate = self.now_s, rate
                transfer.end_s = self.now_s + transfer.left / rate
                self._foresee(transfer.end_s, transfer.pair.target, number)

    def _arrive(self, transfer: _Transfer) -> None:
        """Hands a tensor to the computation that it is for, which may wait for it."""
        pair, receive = transfer.pair, transfer.receive
        self.ended.append(
            Transfer(
                pair.source, pair.target, receive.direction, receive.microbatch, receive.tensor,
                transfer.start_s, self.now_s, self.costs.tensor_bytes[receive.tensor],
            )
        )  # fmt: skip
        self._come(pair.target, _key(receive))
        self._come(pair.source, self.held[pair.source].get(_key(transfer.send)))


def _key(action: Compute | Send | Receive) -> _Key:
    return action.direction is Direction.FORWARD, action.stage, action.microbatch


def cuts(
    device: int,
    actions: Sequence[Action],
    time_s: Callable[[int, Action], float],
    costs: ActionCosts,
) -> dict[int, deque[tuple[float, int]]]:
    """Per position of a backward, when it has made all gradients of an all-reduce that comes before
    the next backward.
    """
    found: dict[int, list[tuple[float, int]]] = {}
    latest = None
    for position, action in enumerate(actions):
        if isinstance(action, Compute) and action.direction is Direction.BACKWARD:
            latest = position
        elif isinstance(action, AllReduce) and latest is not None:
            left_s = costs.backward_left_s.get((action.sum % len(costs.sum_s), device))
            if left_s is not None:
                there_s = max(time_s(device, actions[latest]) - left_s, 0.0)
                found.setdefault(latest, []).append((there_s, action.sum))
    # Sorted is stable: of equal times, the all-reduce that comes first.
    return {p: deque(sorted(some, key=lambda one: one[0])) for p, some in found.items()}


def _waiting(program: Program) -> Collection[bool]:
    """Of forwards (True) and backwards, those that wait for sends."""
    keys = [[_key(a) for a in one if isinstance(a, Compute)] for one in program.lists.values()]
    if any(len({stage for _, stage, _ in mine}) > 1 for mine in keys):
        return ()
    order = [[forward for forward, _, _ in mine] for mine in keys]
    return (False, True) if all(one == sorted(one, reverse=True) for one in order) else (False,)


def held(actions: Sequence[Action], waiting: Collection[bool]) -> dict[_Key, _Key]:
    """Per computation, the one that waits until its results have been sent: the second one after
    it of its stage and direction.
    """
    waits: dict[_Key, _Key] = {}
    before: dict[tuple[bool, int], list[_Key]] = {}
    for action in actions:
        if isinstance(action, Compute) and _key(action)[0] in waiting:
            alike = before.setdefault(_key(action)[:2], [])
            alike.append(_key(action))
            if len(alike) > 2:
                waits[alike[-3]] = alike[-1]
    return waits


def fair_rates(routes: Mapping[int, Sequence[int]], widths: Sequence[float]) -> dict[int, float]:
    """Max-min fair rates by progressive filling: the link with the smallest share per flow gives
    that share to all its flows, which then take it from their other links, and so on.

    Args:
        routes: per flow, the links that it takes, at least one.
        widths: per link, its bandwidth in bytes/s.

    Returns:
        per flow, its rate in bytes/s.

    Two flows share link 0, of which one goes on over the narrower link 1:

    >>> fair_rates({7: (0,), 8: (0, 1)}, (10.0, 2.0))
    {8: 2.0, 7: 8.0}
    """
    flows_on: dict[int, set[int]] = {}
    for flow, route in routes.items():
        for link in route:
            flows_on.setdefault(link, set()).add(flow)
    left = {link: widths[link] for link in flows_on}
    rates: dict[int, float] = {}
    while flows_on:
        rate, link = min((left[link] / len(flows), link) for link, flows in flows_on.items())
        for flow in sorted(flows_on[link]):
            rates[flow] = rate
            for taken in routes[flow]:
                left[taken] -= rate
                flows_on[taken].remove(flow)
        flows_on = {link: flows for link, flows in flows_on.items() if flows}
    return rates


class Links:
    """The links of a topology and the flows that are on them now.

    A flow is an integer that the caller chooses; rates are in bytes/s.
    """

    def __init__(self, widths: Sequence[float]) -> None:
        self._widths = widths
        self._routes: dict[int, Sequence[int]] = {}
        self._flows_on: list[set[int]] = [set() for _ in widths]
        self._touched: dict[int, None] = {}

    def add(self, flow: int, route: Sequence[int]) -> None:
        """Puts a flow on its links."""
        self._routes[flow] = route
        for link in route:
            self._flows_on[link].add(flow)
        self._touched[flow] = None

    def remove(self, flow: int) -> None:
        """Takes a flow off its links."""
        self._touched.pop(flow, None)
        for link in self._routes.pop(flow):
            flows = self._flows_on[link]
            flows.remove(flow)
            if flows:
                # One will do: the others on the link are found from it.
                self._touched[min(flows)] = None

    @property
    def stale(self) -> bool:
        """Whether flows came or went since the rates were last asked for."""
        return bool(self._touched)

    def new_rates(self) -> dict[int, float]:
        """Rates of all flows that may have another one since this was last asked for."""
        rates: dict[int, float] = {}
        for flow in self._touched:
            if flow not in rates:
                rates |= self._rates_around(flow)
        self._touched.clear()
        return rates

    def _rates_around(self, flow: int) -> dict[int, float]:
        route = self._routes[flow]
        if all(len(self._flows_on[link]) == 1 for link in route):
            return {flow: min(self._widths[link] for link in route)}
        return fair_rates({one: self._routes[one] for one in self._coupled(flow)}, self._widths)

    def _coupled(self, flow: int) -> Collection[int]:
        """The flow and all that share links with it, directly or through others, ascending."""
        coupled, reached, ahead = {flow}, set(), [flow]
        while ahead:
            for link in self._routes[ahead.pop()]:
                if link not in reached:
                    reached.add(link)
                    ahead += self._flows_on[link] - coupled
                    coupled |= self._flows_on[link]
        return sorted(coupled)
