"""The rules of action lists, as an event loop that numba compiles.

The rules are written here, in the launcher (`launcher/executor.py`) and in the tests' simulator in
plain Python. The simulator runs the loop with the times of the actions and the links of a cluster.
The dry run runs it with actions and links that take no time.

Each device runs its list in order. A computation and a step occupy the device for their duration,
and so does the posting of a send or receive. All-reduces run beside them, on a stream of the
device, one after the other in the order of the list; a device that comes to one waits until it has
ended. Counters tell who waits for what:

    a send, a receive   raises its counter when it is posted; the end of its transfer lowers it
    a computation       begins when its counter is zero
    an all-reduce       has a counter that begins at the number of its members; each member lowers
                        it when its stream has come to the all-reduce and its gradients are there,
                        and the last one begins the all-reduce for all

The gradients of an all-reduce are there at a cut: a moment within the computation that makes the
last of them. Without a cut they are there when the device comes to the all-reduce.

A transfer begins when both its ends have posted it and the transfer before it of the same ordered
pair of devices has ended (rendezvous; first in, first out). `dependencies.py` finds the counters,
and the send and receive that make up each transfer.

How long a transfer takes depends on its links:

    gate            an exclusive link on the routes of several pairs. A transfer that is ready
                    queues at all gates of its route, and begins when it is the first in all of its
                    queues. The queues are ordered by the moment of being ready, then by pair.
    shared link     a fair link on the routes of several pairs. A transfer over a shared link waits
                    for its latency, then moves its bytes at a rate. The rate may change when a
                    transfer begins or ends that shares links with it, directly or through others.
                    Rates are max-min fair (Bertsekas and Gallager, Data Networks, 1992, section
                    6.5.2).
    other links     A transfer over no shared link takes latency + bytes / bandwidth.

How long a computation or a step takes depends on its contention group, if its device is in one: the
devices of a group slow each other while they compute. With n of them computing, the work of one
second takes slowdown[n] seconds. So what is left of their computations is scheduled anew when one
of them begins or ends. All-reduces, postings, and waiting take none of the others' time.

No time depends on the order in which the events of one moment are taken: counters wait for zero
only, and queues, rates and groups are looked at when nothing else happens at the moment.

Each device, pair and stream has one event to come at most, because a pair has one transfer under
way at most. So a new rate moves the event of a transfer, and the heap never grows.
"""

from typing import Any, NamedTuple

import numpy as np

from planner.schedules.tasks import ContentionGroups, Paths, RunResult, Tasks
from planner.support.arrays import Floats, Ints, Kinds
from planner.support.jit import inlined, inner, njit

# `actions.ActionKind`, as numbers that are compiled in.
COMPUTE, SEND, RECEIVE, ALL_REDUCE = 0, 1, 2, 3

# How far the next all-reduce of a device's stream is.
OUTSIDE, ENTERED, SUMMING = 0, 1, 2

# How far the next transfer of a pair is.
IDLE, QUEUED, LATENCY, MOVING = 0, 1, 2, 3

# Arrays of records, whose fields mypy cannot see.
Records = Any


def _record(**fields: str) -> "np.dtype[np.void]":
    """A record with the names of its fields by their type."""
    return np.dtype([(name, form) for form, names in fields.items() for name in names.split()])


# at: the action that the device runs or waits for; end: the end of its list.
# waits: the counter that the device waits for, -1 where it waits for none.
# posting: whether the device is posting the send or receive that it is at.
# group: the device's, -1 where it computes at one speed; next_in_group: its next device, -1 for
# none. computing: whether it runs a computation or step in a group, of which `left` s of work were
# left until the next cut or its end at the time since_s, and which takes `slow` times as long as
# alone; 0 until that is known.
# cut, end_cut: the next of the device's cuts, and their end.
# stream: the all-reduce at which the device's stream stands; the end of the list behind the last.
# summing: how far that is.
DEVICE = _record(
    i8="at end waits posting group next_in_group computing cut end_cut stream summing",
    f8="slow left since_s",
)

