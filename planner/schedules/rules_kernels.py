"""What the actions of lists wait for, in time: the event loop, compiled by numba.

These rules are stated here, in the launcher and in the tests' simulator in plain Python, and nowhere
else. The simulator runs the loop with the times of the actions and the links of a cluster; the dry
run runs it with nothing that takes time.

Each device runs its list in order. Posting a send or receive, a computation, an all-reduce and a
step occupy the device for their duration. Everything else is told by counters:

    a send, a receive   raises its counter when it is posted; the end of its transfer lowers it
    a computation       begins when its counter is zero
    an all-reduce       has a counter that begins at the number of its members; each member lowers
                        it when it comes, and the last one begins the all-reduce for all

A transfer begins when both its ends have posted it and the transfer before it of the same ordered
pair of devices has ended. `dependencies.py` finds the counters, and which send meets which receive.

How long a transfer takes depends on its links:

    gates           exclusive links on the routes of several pairs. A transfer queues at all gates of
                    its route when it is ready, in the order of the moments, then of the pairs, and
                    begins when it is the first in all of its queues.
    shared links    fair links on the routes of several pairs. A transfer whose route has some waits
                    for the latency, then moves its bytes at a rate that changes whenever a transfer
                    begins or ends that it shares links with, directly or through others. Rates are
                    max-min fair (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2).
    other links     give the transfer latency + bytes / bandwidth, known when it begins.

The order in which the events of one moment are taken changes no time: counters only wait for zero,
and queues and rates are looked at when nothing else happens at the moment.

All helpers are `inlined`, because numba would count references to every array that they are given.
"""

from typing import Any, NamedTuple

import numpy as np

from planner.schedules.dependencies import Outcome, Paths, Tasks
from planner.support.arrays import Floats, Ints, Kinds
from planner.support.jit import inlined, inner, njit

# `actions.Kind`, as numbers that are compiled in.
COMPUTE, SEND, RECEIVE, ALL_REDUCE = 0, 1, 2, 3

# How far the next transfer of a pair is.
IDLE, QUEUED, LATENCY, MOVING = 0, 1, 2, 3

# Arrays of records, whose fields mypy cannot see.
Records = Any


def _record(**fields: str) -> "np.dtype[np.void]":
    """A record from its fields of each type, in words."""
    return np.dtype([(name, form) for form, names in fields.items() for name in names.split()])


# at: the action that the device runs or waits for; end: of its list; waits: the counter that it
# waits for, -1 where it waits for none.
DEVICE = _record(i8="at end waits")
# source, target: positions of the devices; next, end: the next transfer, and the end of those of
# the pair; sent, posted: where the transfers that have been sent, and whose receive has been posted,
# end; state: of the next transfer; place, end_place: its places at gates; hop, end_hop: its route
# where it has shared links;
# rate: bytes/s of the transfer that is moving; left: bytes at time since_s;
# touched: whether its rate may change; search: the last one that reached it; filled: the last one
# that gave it a rate.
PAIR = _record(
    i8="source target next end sent posted state place end_place hop end_hop touched search filled",
    f8="latency_s bytes_per_s rate left since_s",
)
# head, tail: the first and the last of the places that are queued, -1 without one.
GATE = _record(i8="head tail")
# A pair at a gate; behind: the place behind it in the queue, -1 without one.
PLACE = _record(i8="gate pair behind")
# load: moving transfers on the link; head: the first of their hops, -1 without one; search: the last
# one that reached it; open, room: transfers without a new rate, and the bandwidth left to them.
LINK = _record(i8="load head search open", f8="bytes_per_s room")
# One link of a route. The hops of the transfers that are moving on a link hang together.
HOP = _record(i8="link pair after before")
# The time, the number of searches, and the lengths of the lists that `World` says.
CLOCK = _record(f8="now_s", i8="searches events ready fresh freed touched")


