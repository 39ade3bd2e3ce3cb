"""The event loop of `events.py`, compiled by numba.

Transfers share links at flow level: every flow has one rate on its whole route, and the rates are
max-min fair (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). A rate changes only when
a flow starts or ends that it shares links with, directly or through others; rates of flows that
share no link are never looked at again.

Exclusive links carry one transfer at a time. A transfer whose route has some waits in a queue at
each of them and begins when it is the first in all. What gets ready at one moment joins the queues
when nothing else happens at it, by the number of its pair, so that no turn depends on the order in
which the events of a moment are taken.

An ordered pair of devices has at most one transfer under way, so a transfer, and the flow that it
is, is known by its pair, and by a number that grows with the time of its start.
"""

from heapq import heappop, heappush

import numpy as np

from planner.simulator.events_arrays import Records, World
from planner.support.arrays import Ints
from planner.support.jit import inner, njit

# (time in s, device, order, pair, transfer); no pair (-1) where the device ends its action.
Queue = list[tuple[float, int, int, int, int]]

# `actions.Kind`, as numbers that are compiled in.
COMPUTE, SEND, RECEIVE, SUM = 0, 1, 2, 3


# ------------------------------------------------------------------------------------ links


@inner
def touch(pairs: Records, touched: Ints, clock: Records, flow: int) -> None:
    """Its rate may change."""
    if pairs[flow].place < 0:
        pairs[flow].place = clock[0].touched
        touched[clock[0].touched] = flow
        clock[0].touched += 1


@inner
def add(
    pairs: Records, hops: Records, links: Records, touched: Ints, clock: Records, flow: int
) -> None:
    """Puts a flow on its links."""
    for h in range(pairs[flow].hop, pairs[flow].end_hop):
        link = hops[h].link
        links[link].load += 1
        if links[link].exclusive:
            continue
        hops[h].before, hops[h].after = -1, links[link].head
        if links[link].head >= 0:
            hops[links[link].head].before = h
        links[link].head = h
    touch(pairs, touched, clock, flow)


@inner
def remove(
    pairs: Records, hops: Records, links: Records, touched: Ints, clock: Records, flow: int
) -> None:
    """Takes a flow off its links."""
    pairs[flow].place = -1
    for h in range(pairs[flow].hop, pairs[flow].end_hop):
        link, after, before = hops[h].link, hops[h].after, hops[h].before
        links[link].load -= 1
        if links[link].exclusive:
            continue
        if before < 0:
            links[link].head = after
        else:
            hops[before].after = after
        if after >= 0:
            hops[after].before = before
        # One of the others will do: the rest is found from it.
        oldest, other = -1, links[link].head
        while other >= 0:
            one = hops[other].pair
            if oldest < 0 or pairs[one].number < pairs[oldest].number:
                oldest = one
            other = hops[other].after
        if oldest >= 0:
            touch(pairs, touched, clock, oldest)


@inner
def coupled(
    pairs: Records, hops: Records, links: Records, some: Ints, reached: Ints, flow: int, search: int
) -> tuple[int, int]:
    """How many flows share links with a flow, directly or through others, and on how many links;
    they are left in `some`, older ones first, and `reached`.
    """
    num_flows, num_links, looked = 1, 0, 0
    some[0], pairs[flow].mark = flow, search
    while looked < num_flows:
        one = some[looked]
        looked += 1
        for h in range(pairs[one].hop, pairs[one].end_hop):
            link = hops[h].link
            if links[link].mark == search:
                continue
            links[link].mark = search
            reached[num_links] = link
            num_links += 1
            other = -1 if links[link].exclusive else links[link].head
            while other >= 0:
                if pairs[hops[other].pair].mark != search:
                    pairs[hops[other].pair].mark = search
                    some[num_flows] = hops[other].pair
                    num_flows += 1
                other = hops[other].after
    for i in range(1, num_flows):
        one, j = some[i], i
        while j and pairs[some[j - 1]].number > pairs[one].number:
            some[j] = some[j - 1]
            j -= 1
        some[j] = one
    return num_flows, num_links