# first: a device of the group; busy: how many of its devices compute; changed: whether that has
# changed at this moment.
GROUP = _record(i8="first busy changed")

# source, target: positions of the devices.
# next, end: the transfer that is next or under way, and the end of the pair's transfers.
# sent, posted: the transfer that the next send, and the next receive, will be part of.
# state: of the transfer `next`.
# place, end_place: the pair's `places`. hop, end_hop: its `hops`, none without shared links.
# rate: bytes/s of a transfer that moves over shared links; left: its bytes at the time since_s.
# stale: whether the rate may have to change.
# search: the last search for connected transfers that reached this one; filled: the last that gave
# it a rate.
PAIR = _record(
    i8="source target next end sent posted state place end_place hop end_hop stale search filled",
    f8="latency_s bytes_per_s rate left since_s",
)

# head, tail: the first and last place of the queue; head is -1 where it is empty.
GATE = _record(i8="head tail")

# A gate on the route of a pair; behind: the next place in the queue, -1 at its end.
PLACE = _record(i8="gate pair behind")

# load: the transfers that move over the link; head: the first of their hops, -1 without one.
# search: the last search that reached the link.
# open, room: while rates are given, the transfers without one and the bandwidth left to them.
LINK = _record(i8="load head search open", f8="bytes_per_s room")

# A link on the route of a pair; before, after: its neighbours among the hops of transfers that move
# over the same link, -1 at the ends.
HOP = _record(i8="link pair before after")

# now_s: the time; searches: how many there were; events, ready, newly_ready,
# newly_done, stale, changed: how many entries the heap and the lists of `Pending` have.
CLOCK = _record(f8="now_s", i8="searches events ready newly_ready newly_done stale changed")


class Events(NamedTuple):
    """Events to come, as a binary heap.

    Attributes:
        time_s: (2 D + P,) their times.
        who: (2 D + P,) whose they are: a device, D + a pair, or D + P + a stream's device.
        at: (2 D + P,) the position of each one's event in the heap, -1 without one.
    """

    time_s: Floats
    who: Ints
    at: Ints


class Pending(NamedTuple):
    """Lists of what is to be looked at; `CLOCK` has their lengths.

    Attributes:
        ready: (D,) devices that go on at once.
        newly_ready: (P,) pairs whose transfer got ready for its gates at this moment.
        newly_done: (P,) pairs whose transfer left its gates at this moment.
        stale: (P,) pairs whose transfer began to move, or lost company, at this moment.
        changed: (H,) groups of which a device began or ended a computation at this moment.
    """

    ready: Ints
    newly_ready: Ints
    newly_done: Ints
    stale: Ints
    changed: Ints


class Trace(NamedTuple):
    """(n,) times of the actions, as in `RunResult`."""

    start_s: Floats
    end_s: Floats
    post_s: Floats
    posted_s: Floats


class State(NamedTuple):
    """What is run, and where everything stands; letters as in `Tasks` and `Paths`.

    Attributes:
        tasks: what is run.
        slowdown: as in `ContentionGroups`.
        counters: (C,) as they stand.
        devices: (D,) `DEVICE`.
        groups: (H,) `GROUP`.
        pairs: (P,) `PAIR`.
        gates: `GATE`.
        places: `PLACE`, pair after pair.
        links: (L,) `LINK`.
        hops: `HOP`, pair after pair.
        clock: (1,) `CLOCK`.
        connected: (P,) pairs whose transfers share links, as the last search found them.
        reached: (L,) the links that they are on.
        are_ready: (n,) whether the gradients of each all-reduce are there.
    """

    tasks: Tasks
    slowdown: Floats
    counters: Ints
    devices: Records
    groups: Records
    pairs: Records
    gates: Records
    places: Records
    links: Records
    hops: Records
    clock: Records
    connected: Ints
    reached: Ints
    are_ready: Kinds
    events: Events
    pending: Pending
    times: Trace