class World(NamedTuple):
    """What is run, and where everything stands; letters as in `Tasks` and `Paths`.

    Attributes:
        kind, counter, pair, duration_s, size_bytes, send, receive: as in `Tasks`.
        counters: (C,) as they stand.
        devices: (D,) `DEVICE`.
        pairs: (P,) `PAIR`.
        gates: `GATE`.
        places: `PLACE`, pair after pair.
        links: (L,) `LINK`.
        hops: `HOP`, pair after pair.
        clock: (1,) `CLOCK`.
        event_s: (D + P,) a binary heap of the times of events to come.
        event_of: (D + P,) in it, the device whose action ends, or D + the pair of a transfer.
        event_at: (D + P,) where the event of each of them is in the heap, -1 without one.
        ready: (D,) devices that go on at once.
        fresh: (P,) pairs whose transfer got ready for its gates at this moment.
        freed: (P,) pairs whose transfer left its gates at this moment.
        touched: (P,) pairs whose transfer began to move, or lost company, at this moment.
        coupled: (P,) pairs whose transfers share links, as the last search found them.
        reached: (L,) the links that they are on.
        start_s, end_s, post_s, posted_s: as in `Outcome`.
    """

    kind: Kinds
    counter: Ints
    pair: Ints
    duration_s: Floats
    size_bytes: Floats
    send: Ints
    receive: Ints
    counters: Ints
    devices: Records
    pairs: Records
    gates: Records
    places: Records
    links: Records
    hops: Records
    clock: Records
    event_s: Floats
    event_of: Ints
    event_at: Ints
    ready: Ints
    fresh: Ints
    freed: Ints
    touched: Ints
    coupled: Ints
    reached: Ints
    start_s: Floats
    end_s: Floats
    post_s: Floats
    posted_s: Floats


@njit
def run(tasks: Tasks, paths: Paths) -> Outcome:
    """Runs lists until nothing more happens."""
    world = beginning(tasks, paths)
    play(world)
    devices, pairs = world.devices, world.pairs
    at, first = devices.at.copy(), tasks.first[:-1]
    done, sent, posted = pairs.next - first, pairs.sent - first, pairs.posted - first
    ended = (at == tasks.start[1:]).all() and (sent == done).all() and (posted == done).all()
    return Outcome(
        ended, at, done, sent, posted, world.start_s, world.end_s, world.post_s, world.posted_s
    )


@inner
def beginning(tasks: Tasks, paths: Paths) -> World:
    """Everything before the first event."""
    num_devices, num_actions = len(tasks.start) - 1, len(tasks.kind)
    num_pairs, num_links = len(tasks.source), len(paths.link_bytes_per_s)
    devices, pairs = np.zeros(num_devices, DEVICE), np.zeros(num_pairs, PAIR)
    gates, places = np.zeros(paths.num_gates, GATE), np.zeros(len(paths.place_gate), PLACE)
    links, hops = np.zeros(num_links, LINK), np.zeros(len(paths.hop_link), HOP)
    devices.at[:], devices.end[:], devices.waits[:] = tasks.start[:-1], tasks.start[1:], -1
    pairs.source[:], pairs.target[:] = tasks.source, tasks.target
    pairs.next[:], pairs.end[:] = tasks.first[:-1], tasks.first[1:]
    pairs.sent[:], pairs.posted[:] = tasks.first[:-1], tasks.first[:-1]
    pairs.latency_s[:], pairs.bytes_per_s[:] = paths.latency_s, paths.bytes_per_s
    pairs.place[:], pairs.end_place[:] = paths.first_place[:-1], paths.first_place[1:]
    pairs.hop[:], pairs.end_hop[:] = paths.first_hop[:-1], paths.first_hop[1:]
    gates.head[:] = -1
    places.gate[:], hops.link[:] = paths.place_gate, paths.hop_link
    links.head[:], links.bytes_per_s[:] = -1, paths.link_bytes_per_s
    for p in range(num_pairs):
        places.pair[pairs[p].place : pairs[p].end_place] = p
        hops.pair[pairs[p].hop : pairs[p].end_hop] = p
    return World(
        tasks.kind, tasks.counter, tasks.pair, tasks.duration_s, tasks.size_bytes, tasks.send,
        tasks.receive, tasks.counters.copy(), devices, pairs, gates, places, links, hops,
        np.zeros(1, CLOCK), np.zeros(num_devices + num_pairs), np.zeros(num_devices + num_pairs, np.int64),
        np.full(num_devices + num_pairs, -1), np.zeros(num_devices, np.int64),
        np.zeros(num_pairs, np.int64), np.zeros(num_pairs, np.int64),
        np.zeros(num_pairs, np.int64), np.zeros(num_pairs, np.int64),
        np.zeros(num_links, np.int64), np.zeros(num_actions), np.zeros(num_actions),
        np.zeros(num_actions), np.zeros(num_actions),
    )  # fmt: skip


@inlined
def play(world: World) -> None:
    """Takes event after event until nothing more happens."""
    clock, devices, pairs = world.clock[0], world.devices, world.pairs
    num_devices = len(devices)
    for device in range(num_devices):
        wake(world, device)
    while True:
        while clock.ready:
            clock.ready -= 1
            advance(world, world.ready[clock.ready])
        if not clock.events or world.event_s[0] > clock.now_s:
            # The moment is over, unless a new rate or turn makes an event of the same moment.
            if clock.touched:
                share(world)
                continue
            if clock.fresh or clock.freed:
                admit(world)
                continue
            if not clock.events:
                break
        who = next_event(world)
        if who < num_devices:
            finish(world, who)
        else:
            proceed(world, who - num_devices)