@inner
def fill(
    pairs: Records, hops: Records, links: Records, some: Ints, reached: Ints,
    rated: Ints, clock: Records,
) -> None:  # fmt: skip
    """Max-min fair rates of coupled flows, by progressive filling: the link with the smallest share
    per flow gives that share to all its flows, which then take it from their other links, and so
    on.
    """
    for link in reached:
        links[link].room, links[link].open = links[link].width, links[link].load
    while True:
        full, share = -1, np.inf
        for link in reached:
            if links[link].open:
                mine = links[link].room / links[link].open
                if full < 0 or mine < share or (mine == share and link < full):
                    full, share = link, mine
        if full < 0:
            return
        for flow in some:
            takes = False
            for h in range(pairs[flow].hop, pairs[flow].end_hop):
                takes = takes or hops[h].link == full
            if takes and pairs[flow].new == 0.0:
                pairs[flow].new = share
                rated[clock[0].rated] = flow
                clock[0].rated += 1
                for h in range(pairs[flow].hop, pairs[flow].end_hop):
                    links[hops[h].link].room -= share
                    links[hops[h].link].open -= 1


@inner
def new_rates(
    pairs: Records, hops: Records, links: Records, touched: Ints, some: Ints, reached: Ints,
    rated: Ints, clock: Records,
) -> None:  # fmt: skip
    """Rates of all flows that may have another one since this was last asked for."""
    for t in range(clock[0].touched):
        flow = touched[t]
        if pairs[flow].place != t or pairs[flow].new != 0.0:
            continue
        alone, narrow = True, np.inf
        for h in range(pairs[flow].hop, pairs[flow].end_hop):
            alone = alone and links[hops[h].link].load == 1
            if links[hops[h].link].width < narrow:
                narrow = links[hops[h].link].width
        if alone:
            pairs[flow].new = narrow
            rated[clock[0].rated] = flow
            clock[0].rated += 1
        else:
            clock[0].search += 1
            flows, on = coupled(pairs, hops, links, some, reached, flow, clock[0].search)
            fill(pairs, hops, links, some[:flows], reached[:on], rated, clock)
    for t in range(clock[0].touched):
        if pairs[touched[t]].place == t:
            pairs[touched[t]].place = -1
    clock[0].touched = 0


# ------------------------------------------------------------------------------------ events


@inner
def foresee(clock: Records, queue: Queue, time: float, device: int, pair: int, number: int) -> None:
    """Queues an event of a device."""
    clock[0].order += 1
    heappush(queue, (time, device, clock[0].order, pair, number))


@inner
def share(world: World, queue: Queue) -> None:
    """Gives transfers their new rates and foresees their ends."""
    pairs, clock, now = world.pairs, world.clock, world.clock[0].now
    new_rates(
        pairs, world.hops, world.links, world.touched, world.some, world.reached, world.rated, clock
    )
    for one in range(clock[0].rated):
        flow = world.rated[one]
        rate, pairs[flow].new = pairs[flow].new, 0.0
        if rate != pairs[flow].rate:
            left = pairs[flow].left - pairs[flow].rate * (now - pairs[flow].since)
            pairs[flow].left = left if left > 0.0 else 0.0
            pairs[flow].since, pairs[flow].rate = now, rate
            pairs[flow].end = now + pairs[flow].left / rate
            foresee(clock, queue, pairs[flow].end, pairs[flow].target, flow, pairs[flow].number)
    clock[0].rated = 0