@njit
def run(tasks: Tasks, paths: Paths, contention: ContentionGroups) -> RunResult:
    """Runs lists until nothing more happens."""
    state = beginning(tasks, paths, contention)
    _take_events(state)
    at = np.zeros(len(state.devices), np.int64)
    done, sent, posted = (
        np.zeros(len(state.pairs), np.int64),
        np.zeros(len(state.pairs), np.int64),
        np.zeros(len(state.pairs), np.int64),
    )
    ended = True
    for device in range(len(state.devices)):
        at[device] = state.devices[device].at
        ended = ended and at[device] == tasks.start[device + 1]
    for p in range(len(state.pairs)):
        pair, first = state.pairs[p], tasks.known.first[p]
        done[p], sent[p], posted[p] = pair.next - first, pair.sent - first, pair.posted - first
        ended = ended and done[p] == sent[p] == posted[p]
    return RunResult(
        ended, at, done, sent, posted, state.times.start_s, state.times.end_s,
        state.times.post_s, state.times.posted_s,
    )  # fmt: skip


# Loops over single fields here, because numba takes seconds to compile those over whole columns.
@inner
def beginning(tasks: Tasks, paths: Paths, contention: ContentionGroups) -> State:
    """Everything before the first event."""
    num_devices, num_actions = len(tasks.start) - 1, len(tasks.kind)
    num_pairs, num_links = len(tasks.known.source), len(paths.link_bytes_per_s)
    num_groups = len(contention.slowdown)
    devices, pairs = np.zeros(num_devices, DEVICE), np.zeros(num_pairs, PAIR)
    gates, places = np.zeros(paths.num_gates, GATE), np.zeros(len(paths.place_gate), PLACE)
    links, hops = np.zeros(num_links, LINK), np.zeros(len(paths.hop_link), HOP)
    for d in range(num_devices):
        device = devices[d]
        device.at, device.end, device.waits = tasks.start[d], tasks.start[d + 1], -1
        device.group = contention.group[d]
        device.cut, device.end_cut = tasks.cuts.first[d], tasks.cuts.first[d + 1]
        device.stream = _next_sum(tasks.kind, device.at, device.end)
    groups = np.zeros(num_groups, GROUP)
    for group in range(num_groups):
        groups[group].first = -1
    if num_groups:
        for d in range(num_devices - 1, -1, -1):
            if devices[d].group >= 0:
                devices[d].next_in_group = groups[devices[d].group].first
                groups[devices[d].group].first = d
    for p in range(num_pairs):
        pair = pairs[p]
        pair.source, pair.target = tasks.known.source[p], tasks.known.target[p]
        pair.next = pair.sent = pair.posted = tasks.known.first[p]
        pair.end = tasks.known.first[p + 1]
        pair.latency_s, pair.bytes_per_s = paths.latency_s[p], paths.bytes_per_s[p]
        pair.place, pair.end_place = paths.first_place[p], paths.first_place[p + 1]
        pair.hop, pair.end_hop = paths.first_hop[p], paths.first_hop[p + 1]
        for place in range(pair.place, pair.end_place):
            places[place].gate, places[place].pair = paths.place_gate[place], p
        for hop in range(pair.hop, pair.end_hop):
            hops[hop].link, hops[hop].pair = paths.hop_link[hop], p
    for gate in range(paths.num_gates):
        gates[gate].head = -1
    for link in range(num_links):
        links[link].head, links[link].bytes_per_s = -1, paths.link_bytes_per_s[link]
    counters = np.zeros(len(tasks.counters), np.int64)
    for counter in range(len(counters)):
        counters[counter] = tasks.counters[counter]
    num_events = 2 * num_devices + num_pairs
    event_at = np.zeros(num_events, np.int64)
    for who in range(num_events):
        event_at[who] = -1
    return State(
        tasks=tasks, slowdown=contention.slowdown, counters=counters, devices=devices,
        groups=groups, pairs=pairs, gates=gates, places=places, links=links, hops=hops,
        clock=np.zeros(1, CLOCK), connected=np.zeros(num_pairs, np.int64),
        reached=np.zeros(num_links, np.int64), are_ready=np.zeros(num_actions, np.int8),
        events=Events(np.zeros(num_events), np.zeros(num_events, np.int64), event_at),
        pending=Pending(
            ready=np.zeros(num_devices, np.int64), newly_ready=np.zeros(num_pairs, np.int64),
            newly_done=np.zeros(num_pairs, np.int64), stale=np.zeros(num_pairs, np.int64),
            changed=np.zeros(num_groups, np.int64),
        ),
        times=Trace(
            np.zeros(num_actions), np.zeros(num_actions), np.zeros(num_actions),
            np.zeros(num_actions),
        ),
    )  # fmt: skip