# ----------------------------------------------------------------------------------- devices


@inlined
def advance(world: World, device: int) -> None:
    """Takes a device to its next action that takes time, and begins it if nothing is missing."""
    here, now_s = world.devices[device], world.clock[0].now_s
    while here.at < here.end:
        i = here.at
        kind = world.kind[i]
        if kind == SEND or kind == RECEIVE:
            world.post_s[i] = now_s
            if world.duration_s[i] > 0.0:
                foresee(world, device, now_s + world.duration_s[i])
                break
            post(world, i)
            here.at += 1
        elif kind == COMPUTE and world.counters[world.counter[i]]:
            here.waits = world.counter[i]
            break
        elif kind == ALL_REDUCE:
            join(world, device, i)
            break
        else:
            occupy(world, device, i)
            break


@inlined
def occupy(world: World, device: int, i: int) -> None:
    """Begins an action that occupies its device."""
    now_s = world.clock[0].now_s
    world.start_s[i], world.end_s[i] = now_s, now_s + world.duration_s[i]
    foresee(world, device, world.end_s[i])


@inlined
def join(world: World, device: int, i: int) -> None:
    """A device comes to an all-reduce, which begins for all members when the last one comes."""
    counter = world.counter[i]
    world.devices[device].waits = counter
    world.counters[counter] -= 1
    if not world.counters[counter]:
        for member in range(len(world.devices)):
            if world.devices[member].waits == counter:
                world.devices[member].waits = -1
                occupy(world, member, world.devices[member].at)


@inlined
def finish(world: World, device: int) -> None:
    """The action that occupied a device has ended; of a send or receive, its posting."""
    i = world.devices[device].at
    if world.kind[i] == SEND or world.kind[i] == RECEIVE:
        post(world, i)
    world.devices[device].at += 1
    wake(world, device)


@inlined
def wake(world: World, device: int) -> None:
    """A device goes on at once."""
    clock = world.clock[0]
    world.ready[clock.ready] = device
    clock.ready += 1


# --------------------------------------------------------------------------------- transfers


@inlined
def post(world: World, i: int) -> None:
    """A send or receive is there for its other end to meet."""
    pair, counter = world.pairs[world.pair[i]], world.counter[i]
    world.posted_s[i] = world.clock[0].now_s
    if counter >= 0:
        world.counters[counter] += 1
    if world.kind[i] == SEND:
        pair.sent += 1
    else:
        pair.posted += 1
    match(world, world.pair[i])


@inlined
def match(world: World, p: int) -> None:
    """Begins the next transfer of a pair, or queues it at its gates, if both ends have posted it
    and none is under way.
    """
    pair, clock = world.pairs[p], world.clock[0]
    posted = pair.next < pair.sent and pair.next < pair.posted
    # Beyond the end, what is sent is not what is expected.
    if posted and pair.state == IDLE and pair.next < pair.end:
        if pair.place < pair.end_place:
            pair.state = QUEUED
            get_ready(world, p)
        else:
            begin(world, p)


@inlined
def begin(world: World, p: int) -> None:
    """Begins the next transfer of a pair."""
    pair, now_s = world.pairs[p], world.clock[0].now_s
    receive = world.receive[pair.next]
    world.start_s[receive] = now_s
    end_s = now_s + pair.latency_s
    if pair.hop < pair.end_hop:
        pair.state = LATENCY
    else:
        pair.state = MOVING
        end_s += world.size_bytes[receive] / pair.bytes_per_s
    foresee(world, len(world.devices) + p, end_s)


@inlined
def proceed(world: World, p: int) -> None:
    """The latency of a transfer is over, or the transfer is."""
    if world.pairs[p].state == LATENCY:
        take_links(world, p)
    else:
        arrive(world, p)


@inlined
def arrive(world: World, p: int) -> None:
    """A transfer ends: whoever waits for it, or for its links, goes on."""
    pair = world.pairs[p]
    send, receive = world.send[pair.next], world.receive[pair.next]
    world.end_s[receive] = world.clock[0].now_s
    pair.state = IDLE
    pair.next += 1
    leave_links(world, p)
    leave_gates(world, p)
    lower(world, world.counter[receive], pair.target)
    if world.counter[send] >= 0:
        lower(world, world.counter[send], pair.source)
    match(world, p)