@inner
def admit(world: World, queue: Queue) -> None:
    """At the end of a moment: what has got ready joins the queues of its exclusive links, and what
    is the first in all of its queues begins.
    """
    pairs, hops, links, clock = world.pairs, world.hops, world.links, world.clock
    fresh = world.fresh[: clock[0].fresh]
    fresh.sort()
    for pair in fresh:
        for h in range(pairs[pair].hop, pairs[pair].end_hop):
            link = hops[h].link
            if links[link].exclusive:
                hops[h].after = -1
                if links[link].head < 0:
                    links[link].head = h
                else:
                    hops[links[link].tail].after = h
                links[link].tail = h
    for pair in world.freed[: clock[0].freed]:
        for h in range(pairs[pair].hop, pairs[pair].end_hop):
            first = links[hops[h].link].head
            if links[hops[h].link].exclusive and first >= 0:
                take_turn(world, queue, hops[first].pair)
    for pair in fresh:
        take_turn(world, queue, pair)
    clock[0].fresh = clock[0].freed = 0


@inner
def take_turn(world: World, queue: Queue, pair: int) -> None:
    """Begins a transfer that waits if it is the first in all of its queues."""
    pairs, hops, links = world.pairs, world.hops, world.links
    first = pairs[pair].waits == 1
    for h in range(pairs[pair].hop, pairs[pair].end_hop):
        first = first and (not links[hops[h].link].exclusive or links[hops[h].link].head == h)
    if first:
        pairs[pair].waits = 0
        begin(world, queue, pair)


@inner
def leave(world: World, pair: int) -> None:
    """Takes a transfer that has ended out of the queues."""
    pairs, hops, links, clock = world.pairs, world.hops, world.links, world.clock
    if pairs[pair].gated:
        for h in range(pairs[pair].hop, pairs[pair].end_hop):
            if links[hops[h].link].exclusive:
                links[hops[h].link].head = hops[h].after
        world.freed[clock[0].freed] = pair
        clock[0].freed += 1


@inner
def match(world: World, queue: Queue, pair: int) -> None:
    """The next transfer of a pair is ready if both ends have posted it and none is under way. It
    begins, unless it has to queue.
    """
    pairs, clock = world.pairs, world.clock
    begun = pairs[pair].begun
    if pairs[pair].number >= 0 or begun == pairs[pair].sent or begun == pairs[pair].posted:
        return
    pairs[pair].begun += 1
    if pairs[pair].gated:
        pairs[pair].waits, pairs[pair].number = 1, clock[0].order
        world.fresh[clock[0].fresh] = pair
        clock[0].fresh += 1
    else:
        begin(world, queue, pair)


@inner
def begin(world: World, queue: Queue, pair: int) -> None:
    """Begins the transfer of a pair with its latency."""
    pairs, clock = world.pairs, world.clock
    receive = world.receives[pairs[pair].first + pairs[pair].begun - 1]
    pairs[pair].number = clock[0].order
    world.actions[receive].start_s = pairs[pair].since = clock[0].now
    pairs[pair].left, pairs[pair].rate = world.actions[receive].amount, 0.0
    pairs[pair].end = clock[0].now + pairs[pair].latency
    foresee(clock, queue, pairs[pair].end, pairs[pair].source, pair, pairs[pair].number)


@inner
def occupy(world: World, queue: Queue, device: int) -> None:
    """Begins the action that a device stands at."""
    i, now = world.devices[device].at, world.clock[0].now
    world.actions[i].start_s, world.actions[i].end_s = now, now + world.actions[i].amount
    foresee(world.clock, queue, world.actions[i].end_s, device, -1, -1)


@inner
def begin_sum(world: World, queue: Queue, one: int) -> None:
    """Begins a sum on all of its members, in the order in which they have come."""
    for turn in range(world.sums[one].members):
        for device in range(len(world.devices)):
            i = world.devices[device].at
            if i == world.devices[device].end or world.actions[i].kind != SUM:
                continue
            if world.actions[i].key == one and world.actions[i].end_s == -1.0 - turn:
                occupy(world, queue, device)