@inlined
def _take_events(state: State) -> None:
    """Takes event after event until nothing more happens."""
    clock, num_devices, num_pairs = state.clock[0], len(state.devices), len(state.pairs)
    for device in range(num_devices):
        _wake(state, device)
    while True:
        while clock.ready:
            clock.ready -= 1
            advance(state, state.pending.ready[clock.ready])
        if not clock.events or state.events.time_s[0] > clock.now_s:
            # Nothing else happens at this moment, unless new speeds, rates or turns lead to it.
            if clock.changed:
                _update_speeds(state)
                continue
            if clock.stale:
                _update_rates(state)
                continue
            if clock.newly_ready or clock.newly_done:
                _start_queued(state)
                continue
            if not clock.events:
                break
        who = _next_event(state)
        if who < num_devices:
            finish(state, who)
        elif who < num_devices + num_pairs:
            _proceed(state, who - num_devices)
        else:
            _end_sum(state, who - num_devices - num_pairs)


# ----------------------------------------------------------------------------------- devices


@inlined
def advance(state: State, device: int) -> None:
    """Takes a device to its next action that takes time, and begins it if nothing is missing."""
    here, now_s = state.devices[device], state.clock[0].now_s
    while here.at < here.end:
        i = here.at
        kind = state.tasks.kind[i]
        if kind in (SEND, RECEIVE):
            if not here.posting:
                state.times.post_s[i] = now_s
                if state.tasks.duration_s[i] > 0.0:
                    here.posting = 1
                    _schedule_event(state, device, now_s + state.tasks.duration_s[i])
                    break
            here.posting = 0
            post(state, i)
            here.at += 1
        elif kind == COMPUTE and state.counters[state.tasks.known.counter[i]]:
            here.waits = state.tasks.known.counter[i]
            break
        elif kind == ALL_REDUCE:
            if here.stream <= i:
                here.waits = state.tasks.known.counter[i]
                _gradients_ready(state, device, i)
                break
            here.at += 1
        else:
            occupy(state, device, i)
            break


@inlined
def occupy(state: State, device: int, i: int) -> None:
    """Begins a computation or step."""
    here, now_s = state.devices[device], state.clock[0].now_s
    state.times.start_s[i] = now_s
    if here.group >= 0:
        here.computing, here.slow, here.left = 1, 0.0, _next_cut_s(state, device)
        _mark_changed(state, here.group, 1)
    else:
        state.times.end_s[i] = now_s + state.tasks.duration_s[i]
        _schedule_event(state, device, now_s + _next_cut_s(state, device))


@inlined
def _next_cut_s(state: State, device: int) -> float:
    """From the start of the computation or step that a device is at to its next cut, or to its end
    behind the last.
    """
    here = state.devices[device]
    if here.cut < here.end_cut and state.tasks.cuts.at[here.cut] == here.at:
        return float(state.tasks.cuts.after_s[here.cut])
    return float(state.tasks.duration_s[here.at])