@inlined
def lower(world: World, counter: int, device: int) -> None:
    """Lowers a counter that a device may wait for."""
    world.counters[counter] -= 1
    if not world.counters[counter] and world.devices[device].waits == counter:
        world.devices[device].waits = -1
        wake(world, device)


# ------------------------------------------------------------------------------------- gates


@inlined
def get_ready(world: World, p: int) -> None:
    """Puts a pair among those that got ready at this moment, which ascend."""
    fresh, clock = world.fresh, world.clock[0]
    at = clock.fresh
    while at and fresh[at - 1] > p:
        fresh[at] = fresh[at - 1]
        at -= 1
    fresh[at] = p
    clock.fresh += 1


@inlined
def admit(world: World) -> None:
    """At the end of a moment: the transfers that got ready join the queues of their gates, and those
    that are the first in all of their queues begin.
    """
    gates, places, clock = world.gates, world.places, world.clock[0]
    fresh = world.fresh
    for turn in range(clock.fresh):
        p = fresh[turn]
        for place in range(world.pairs[p].place, world.pairs[p].end_place):
            gate = gates[places[place].gate]
            places[place].behind = -1
            if gate.head < 0:
                gate.head = place
            else:
                places[gate.tail].behind = place
            gate.tail = place
    # Only at the gates of these pairs can another transfer be the first now.
    for turn in range(clock.freed + clock.fresh):
        p = world.freed[turn] if turn < clock.freed else fresh[turn - clock.freed]
        for place in range(world.pairs[p].place, world.pairs[p].end_place):
            head = gates[places[place].gate].head
            if head >= 0:
                take_turn(world, places[head].pair)
    clock.fresh = clock.freed = 0


@inlined
def take_turn(world: World, p: int) -> None:
    """Begins a transfer that is queued if it is the first in all of its queues."""
    pair = world.pairs[p]
    first = pair.state == QUEUED
    for place in range(pair.place, pair.end_place):
        first = first and world.gates[world.places[place].gate].head == place
    if first:
        begin(world, p)


@inlined
def leave_gates(world: World, p: int) -> None:
    """Takes a transfer, which is the first in all of its queues, out of them."""
    pair, clock = world.pairs[p], world.clock[0]
    for place in range(pair.place, pair.end_place):
        world.gates[world.places[place].gate].head = world.places[place].behind
    if pair.place < pair.end_place:
        world.freed[clock.freed] = p
        clock.freed += 1


# ------------------------------------------------------------------------------ shared links


@inlined
def take_links(world: World, p: int) -> None:
    """Puts a transfer that begins to move on the links of its route."""
    pair, hops, links = world.pairs[p], world.hops, world.links
    pair.state = MOVING
    pair.rate, pair.since_s = 0.0, world.clock[0].now_s
    pair.left = world.size_bytes[world.receive[pair.next]]
    for h in range(pair.hop, pair.end_hop):
        link = links[hops[h].link]
        link.load += 1
        hops[h].before, hops[h].after = -1, link.head
        if link.head >= 0:
            hops[link.head].before = h
        link.head = h
    touch(world, p)


@inlined
def leave_links(world: World, p: int) -> None:
    """Takes a transfer that has ended off the links of its route."""
    pair, hops, links = world.pairs[p], world.hops, world.links
    for h in range(pair.hop, pair.end_hop):
        link, after, before = links[hops[h].link], hops[h].after, hops[h].before
        link.load -= 1
        if before < 0:
            link.head = after
        else:
            hops[before].after = after
        if after >= 0:
            hops[after].before = before
        # One of those that are left on the link will do: the others are found from it.
        if link.head >= 0:
            touch(world, hops[link.head].pair)


@inlined
def touch(world: World, p: int) -> None:
    """The rate of a transfer may change. Where it ends at the same moment, another one on each of
    its links is touched instead.
    """
    clock = world.clock[0]
    if not world.pairs[p].touched:
        world.pairs[p].touched = 1
        world.touched[clock.touched] = p
        clock.touched += 1


@inlined
def share(world: World) -> None:
    """At the end of a moment: new rates for all transfers that were touched, and for all that share
    links with them, directly or through others.
    """
    pairs, clock = world.pairs, world.clock[0]
    earlier = clock.searches
    for t in range(clock.touched):
        p = world.touched[t]
        pairs[p].touched = 0
        # One that an earlier search of this moment has reached has its rate.
        if pairs[p].state == MOVING and pairs[p].search <= earlier:
            clock.searches += 1
            num_pairs, num_links = couple(world, p, clock.searches)
            fill(world, num_pairs, num_links, clock.searches)
    clock.touched = 0