@inner
def post(world: World, queue: Queue, i: int) -> None:
    """A send or receive is there for its other end to meet."""
    action = world.actions[i]
    action.posted_s = world.clock[0].now
    if action.kind == SEND:
        world.pairs[action.pair].sent += 1
        if action.holds >= 0:
            world.missing[action.holds] += 1
    else:
        world.pairs[action.pair].posted += 1
        world.missing[action.key] += 1
    match(world, queue, action.pair)


@inner
def advance(world: World, queue: Queue, device: int) -> None:
    """Takes a device to its next action that needs time; begins it if nothing is missing."""
    devices, actions = world.devices, world.actions
    while devices[device].at < devices[device].end:
        action = actions[devices[device].at]
        if action.kind != SEND and action.kind != RECEIVE:
            break
        action.post_s = world.clock[0].now
        if action.post > 0.0:
            foresee(world.clock, queue, world.clock[0].now + action.post, device, -1, -1)
            return
        post(world, queue, devices[device].at)
        devices[device].at += 1
    if devices[device].at == devices[device].end:
        return
    action = actions[devices[device].at]
    if action.kind == COMPUTE and world.missing[action.key]:
        devices[device].waits = action.key
    elif action.kind == SUM:
        world.sums[action.key].come += 1
        # Until it begins, its end says when the member came.
        action.end_s = -world.sums[action.key].come
        if world.sums[action.key].come == world.sums[action.key].members:
            begin_sum(world, queue, action.key)
    else:
        occupy(world, queue, device)


@inner
def arrive(world: World, queue: Queue, pair: int) -> None:
    """Hands a tensor to the computation that it is for, which may wait for it, as another of the
    sender may wait for its end.
    """
    pairs = world.pairs
    receive = world.receives[pairs[pair].first + pairs[pair].begun - 1]
    world.actions[receive].end_s = world.clock[0].now
    pairs[pair].number = -1
    leave(world, pair)
    match(world, queue, pair)
    key, target = world.actions[receive].key, pairs[pair].target
    world.missing[key] -= 1
    if not world.missing[key] and world.devices[target].waits == key:
        world.devices[target].waits = -1
        advance(world, queue, target)
    held, source = world.actions[receive].holds, pairs[pair].source
    if held >= 0:
        world.missing[held] -= 1
        if not world.missing[held] and world.devices[source].waits == held:
            world.devices[source].waits = -1
            advance(world, queue, source)


@njit
def run(world: World) -> bool:
    """Runs to the end; whether it is one in which nothing is left over."""
    devices, pairs, clock = world.devices, world.pairs, world.clock
    queue = [(0.0, 0, 0, 0, 0)]
    queue.pop()
    for d in range(len(devices)):
        advance(world, queue, d)
    stale = False
    while len(queue) or stale or clock[0].fresh or clock[0].freed:
        if not len(queue) or queue[0][0] > clock[0].now:
            if stale:
                share(world, queue)
                stale = False
                continue
            if clock[0].fresh or clock[0].freed:
                admit(world, queue)
                continue
        time, device, _, pair, number = heappop(queue)
        if pair < 0:
            clock[0].now = time
            kind = world.actions[devices[device].at].kind
            if kind in (SEND, RECEIVE):
                post(world, queue, devices[device].at)
            devices[device].at += 1
            advance(world, queue, device)
        # Else foreseen at a rate that has changed since.
        elif pairs[pair].number == number and pairs[pair].end == time:
            clock[0].now, stale = time, True
            if pairs[pair].rate == 0.0:
                add(pairs, world.hops, world.links, world.touched, clock, pair)
            else:
                remove(pairs, world.hops, world.links, world.touched, clock, pair)
                arrive(world, queue, pair)
    for d in range(len(devices)):
        if devices[d].at < devices[d].end:
            return False
    for p in range(len(pairs)):
        if pairs[p].sent != pairs[p].begun or pairs[p].posted != pairs[p].begun:
            return False
    return True