@inlined
def finish(state: State, device: int) -> None:
    """The action that occupied a device has ended, or the posting of a send or receive has; or the
    action is at a cut.
    """
    here = state.devices[device]
    if not here.posting and here.cut < here.end_cut and state.tasks.cuts.at[here.cut] == here.at:
        _pass_cut(state, device)
        return
    if here.computing:
        here.computing = 0
        state.times.end_s[here.at] = state.clock[0].now_s
        _mark_changed(state, here.group, -1)
    if not here.posting:
        here.at += 1
    _wake(state, device)


@inlined
def _pass_cut(state: State, device: int) -> None:
    """Goes on with the computation that is at a cut."""
    here, now_s, cut = state.devices[device], state.clock[0].now_s, state.devices[device].cut
    here.cut += 1
    if here.computing:
        here.left, here.since_s = _next_cut_s(state, device) - state.tasks.cuts.after_s[cut], now_s
        _schedule_event(state, device, now_s + here.left * here.slow)
    else:
        _schedule_event(state, device, state.times.start_s[here.at] + _next_cut_s(state, device))
    _gradients_ready(state, device, state.tasks.cuts.of[cut])


@inlined
def _wake(state: State, device: int) -> None:
    """A device goes on at once."""
    clock = state.clock[0]
    state.pending.ready[clock.ready] = device
    clock.ready += 1


# ------------------------------------------------------------------------------- all-reduces


@inlined
def _next_sum(kind: Kinds, at: int, end: int) -> int:
    """The first all-reduce of a list from an action on, its end without one."""
    while at < end and kind[at] != ALL_REDUCE:
        at += 1
    return at


@inlined
def _gradients_ready(state: State, device: int, i: int) -> None:
    """The gradients of an all-reduce are there on a device."""
    if not state.are_ready[i]:
        state.are_ready[i] = 1
        state.times.post_s[i] = state.clock[0].now_s
        _join_all_reduce(state, device)


@inlined
def _join_all_reduce(state: State, device: int) -> None:
    """Enters the all-reduce at which the stream of a device stands, if its gradients are there; the
    last member begins it for all.
    """
    here = state.devices[device]
    if here.summing == OUTSIDE and here.stream < here.end and state.are_ready[here.stream]:
        here.summing = ENTERED
        counter = state.tasks.known.counter[here.stream]
        state.counters[counter] -= 1
        if not state.counters[counter]:
            for member in range(len(state.devices)):
                one = state.devices[member]
                if one.summing == ENTERED and state.tasks.known.counter[one.stream] == counter:
                    _begin_sum(state, member)


@inlined
def _begin_sum(state: State, device: int) -> None:
    """Begins the all-reduce at which the stream of a device stands."""
    here, now_s = state.devices[device], state.clock[0].now_s
    here.summing = SUMMING
    state.times.start_s[here.stream] = now_s
    state.times.end_s[here.stream] = now_s + state.tasks.duration_s[here.stream]
    stream = len(state.devices) + len(state.pairs) + device
    _schedule_event(state, stream, state.times.end_s[here.stream])


@inlined
def _end_sum(state: State, device: int) -> None:
    """The all-reduce of a device's stream has ended."""
    here = state.devices[device]
    counter = state.tasks.known.counter[here.stream]
    here.summing = OUTSIDE
    here.stream = _next_sum(state.tasks.kind, here.stream + 1, here.end)
    if here.waits == counter:
        here.waits = -1
        _wake(state, device)
    _join_all_reduce(state, device)


# ------------------------------------------------------------------------- contention groups


@inlined
def _mark_changed(state: State, index: int, more: int) -> None:
    """One more or less device of a group computes from now on."""
    clock, group = state.clock[0], state.groups[index]
    group.busy += more
    if not group.changed:
        group.changed = 1
        state.pending.changed[clock.changed] = index
        clock.changed += 1


@inlined
def _update_speeds(state: State) -> None:
    """At the end of a moment: new ends of the computations of all groups that changed."""
    clock = state.clock[0]
    for turn in range(clock.changed):
        group = state.groups[state.pending.changed[turn]]
        group.changed = 0
        slow, device = state.slowdown[state.pending.changed[turn], group.busy], group.first
        while device >= 0:
            if state.devices[device].computing:
                _change_speed(state, device, slow)
            device = state.devices[device].next_in_group
    clock.changed = 0