@inlined
def couple(world: World, p: int, search: int) -> tuple[int, int]:
    """Finds the transfers that share links with one, directly or through others, and the links that
    they are on; they are left in `coupled` and `reached`.

    Returns:
        how many transfers and how many links there are.
    """
    pairs, hops, links = world.pairs, world.hops, world.links
    num_pairs, num_links, looked = 1, 0, 0
    world.coupled[0], pairs[p].search = p, search
    while looked < num_pairs:
        pair = pairs[world.coupled[looked]]
        looked += 1
        for h in range(pair.hop, pair.end_hop):
            link = links[hops[h].link]
            if link.search == search:
                continue
            link.search, link.room, link.open = search, link.bytes_per_s, link.load
            world.reached[num_links] = hops[h].link
            num_links += 1
            other = link.head
            while other >= 0:
                if pairs[hops[other].pair].search != search:
                    pairs[hops[other].pair].search = search
                    world.coupled[num_pairs] = hops[other].pair
                    num_pairs += 1
                other = hops[other].after
    return num_pairs, num_links


@inlined
def fill(world: World, num_pairs: int, num_links: int, search: int) -> None:
    """Max-min fair rates of coupled transfers, by progressive filling: the link with the smallest
    share per transfer gives that share to all its transfers, which then take it from their other
    links, and so on.
    """
    pairs, hops, links = world.pairs, world.hops, world.links
    while True:
        full, smallest = -1, np.inf
        for turn in range(num_links):
            one = world.reached[turn]
            if links[one].open:
                mine = links[one].room / links[one].open
                if full < 0 or mine < smallest or (mine == smallest and one < full):
                    full, smallest = one, mine
        if full < 0:
            break
        h = links[full].head
        while h >= 0:
            p = hops[h].pair
            if pairs[p].filled != search:
                pairs[p].filled = search
                for other in range(pairs[p].hop, pairs[p].end_hop):
                    links[hops[other].link].room -= smallest
                    links[hops[other].link].open -= 1
                change_rate(world, p, smallest)
            h = hops[h].after


@inlined
def change_rate(world: World, p: int, rate: float) -> None:
    """Gives a transfer a rate from now on, and foresees its end."""
    pair, now_s = world.pairs[p], world.clock[0].now_s
    if rate != pair.rate:
        left = pair.left - pair.rate * (now_s - pair.since_s)
        pair.left = left if left > 0.0 else 0.0
        pair.since_s, pair.rate = now_s, rate
        foresee(world, len(world.devices) + p, now_s + pair.left / rate)


# ------------------------------------------------------------------------------------ events


@inlined
def foresee(world: World, who: int, time_s: float) -> None:
    """Puts the next event of a device or transfer into the heap, or moves it there."""
    event_s, event_of, event_at = world.event_s, world.event_of, world.event_at
    clock, at = world.clock[0], event_at[who]
    known = at >= 0
    if not known:
        at = clock.events
        clock.events += 1
    # Up while it is earlier than the one above it, ...
    while at and event_s[(at - 1) >> 1] > time_s:
        above = (at - 1) >> 1
        event_s[at], event_of[at] = event_s[above], event_of[above]
        event_at[event_of[at]] = at
        at = above
    event_s[at], event_of[at], event_at[who] = time_s, who, at
    # ... else down; a new one has none below it that is earlier.
    if known:
        sink(world, at)


@inlined
def next_event(world: World) -> int:
    """Takes the first event out of the heap, at its time; the device or transfer that it is of."""
    event_s, event_of, event_at = world.event_s, world.event_of, world.event_at
    clock, who = world.clock[0], event_of[0]
    clock.now_s = event_s[0]
    clock.events -= 1
    event_at[who] = -1
    if clock.events:
        event_s[0], event_of[0] = event_s[clock.events], event_of[clock.events]
        event_at[event_of[0]] = 0
        sink(world, 0)
    return who


@inlined
def sink(world: World, at: int) -> None:
    """Moves an event of the heap down while one below it is earlier."""
    event_s, event_of, event_at = world.event_s, world.event_of, world.event_at
    time_s, who, size = event_s[at], event_of[at], world.clock[0].events
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and event_s[below + 1] < event_s[below]:
            below += 1
        if event_s[below] >= time_s:
            break
        event_s[at], event_of[at] = event_s[below], event_of[below]
        event_at[event_of[at]] = at
        at = below
    event_s[at], event_of[at], event_at[who] = time_s, who, at