@inlined
def _change_speed(state: State, device: int, slow: float) -> None:
    """From now on, a computation takes `slow` times as long as alone; schedules its end."""
    here, now_s = state.devices[device], state.clock[0].now_s
    if slow != here.slow:
        if here.slow > 0.0:
            left = here.left - (now_s - here.since_s) / here.slow
            here.left = left if left > 0.0 else 0.0
        here.since_s, here.slow = now_s, slow
        _reschedule_event(state, device, now_s + here.left * slow)


# --------------------------------------------------------------------------------- transfers


@inlined
def post(state: State, i: int) -> None:
    """A send or receive is there for its other end to meet."""
    pair, counter = state.pairs[state.tasks.known.pair[i]], state.tasks.known.counter[i]
    state.times.posted_s[i] = state.clock[0].now_s
    if counter >= 0:
        state.counters[counter] += 1
    if state.tasks.kind[i] == SEND:
        pair.sent += 1
    else:
        pair.posted += 1
    match(state, state.tasks.known.pair[i])


@inlined
def match(state: State, p: int) -> None:
    """Begins the next transfer of a pair, or queues it at its gates, if both ends have posted it
    and none is under way.
    """
    pair = state.pairs[p]
    posted = pair.next < pair.sent and pair.next < pair.posted
    # From the end on, the pair's sends and receives do not agree.
    if posted and pair.state == IDLE and pair.next < pair.end:
        if pair.place < pair.end_place:
            pair.state = QUEUED
            _mark_ready(state, p)
        else:
            begin(state, p)


@inlined
def begin(state: State, p: int) -> None:
    """Begins the next transfer of a pair."""
    pair, now_s = state.pairs[p], state.clock[0].now_s
    receive = state.tasks.known.receive[pair.next]
    state.times.start_s[receive] = now_s
    end_s = now_s + pair.latency_s
    if pair.hop < pair.end_hop:
        pair.state = LATENCY
    else:
        pair.state = MOVING
        end_s += state.tasks.size_bytes[receive] / pair.bytes_per_s
    _schedule_event(state, len(state.devices) + p, end_s)


@inlined
def _proceed(state: State, p: int) -> None:
    """The latency of a transfer is over, or the transfer is."""
    if state.pairs[p].state == LATENCY:
        _take_links(state, p)
    else:
        arrive(state, p)


@inlined
def arrive(state: State, p: int) -> None:
    """A transfer ends: whoever waits for it, or for its links, goes on."""
    pair = state.pairs[p]
    send, receive = state.tasks.known.send[pair.next], state.tasks.known.receive[pair.next]
    state.times.end_s[receive] = state.clock[0].now_s
    pair.state = IDLE
    pair.next += 1
    _leave_links(state, p)
    _leave_gates(state, p)
    lower(state, state.tasks.known.counter[receive], pair.target)
    if state.tasks.known.counter[send] >= 0:
        lower(state, state.tasks.known.counter[send], pair.source)
    match(state, p)


@inlined
def lower(state: State, counter: int, device: int) -> None:
    """Lowers a counter that a device may wait for."""
    state.counters[counter] -= 1
    if not state.counters[counter] and state.devices[device].waits == counter:
        state.devices[device].waits = -1
        _wake(state, device)


# ------------------------------------------------------------------------------------- gates


@inlined
def _mark_ready(state: State, p: int) -> None:
    """Puts a pair among those that got ready at this moment, which ascend."""
    fresh, clock = state.pending.newly_ready, state.clock[0]
    at = clock.newly_ready
    while at and fresh[at - 1] > p:
        fresh[at] = fresh[at - 1]
        at -= 1
    fresh[at] = p
    clock.newly_ready += 1


@inlined
def _start_queued(state: State) -> None:
    """At the end of a moment: the transfers that got ready join the queues of their gates, and
    those that are the first in all of their queues begin.
    """
    gates, places, clock = state.gates, state.places, state.clock[0]
    fresh = state.pending.newly_ready
    for turn in range(clock.newly_ready):
        p = fresh[turn]
        for place in range(state.pairs[p].place, state.pairs[p].end_place):
            gate = gates[places[place].gate]
            places[place].behind = -1
            if gate.head < 0:
                gate.head = place
            else:
                places[gate.tail].behind = place
            gate.tail = place
    # Only at the gates of these pairs can another transfer be the first now.
    for turn in range(clock.newly_done + clock.newly_ready):
        p = (
            state.pending.newly_done[turn]
            if turn < clock.newly_done
            else fresh[turn - clock.newly_done]
        )
        for place in range(state.pairs[p].place, state.pairs[p].end_place):
            head = gates[places[place].gate].head
            if head >= 0:
                _take_turn(state, places[head].pair)
    clock.newly_ready = clock.newly_done = 0


@inlined
def _take_turn(state: State, p: int) -> None:
    """Begins a transfer that is queued if it is the first in all of its queues."""
    pair = state.pairs[p]
    first = pair.state == QUEUED
    for place in range(pair.place, pair.end_place):
        first = first and state.gates[state.places[place].gate].head == place
    if first:
        begin(state, p)


@inlined
def _leave_gates(state: State, p: int) -> None:
    """Takes a transfer, which is the first in all of its queues, out of them."""
    pair, clock = state.pairs[p], state.clock[0]
    for place in range(pair.place, pair.end_place):
        state.gates[state.places[place].gate].head = state.places[place].behind
    if pair.place < pair.end_place:
        state.pending.newly_done[clock.newly_done] = p
        clock.newly_done += 1


# ------------------------------------------------------------------------------ shared links


@inlined
def _take_links(state: State, p: int) -> None:
    """Puts a transfer that begins to move on the links of its route."""
    pair, hops, links = state.pairs[p], state.hops, state.links
    pair.state = MOVING
    pair.rate, pair.since_s = 0.0, state.clock[0].now_s
    pair.left = state.tasks.size_bytes[state.tasks.known.receive[pair.next]]
    for h in range(pair.hop, pair.end_hop):
        link = links[hops[h].link]
        link.load += 1
        hops[h].before, hops[h].after = -1, link.head
        if link.head >= 0:
            hops[link.head].before = h
        link.head = h
    _mark_stale(state, p)


@inlined
def _leave_links(state: State, p: int) -> None:
    """Takes a transfer that has ended off the links of its route."""
    pair, hops, links = state.pairs[p], state.hops, state.links
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
            _mark_stale(state, hops[link.head].pair)


@inlined
def _mark_stale(state: State, p: int) -> None:
    """The rate of a transfer may change. Where it ends at the same moment, another one on each of
    its links is marked instead.
    """
    clock = state.clock[0]
    if not state.pairs[p].stale:
        state.pairs[p].stale = 1
        state.pending.stale[clock.stale] = p
        clock.stale += 1


@inlined
def _update_rates(state: State) -> None:
    """At the end of a moment: new rates for all transfers whose rate is stale, and for all that
    share links with them, directly or through others.
    """
    pairs, clock = state.pairs, state.clock[0]
    earlier = clock.searches
    for t in range(clock.stale):
        p = state.pending.stale[t]
        pairs[p].stale = 0
        # A search for another one of them may have reached it: then it has its rate.
        if pairs[p].state == MOVING and pairs[p].search <= earlier:
            clock.searches += 1
            num_pairs, num_links = _connected_transfers(state, p, clock.searches)
            _max_min_rates(state, num_pairs, num_links, clock.searches)
    clock.stale = 0


@inlined
def _connected_transfers(state: State, p: int, search: int) -> tuple[int, int]:
    """Finds the transfers that share links with one, directly or through others, and the links that
    they are on; they are left in `connected` and `reached`.

    Returns:
        how many transfers and how many links there are.
    """
    pairs, hops, links = state.pairs, state.hops, state.links
    num_pairs, num_links, looked = 1, 0, 0
    state.connected[0], pairs[p].search = p, search
    while looked < num_pairs:
        pair = pairs[state.connected[looked]]
        looked += 1
        for h in range(pair.hop, pair.end_hop):
            link = links[hops[h].link]
            if link.search == search:
                continue
            link.search, link.room, link.open = search, link.bytes_per_s, link.load
            state.reached[num_links] = hops[h].link
            num_links += 1
            other = link.head
            while other >= 0:
                if pairs[hops[other].pair].search != search:
                    pairs[hops[other].pair].search = search
                    state.connected[num_pairs] = hops[other].pair
                    num_pairs += 1
                other = hops[other].after
    return num_pairs, num_links


@inlined
def _max_min_rates(state: State, num_pairs: int, num_links: int, search: int) -> None:
    """Max-min fair rates of connected transfers, by progressive filling: the link with the smallest
    share per transfer gives that share to all its transfers, which then take it from their other
    links, and so on.
    """
    pairs, hops, links = state.pairs, state.hops, state.links
    while True:
        full, smallest = -1, np.inf
        for turn in range(num_links):
            one = state.reached[turn]
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
                _change_rate(state, p, smallest)
            h = hops[h].after


@inlined
def _change_rate(state: State, p: int, rate: float) -> None:
    """Gives a transfer a rate from now on, and schedules its end."""
    pair, now_s = state.pairs[p], state.clock[0].now_s
    if rate != pair.rate:
        left = pair.left - pair.rate * (now_s - pair.since_s)
        pair.left = left if left > 0.0 else 0.0
        pair.since_s, pair.rate = now_s, rate
        _reschedule_event(state, len(state.devices) + p, now_s + pair.left / rate)


# ------------------------------------------------------------------------------------ events


@inlined
def _schedule_event(state: State, who: int, time_s: float) -> None:
    """Puts the event of a device or transfer that has none into the heap."""
    clock = state.clock[0]
    clock.events += 1
    _sift_up(state, clock.events - 1, who, time_s)


@inlined
def _reschedule_event(state: State, who: int, time_s: float) -> None:
    """Moves the event of a device or transfer, or puts it into the heap if it has none."""
    clock = state.clock[0]
    if state.events.at[who] < 0:
        clock.events += 1
        state.events.at[who] = clock.events - 1
    _sift_up(state, state.events.at[who], who, time_s)
    _sift_down(state, state.events.at[who])


@inlined
def _sift_up(state: State, at: int, who: int, time_s: float) -> None:
    """Puts an event at a position of the heap, or further up while those above are later."""
    event_s, event_of, event_at = state.events.time_s, state.events.who, state.events.at
    while at and event_s[(at - 1) >> 1] > time_s:
        above = (at - 1) >> 1
        event_s[at], event_of[at] = event_s[above], event_of[above]
        event_at[event_of[at]] = at
        at = above
    event_s[at], event_of[at], event_at[who] = time_s, who, at


@inlined
def _next_event(state: State) -> int:
    """Takes the first event out of the heap, at its time; the device or transfer that it is of."""
    event_s, event_of, event_at = state.events.time_s, state.events.who, state.events.at
    clock, who = state.clock[0], int(event_of[0])
    clock.now_s = event_s[0]
    clock.events -= 1
    event_at[who] = -1
    if clock.events:
        event_s[0], event_of[0] = event_s[clock.events], event_of[clock.events]
        event_at[event_of[0]] = 0
        _sift_down(state, 0)
    return who


@inlined
def _sift_down(state: State, at: int) -> None:
    """Moves an event of the heap down while one below it is earlier."""
    event_s, event_of, event_at = state.events.time_s, state.events.who, state.events.at
    time_s, who, size = event_s[at], event_of[at], state.clock[0].events
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
